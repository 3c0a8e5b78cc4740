package watchdog

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
)

// Bounds for the end of a replica, after its calls have been answered.
const (
	lastAnswers = 2 * time.Second // for sending the last bytes
	// For the program to end; the KeysManager may wait for less time.
	lastWork = 10 * time.Second
)

// Run runs the replica. It starts the program, sends Hello when the program is ready, and answers
// calls until ctx ends or the dispatcher drains the replica. If the program ends by itself, this
// process ends in the same way, and Run does not return. r starts the program; the caller closes r.
func Run(ctx context.Context, r sandbox.Runtime) error {
	c, err := parse(os.Environ())
	if err != nil {
		return err
	}
	for _, name := range []string{"max_inflight", "exec_timeout"} { // package stage reads these
		if err := os.Setenv(name, c.env[name]); err != nil {
			return err
		}
	}
	w := &watchdog{c: &c, runtime: r, holds: newHolds(ctx.Done())}
	if needed, err := w.await(ctx, os.Getenv(wire.EnvSpare)); err != nil || !needed {
		return err
	}
	err = stage.Run(ctx, w.hooks())
	w.stop()
	return err
}

type watchdog struct {
	c         *config
	runtime   sandbox.Runtime
	child     *child       // nil: one process per request
	room      sandbox.Room // in which those processes run; nil: in none
	begun     *child       // started by await; nil: not yet
	stopping  chan struct{}
	watched   chan struct{} // closed when nobody watches the child any more
	function  http.Handler
	forget    func() // closes idle connections
	exchanges *exchanges
	holds     *holds
}

// hooks returns the hooks of the replica. Programs take requests and no activations, so each call
// is a batch of its own, whatever the function declares.
func (w *watchdog) hooks() stage.Hooks {
	return stage.Hooks{Place: w.place, Infer: w.infer, Slots: w.c.slots, MaxBatch: 1}
}

// place starts the program and waits until it is ready.
func (w *watchdog) place(ctx context.Context, r *stage.Replica) error {
	w.forget = func() {}
	switch w.c.mode {
	case modeStatic:
		h, root, err := static(w.c.image.Root, w.c.static)
		if err != nil {
			return err
		}
		w.function, w.forget = h, func() { _ = root.Close() } // opened for reading only
	case modeHTTP:
		p := w.begun
		if p == nil {
			var err error
			if p, err = startChild(ctx, w.runtime, w.c); err != nil {
				return err
			}
		}
		if err := p.wait(ctx, w.c.ready); err != nil {
			p.kill()
			<-p.gone
			return err
		}
		w.child = p
		w.function, w.forget = proxy(p, w.c.slots, w.c.read)
		w.function = w.holds.handler(w.function)
	default:
		runs := w.runtime
		if apart, ok := w.runtime.(sandbox.Apart); ok {
			var err error
			if w.room, err = apart.Room(ctx, w.c.command()); err != nil {
				return err
			}
			runs = w.room
		}
		w.function = &forker{c: w.c, runtime: runs, log: r.Log}
	}
	w.function = bounded(w.c.exec, w.function)
	w.exchanges = newExchanges(withTimeoutHeader(w.function), w.c.slots, w.c.read, w.c.write)
	w.exchanges.relay = w.c.relay
	if w.child != nil || w.room != nil {
		w.stopping, w.watched = make(chan struct{}), make(chan struct{})
		go w.watch() // stop waits for it
	}
	return nil
}

// watch ends this process when the program ends by itself. A replica without its program is
// useless, and its calls can be tried elsewhere.
func (w *watchdog) watch() {
	defer close(w.watched)
	ctx, cancel := context.WithCancel(context.Background())
	ill := make(chan error, 1)
	var checks sync.WaitGroup
	defer checks.Wait() // runs after cancel
	defer cancel()
	if w.c.health != "" && w.child != nil {
		checks.Go(func() {
			if err := w.child.check(ctx, w.c.health, w.c.delay, w.c.period); err != nil {
				ill <- err
			}
		})
	}
	var taken, gone chan struct{}
	var ended <-chan struct{}
	if w.child != nil {
		gone = w.child.gone
		if w.child.guard != nil {
			taken = w.child.guard.taken
		}
	}
	if w.room != nil {
		ended = w.room.Ended()
	}
	select {
	case <-w.stopping:
	case <-ended:
		exitLike(unix.WaitStatus(unix.SIGKILL))
	case <-taken:
		ctx, cancel := context.WithTimeout(ctx, lastMoment)
		w.exchanges.close(ctx) // these exchanges have been told to end
		cancel()
		fmt.Fprintln(os.Stderr, "watchdog:", w.child.guard.why)
		os.Exit(1)
	case <-gone:
		exitLike(w.child.status)
	case err := <-ill:
		fmt.Fprintln(os.Stderr, "watchdog:", err)
		os.Exit(1)
	}
}

// exitLike ends this process in the same way as the program has ended. So the cause is reported as
// if there were no watchdog, because the last line on stderr is the program's own.
func exitLike(s unix.WaitStatus) {
	if s.Signaled() {
		if s.Signal() == unix.SIGKILL {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		fmt.Fprintln(os.Stderr, "watchdog: the function's program was killed by "+unix.SignalName(s.Signal()))
		os.Exit(1)
	}
	if s.ExitStatus() == 0 {
		fmt.Fprintln(os.Stderr, "watchdog: the function's program ended by itself; it must serve until SIGTERM")
		os.Exit(1)
	}
	os.Exit(s.ExitStatus())
}

// infer runs one call. It returns when the program has ended the call.
func (w *watchdog) infer(_ context.Context, calls []*stage.Call) []stage.Result {
	c := calls[0]
	defer w.holds.wait(c)
	direct := false
	for _, h := range c.Header {
		if h.Name != task.HeaderDirect {
			continue
		}
		if request := carried(c); h.Value != "" && request != nil {
			return []stage.Result{w.exchanges.carry(c, h.Value, request)}
		}
		if h.Value != "" {
			return []stage.Result{{Err: w.exchanges.do(c, h.Value)}}
		}
		direct = true
	}
	return []stage.Result{call(c, w.function, direct)}
}

// stop sends the last answers and ends the program.
func (w *watchdog) stop() {
	if w.exchanges != nil {
		ctx, cancel := context.WithTimeout(context.Background(), lastAnswers)
		w.exchanges.close(ctx)
		cancel()
	}
	if w.stopping != nil {
		close(w.stopping)
		<-w.watched
	}
	if w.room != nil {
		w.room.Close()
	}
	if w.child != nil {
		ctx, cancel := context.WithTimeout(context.Background(), lastWork)
		w.child.stop(ctx)
		cancel()
	}
	if w.forget != nil {
		w.forget()
	}
	w.holds.close()
}

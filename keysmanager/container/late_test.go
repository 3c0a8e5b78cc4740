package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// startLate begins a start, whose result it returns on a channel.
func startLate(ctx context.Context, r *Runtime) <-chan error {
	failed := make(chan error, 1)
	go func() { // the test waits for it
		_, err := r.Start(ctx, sleeper())
		failed <- err
	}()
	return failed
}

func within[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(3 * time.Minute):
		t.Fatal(what + ": not within three minutes")
	}
	return v
}

// openAt returns a Runtime at a Proxy.
func openAt(t *testing.T, s *containerdtest.Server, p *containerdtest.Proxy) *Runtime {
	t.Helper()
	cfg := config(t, s)
	cfg.Address = p.Address
	r, err := openConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestStartsEndWithTheirContext cancels starts while containerd does not answer. What containerd
// makes after that is removed.
func TestStartsEndWithTheirContext(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	why := errors.New("its request has ended")
	for _, method := range []string{"Containers/Create", "Tasks/Create", "Tasks/Start"} {
		for name, hold := range map[string]func(string) *containerdtest.Held{"request": p.HoldRequest, "answer": p.HoldAnswer} {
			t.Run(method+" "+name, func(t *testing.T) {
				held := hold(method)
				defer held.Release()
				ctx, cancel := context.WithCancelCause(t.Context())
				failed := startLate(ctx, r)
				within(t, "the call", held.Came)
				cancel(why)
				err := within(t, "the end of the start", failed)
				if !errors.Is(err, why) || !strings.Contains(err.Error(), "in a container: containerd does not answer: ") {
					t.Errorf("%v, want %q and that containerd does not answer", err, why)
				}
				if n := len(r.starting); n != 1 {
					t.Errorf("containerd works on %d starts, want one that it has not answered", n)
				}
				held.Release()
				nothingLeft(t, s)
				proctest.Until(t, "containerd works on nothing", func() bool { return len(r.starting) == 0 })
			})
		}
	}
	start(t, r, sleeper())
	r.Close()
	nothingLeft(t, s)
}

// TestCloseWaitsForCallsOfEndedStarts closes a Runtime while containerd still makes a task that
// nobody wants.
func TestCloseWaitsForCallsOfEndedStarts(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	held := p.HoldAnswer("Tasks/Create")
	ctx, cancel := context.WithCancel(t.Context())
	failed := startLate(ctx, r)
	within(t, "the call", held.Came)
	cancel()
	if err := within(t, "the end of the start", failed); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that its context has ended", err)
	}
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }() // the test waits for it
	within(t, "the beginning of Close", r.open.Done())
	held.Release()
	within(t, "the end of Close", closed)
	if have := left(t, s); len(have) > 0 {
		t.Errorf("%v is left", have)
	}
}

// TestTasksThatAppearLateAreRemoved has containerd wait for a shim after the call has got no
// answer. Until the shim has begun, containerd knows no task that could be removed.
func TestTasksThatAppearLateAreRemoved(t *testing.T) {
	gate := slowShims(t)
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	defer r.Close()
	r.patience = 10 * time.Second
	created, removed := p.HoldAnswer("Tasks/Create"), p.HoldRequest("Containers/Delete")
	failed := startLate(t.Context(), r)
	shim := openGate(t, gate)
	if err := within(t, "the end of the start", failed); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want that containerd does not answer", err)
	}
	proctest.Until(t, "the call ends", func() bool { return len(r.starting) == 0 })
	_ = shim.Close() // it goes on
	within(t, "the task", created.Came)
	removed.Release() // only now: the container must not be removed before its task
	nothingLeft(t, s)
}

// slowShims makes the shims of the containerd that starts next wait until a pipe is opened for
// writing and closed again.
func slowShims(t *testing.T) (gate string) {
	t.Helper()
	return slowly(t, shimProgram, "start", "cat $GATE; exec $PROGRAM \"$@\"")
}

const shimProgram = "containerd-shim-runc-v2"

// slowly replaces a program of the containerd that starts next: calls with a command run a script.
// The script may wait until the pipe $GATE is opened for writing and closed again.
func slowly(t *testing.T, name, command, script string) (gate string) {
	t.Helper()
	const folder = "STAGECOACH_CONTAINERD"
	find := func(program string) string {
		if dir := os.Getenv(folder); dir != "" && program != "runc" {
			return filepath.Join(dir, program)
		}
		path, err := exec.LookPath(program)
		if err != nil {
			t.Skip(err) // containerdtest fails for it
		}
		return path
	}
	dir := t.TempDir()
	gate = filepath.Join(dir, "gate")
	text := fmt.Sprintf("#!/bin/sh\nGATE=%s PROGRAM=%s\ncase \" $* \" in *' %s '*) %s;; *) exec $PROGRAM \"$@\";; esac\n", gate, find(name), command, script)
	errs := []error{unix.Mkfifo(gate, 0o600), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755)}
	for _, program := range []string{"containerd", shimProgram} {
		if program != name {
			errs = append(errs, os.Symlink(find(program), filepath.Join(dir, program)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Setenv(folder, dir)
	return gate
}

// openGate waits until a program of slowly waits, and returns the file whose Close ends that.
func openGate(t *testing.T, gate string) *os.File {
	t.Helper()
	waits := make(chan *os.File, 1)
	go func() { // ends with the test
		f, err := os.OpenFile(gate, os.O_WRONLY, 0) // returns when the program waits
		if err != nil {
			t.Error(err)
		}
		waits <- f
	}()
	return within(t, "the program that waits", waits)
}

// TestRemovalsThatFailLeaveRoomForOthers has as many removals fail as containerd works on at once.
// Those of processes that the kernel cannot end fail again and again.
func TestRemovalsThatFailLeaveRoomForOthers(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	n := cap(r.removing)
	var all []*process
	for range n {
		all = append(all, start(t, r, sleeper()))
	}
	was := r.remove
	gone, giveUp := context.WithCancel(was)
	giveUp()
	r.remove = gone
	for _, process := range all {
		end(t, process)
		process.Forget()
	}
	failed := func() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.failed) }
	proctest.Until(t, "all removals fail", func() bool { return failed() == n })
	r.removes.Wait()
	r.remove = was
	var held []*containerdtest.Held
	for range n / 2 {
		held = append(held, p.HoldRequest("Containers/Get"))
	}
	r.retry(n / 2)
	for _, h := range held {
		within(t, "a removal", h.Came)
	}
	r.retry(n / 2) // of the next start
	if left := failed(); left != n-n/2 {
		t.Errorf("%d removals wait for their next try, want half of %d", left, n)
	}
	other := start(t, r, sleeper())
	end(t, other)
	other.Forget()
	proctest.Until(t, "another container is removed", func() bool {
		_, err := os.Stat(other.folder.path)
		return errors.Is(err, os.ErrNotExist)
	})
	for _, h := range held {
		h.Release()
	}
	r.Close()
	nothingLeft(t, s)
}

// TestCloseDoesNotWaitForAStatus closes a Runtime whose container has ended in a way that only
// containerd knows, while containerd is away.
func TestCloseDoesNotWaitForAStatus(t *testing.T) {
	s := containerdtest.Start(t)
	cfg, log := config(t, s), &proctest.Buffer{}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	r, err := openConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, r, sleeper())
	s.Kill()
	p.killInit()
	r.giveUp() // as Close does once containerd has had enough time
	if status := p.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("%#x, want that SIGKILL is assumed", status)
	}
	r.Close()
	if text := log.String(); strings.Contains(text, "does not say how") {
		t.Errorf("want no wait for containerd:\n%s", text)
	}
	s.Run()
	next := open(t, s)
	defer next.Close()
	if err := errors.Join(next.removeContainer(t.Context(), p.id), p.folder.remove()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, s, p.id)
}

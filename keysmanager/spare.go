package keysmanager

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// spare is a process that waits to become a replica of its function. It is all that the replica
// will be but for its name: in its cgroup, network, user and container. If the daemon ends, it
// ends, too.
type spare struct {
	entry    string // of the warden
	function string
	pid      int
	held     *resources.Reservation
	output   *sandbox.Output
	replica  atomic.Pointer[string] // the name for its lines
	conn     *net.UnixConn          // the dispatcher's end of its stage socket
	holder   sandbox.Holder
	ended    <-chan warden.Exit
	secrets  string // stamp of the folder with its secrets, before it was made

	taken    chan struct{} // closed by the start that takes it
	unwanted chan struct{} // closed when it is not wanted any more
	left     chan struct{} // closed when it has ended, or is the business of the start that takes it
	dead     bool          // it has ended by itself; guarded by spares.mu until left is closed
}

// Bounds of the waits for spares.
const (
	spareReady = time.Minute      // for its container
	spareGoes  = 5 * time.Second  // then the start goes on without it
	spareEnds  = 10 * time.Second // before it is killed
)

// newSpare makes a spare of a function.
func (l *starter) newSpare(ctx context.Context, s node.Spec, image sandbox.Image) (_ *spare, err error) {
	one := &spare{
		entry: zygote.NewEntry("spare"), function: s.Function, held: l.pool.New(), secrets: stamp(s.Secrets),
		taken: make(chan struct{}), unwanted: make(chan struct{}), left: make(chan struct{}),
	}
	one.replica.Store(&one.entry)
	conn, theirs, err := zygote.Socketpair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	holder, its, err := sandbox.NewHolder()
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	defer its.Close()
	one.conn, one.holder = conn, holder
	if one.output, err = sandbox.NewOutput(func(stream, line string) { l.cfg.Output(s.Function, *one.replica.Load(), stream, line) }); err != nil {
		_ = conn.Close()
		holder.Close()
		return nil, err
	}
	env := environmentOf(s)
	env[wire.EnvReplica], env[wire.EnvFunction], env[resources.EnvDevices] = one.entry, s.Function, ""
	one.pid, one.ended, err = l.begin(ctx, s, image, &beginning{
		entry: one.entry, held: one.held, output: one.output, env: env, files: []*os.File{theirs, its}, spare: true, meta: func() []byte { return encode(meta{Spare: true}) },
	})
	one.output.Started()
	if err != nil {
		one.leave()
		one.held.Release()
		return nil, err
	}
	_ = its.Close() // so that an end of the process closes the socket
	stop := context.AfterFunc(ctx, holder.Close)
	err = holder.Ready(time.Now().Add(spareReady))
	stop()
	if err != nil {
		l.endSpare(one)
		if last := one.output.LastError(); last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
		return nil, err
	}
	l.ends.Go(func() { l.watchSpare(one) })
	return one, nil
}

// close closes the sockets of a spare, which ends it.
func (one *spare) close() {
	one.holder.Close()
	_ = one.conn.Close() // nothing is on its way
}

// leave closes all that this process has of a spare.
func (one *spare) leave() {
	one.close()
	one.output.Abandon()
}

// watchSpare ends a spare when it is not wanted any more, until a start takes it.
func (l *starter) watchSpare(one *spare) {
	defer close(one.left)
	select {
	case <-one.taken:
	case <-one.unwanted:
		l.endSpare(one)
	case <-one.ended:
		l.spares.lost(one)
		l.bury(one)
	case <-l.spares.m.detached:
		one.leave()
	}
}

// endSpare ends a spare. It returns when that has ended, or is left to the warden.
func (l *starter) endSpare(one *spare) {
	one.close()
	for kill := time.After(spareEnds); ; {
		select {
		case <-one.ended:
			l.bury(one)
			return
		case <-kill:
			// This fails only if the warden is gone, and then the process is gone, too.
			_ = l.warden.Signal(one.entry, syscall.SIGKILL)
		case <-l.spares.m.detached:
			one.leave()
			return
		}
	}
}

// bury releases what an ended spare had.
func (l *starter) bury(one *spare) {
	one.close()
	one.output.Finish(resources.LinesMoment)
	one.held.Release()
	l.pool.Drop(one.entry)
}

// become makes a spare the process of p.
func (l *starter) become(o node.Order, p *process, one *spare) (wire.Socket, error) {
	begin := time.Now()
	one.replica.Store(&o.Replica)
	if err := one.holder.Go(map[string]string{wire.EnvReplica: o.Replica}, begin.Add(spareGoes)); err != nil {
		l.ends.Go(func() { l.endSpare(one) })
		return nil, err
	}
	one.holder.Close()
	p.held.Take(one.held, o.CPUMilli)
	p.entry, p.output, p.pid, p.path = one.entry, one.output, one.pid, PathSpare
	p.phase("spawn", time.Since(begin))
	l.keep(p)
	l.ends.Go(func() { p.reportEnd(one.ended) })
	return wire.NewSocket(one.conn), nil
}

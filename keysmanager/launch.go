package keysmanager

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// maxLaunches bounds how many replicas of one function are launched at the same time. Further
// replicas of that function wait in order of arrival, without open descriptors. Replicas of other
// functions do not wait for them.
const maxLaunches = 16

// gate lets at most maxLaunches launches of a function run at the same time.
type gate struct {
	turns chan struct{}
	users int // starts that use the gate; guarded by starter.mu
}

// enter waits for a turn of a function. leave ends the turn.
func (l *starter) enter(ctx context.Context, function string) (leave func(), err error) {
	l.mu.Lock()
	g := l.gates[function]
	if g == nil {
		g = &gate{turns: make(chan struct{}, maxLaunches)}
		l.gates[function] = g
	}
	g.users++
	l.mu.Unlock()
	gone := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if g.users--; g.users == 0 {
			delete(l.gates, function)
		}
	}
	select {
	case g.turns <- struct{}{}: // the longest waiting start is first
		return func() { <-g.turns; gone() }, nil
	case <-ctx.Done():
		gone()
		return nil, fmt.Errorf("%d starts of the function are before it: %w", maxLaunches, context.Cause(ctx))
	}
}

// launch creates the descriptors of a replica's process, calls run to start it in its cgroup, and
// returns the dispatcher's end of its stage socket.
func (l *starter) launch(ctx context.Context, o node.Order, p *process, run func(socket *os.File) error) (wire.Socket, error) {
	leave, err := l.enter(ctx, o.Spec.Function)
	if err != nil {
		return nil, err
	}
	defer leave()
	conn, theirs, err := zygote.Socketpair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if p.output, err = sandbox.NewOutput(func(stream, line string) { l.cfg.Output(o.Spec.Function, o.Replica, stream, line) }); err != nil {
		_ = conn.Close()
		return nil, err
	}
	err = run(theirs)
	p.output.Started()
	if err != nil {
		_ = conn.Close()
		p.output.Abandon()
		return nil, err
	}
	return wire.NewSocket(conn), nil
}

// timing records when the start of a replica began and how long its phases took. The goroutine of
// the start owns it until the replica runs. After that, it is only read.
type timing struct {
	started time.Time
	phases  []node.Phase
	told    func(node.Phase) // is called with each phase that has ended; nil: nobody is told
}

// ordered records the phase "order": the time from the order's arrival until the fork or spawn
// begins, without the load of parameters. load is how long that load took; 0 if they were in
// memory.
func (t *timing) ordered(load time.Duration) {
	t.phases = nil // an attempt on another path may have recorded some
	t.phase("order", time.Since(t.started)-load)
	if load > 0 {
		t.phase("load", load)
	}
}

// phase records a part of the start, and tells it to whoever has asked for the phases.
func (t *timing) phase(name string, took time.Duration) {
	t.phases = append(t.phases, node.Phase{Name: name, Took: took})
	if t.told != nil {
		t.told(node.Phase{Name: name, Took: took})
	}
}

package keysmanager

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// maxLaunches is how many replicas of one function are launched at a time. The others wait for their turn, in the order in
// which they came and without descriptors; other functions do not wait for them.
const maxLaunches = 16

// gate lets maxLaunches launches of a function through.
type gate struct {
	turns chan struct{}
	users int // starts that have asked for it; guarded by starter.mu
}

// enter waits for a turn of a function, which ends with leave.
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
	case g.turns <- struct{}{}: // who has waited longest is served first
		return func() { <-g.turns; gone() }, nil
	case <-ctx.Done():
		gone()
		return nil, fmt.Errorf("%d starts of the function are before it: %w", maxLaunches, context.Cause(ctx))
	}
}

// launch makes what a replica's process gets, has run start it in its cgroup, and returns the dispatcher's end of its stage socket.
func (l *starter) launch(ctx context.Context, o node.Order, p *process, run func(socket *os.File) error) (*net.UnixConn, error) {
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
	return conn, nil
}

// ordered notes how long it took until p's process was ordered, less what its parameters took to load; 0: they were there.
func (p *process) ordered(load time.Duration) {
	p.phases = nil // an attempt on another path may have had some
	p.phase("order", time.Since(p.started)-load)
	if load > 0 {
		p.phase("load", load)
	}
}

// phase notes a part of p's start, and tells it to who has asked for that.
func (p *process) phase(name string, took time.Duration) {
	p.phases = append(p.phases, node.Phase{Name: name, Took: took})
	if p.told != nil {
		p.told(node.Phase{Name: name, Took: took})
	}
}

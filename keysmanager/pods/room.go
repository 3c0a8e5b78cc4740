package pods

import (
	"context"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/guest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// room is a pod in which several programs run.
type room struct{ *process }

// Room implements sandbox.Apart.
func (r *Runtime) Room(ctx context.Context, c sandbox.Command) (sandbox.Room, error) {
	var p *process
	err := r.inTurn(ctx, c, func(ctx context.Context) (err error) {
		if p, err = r.prepare(ctx, c); err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, p.conn.Close)
		defer stop()
		if err := p.conn.Room(deadline(ctx)); err != nil {
			p.Forget()
			return err
		}
		p.ended = make(chan struct{})
		r.tasks.Go(func() { defer close(p.ended); p.status = p.awaitEnd(p.conn.Status()) })
		return r.adopt(p)
	})
	if err != nil {
		return nil, err
	}
	return room{p}, nil
}

// Ended implements sandbox.Room.
func (m room) Ended() <-chan struct{} { return m.ended }

// Close implements sandbox.Runtime.
func (m room) Close() { m.Forget() }

// Start implements sandbox.Runtime.
func (m room) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	o, err := outline(c)
	if err != nil {
		return nil, err
	}
	conn, err := m.conn.Open()
	if err != nil {
		return nil, err
	}
	g, err := guest.Begin(ctx, conn, c, o, m.pid, deadline(ctx))
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &member{conn, g}, nil
}

// member is a program in a room.
type member struct {
	conn  *entry.Conn
	guest *guest.Guest
}

// PID implements sandbox.Process.
func (p *member) PID() int { return p.guest.PID() }

// Signal implements sandbox.Process.
func (p *member) Signal(s syscall.Signal) error { return p.guest.Signal(s) }

// Wait implements sandbox.Process. If the pod has ended, SIGKILL is assumed.
func (p *member) Wait() unix.WaitStatus {
	status, err := p.conn.Status()
	if err != nil {
		status = unix.WaitStatus(unix.SIGKILL)
	}
	return status
}

// Forget implements sandbox.Process.
func (p *member) Forget() {
	p.conn.Close()
	p.guest.Close()
}

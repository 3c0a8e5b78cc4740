package zygote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Load starts a zygote process for a function and waits until it has loaded. limits are those of
// its first spare child. began is called with the zygote's pid.
func Load(ctx context.Context, h *Host, cmd sandbox.Command, key Key, t resources.Tenant, limits resources.Limits, began func(pid int)) (*Zygote, error) {
	z := newZygote(h, key, NewEntry("zygote"), t.Function)
	z.Family.limits = limits
	begin := time.Now()
	if err := z.start(ctx, cmd, t); err != nil {
		return nil, err
	}
	began(z.PID)
	if err := z.awaitReady(ctx); err != nil {
		return nil, z.failed(err)
	}
	z.Loaded, z.Load = time.Now(), time.Since(begin)
	z.held.KeepPacked()
	z.Bytes, _ = sandbox.PSS(z.PID) // 0 if it has ended
	z.measureShared()
	if err := h.Warden.Put(z.Entry, h.Describe(z.Describe())); err != nil {
		h.Log.Warn("description of a zygote is not stored: another daemon would not adopt it", "function", t.Function, "error", err)
	}
	go z.read() // ends with the process, or with Leave; gone is closed then
	return z, nil
}

// start starts the process of a zygote that no other goroutine knows yet. If it returns an error,
// it has cleaned up.
func (z *Zygote) start(ctx context.Context, cmd sandbox.Command, t resources.Tenant) (err error) {
	ours, theirs, err := pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return fmt.Errorf("zygote's %w", err)
	}
	defer theirs.Close()
	defer ours.Close() // the warden and conn have their own copies
	conn, err := unixConn(ours)
	if err != nil {
		return err
	}
	z.control.conn = conn
	if z.output, err = sandbox.NewOutput(z.prints); err != nil {
		_ = conn.Close()
		return err
	}
	groups, err := z.held.Enter(path.Join(z.Entry, z.Entry), z.Function, z.host.Limits)
	defer resources.CloseFiles(groups)
	if err == nil {
		cmd.Groups = groups
		cmd.Env[wire.EnvZygoteFD] = "3"
		cmd.Files, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, z.output.Stdout, z.output.Stderr
		z.ended = z.host.Exits.Await(z.Entry)
		if z.PID, err = z.held.Start(ctx, t, resources.Itself, warden.Process{
			Name: z.Entry, Meta: z.host.Describe(z.Describe()), Command: cmd, Keep: append([]*os.File{ours}, z.output.Readers()...), Idle: true,
		}); err != nil {
			z.host.Exits.Cancel(z.Entry)
		}
	}
	z.output.Started()
	if err != nil {
		_ = conn.Close()
		z.output.Abandon()
		z.held.Release()
	} else {
		z.pids = sandbox.PIDsOf(z.PID)
	}
	return err // theirs is closed, so the daemon notices if the zygote ends
}

// failed ends a zygote that does not load, and returns why it does not.
func (z *Zygote) failed(err error) error {
	z.Kill()
	status := <-z.ended
	_ = z.control.conn.Close()
	z.output.Finish(resources.LinesMoment)
	if errors.Is(err, errNotLoaded) {
		err = fmt.Errorf("%w: %w", err, z.held.Group().Explain(resources.EndingOf(status)))
	}
	z.held.Release()
	z.host.Pool.Drop(z.Entry)
	if last := z.output.LastError(); last != "" && !errors.As(err, new(said)) && !errors.As(err, new(Impossible)) {
		err = fmt.Errorf("%w: %w", err, resources.Printed(last))
	}
	return err
}

func (z *Zygote) awaitReady(ctx context.Context) error {
	conn := z.control.conn
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Now()) })
	defer stop()
	o, err := receive(conn, make([]byte, MaxOrder))
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("%s was ended: %w", z.Key.What(), context.Cause(ctx))
	case errors.Is(err, wire.ErrVersion):
		return fmt.Errorf("%s: %w; build its image again", z.Key.What(), err)
	case err != nil:
		return errNotLoaded
	case o.Kind == wire.ZygoteError && o.Unforkable:
		return Impossible{o.Text}
	case o.Kind == wire.ZygoteError:
		return said{z.Key.What(), o.Text}
	case o.Kind != wire.ZygoteReady:
		return fmt.Errorf("zygote's first message is %c, want %c", o.Kind, wire.ZygoteReady)
	}
	if !stop() {
		return ctx.Err()
	}
	z.Prepacked = o.Prepacked
	return conn.SetReadDeadline(time.Time{})
}

// read handles the zygote's messages until the zygote ends or is left to the warden. After the end
// it reports the children that ended with the zygote.
func (z *Zygote) read() {
	defer close(z.gone)
	buf := make([]byte, MaxOrder)
	var fault error
	for fault == nil {
		o, err := receive(z.control.conn, buf)
		if z.control.chatty() && err == nil {
			err = errors.New("it sends more messages than it was asked for")
		}
		if fault = err; err == nil {
			z.Family.handle(o)
		}
	}
	if z.leftBehind() {
		return
	}
	z.Kill() // it has ended, or violates the protocol
	_ = z.control.conn.Close()
	status := <-z.ended
	z.output.Finish(resources.LinesMoment)
	how := z.held.Group().Explain(resources.EndingOf(status))
	if op := (*net.OpError)(nil); errors.As(fault, &op) || errors.Is(fault, io.EOF) {
		fault = nil
	}
	z.Family.end(how, fault)
	z.held.Release()
	z.host.Pool.Drop(z.Entry)
}

// leftBehind reports whether the zygote is left to the warden. If so, it stops reading from the
// zygote and its children.
func (z *Zygote) leftBehind() bool {
	select {
	case <-z.host.Detached:
	default:
		return false
	}
	_ = z.control.conn.Close() // nobody reads it any more
	z.output.Abandon()
	z.Family.leave()
	return true
}

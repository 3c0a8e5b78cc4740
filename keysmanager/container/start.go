package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/guest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// runc is the name of containerd's runtime that starts containers with runc.
const runc = "io.containerd.runc.v2"

// start makes a container and starts a command's program in it. calls may go on after start has
// failed.
func (r *Runtime) start(ctx context.Context, c sandbox.Command, calls *sync.WaitGroup) (_ *process, err error) {
	p := &process{of: r, id: newID(c, r.cfg.Labels), calls: calls}
	r.add(p)
	defer func() {
		if err != nil {
			p.Forget()
		}
	}()
	if p.folder, err = newFolder(p.id, r.record(c)); err != nil {
		return nil, err
	}
	handler, err := r.handler(c.Options.Class)
	if err != nil {
		return nil, err
	}
	root, err := p.folder.mountRoot(c)
	if err != nil {
		return nil, err
	}
	outline, err := c.Outline(root)
	if err != nil {
		return nil, err
	}
	socket, err := p.folder.socketFolder(outline.UID, outline.GID)
	if err != nil {
		return nil, err
	}
	spec, added, err := r.spec(ctx, c, p, outline, root, socket)
	if err != nil {
		return nil, err
	}
	groups, err := groupsFor(p.id, c.Groups)
	if err != nil {
		return nil, err
	}
	groups.addTo(spec, r.cfg.Init)
	listener, err := entry.Listen(filepath.Join(socket, entry.Socket), outline.UID, outline.GID)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	if err := p.create(ctx, c, spec, handler); err != nil {
		return nil, err
	}
	if err := p.watch(int(p.task.Pid())); err != nil {
		return nil, err
	}
	r.shims.learn(p.init, p.id)
	outline.Env = append(outline.Env, added...)
	if err := p.run(ctx, c, outline, groups, listener); err != nil {
		return nil, err
	}
	of := r.record(c)
	of.PID = p.PID()
	if err := p.folder.setRecord(of); err != nil {
		return nil, err
	}
	p.ended = make(chan struct{})
	r.removes.Go(func() { defer close(p.ended); p.status = p.awaitEnd() })
	return p, nil
}

// create makes the container and its task, whose first process waits for its start.
func (p *process) create(ctx context.Context, c sandbox.Command, spec *specs.Spec, handler string) error {
	labels := p.of.labels(c)
	if err := p.call(ctx, func(ctx context.Context) (err error) {
		// It has no content and no snapshots, so it needs no lease: this one does not exist.
		p.container, err = p.of.client.NewContainer(leases.WithLease(ctx, p.id), p.id, containerd.WithSpec(spec), containerd.WithRuntime(handler, nil),
			containerd.WithContainerLabels(labels), containerd.WithImageName(labels[labelImage]))
		return err
	}); err != nil {
		return err
	}
	err := p.call(ctx, func(ctx context.Context) (err error) {
		p.task, err = p.container.NewTask(ctx, cio.NullIO)
		return err
	})
	if err != nil && c.Options.Class != "" {
		return fmt.Errorf("runtime class %s, %s: %w", c.Options.Class, handler, err)
	}
	return err
}

// run starts the container, which has been created, and the program in it.
func (p *process) run(ctx context.Context, c sandbox.Command, o sandbox.Outline, g groups, l entry.Listener) error {
	if err := g.enter(p.init); err != nil {
		return err
	}
	if err := p.call(ctx, p.task.Start); err != nil {
		return err
	}
	if err := p.begin(ctx, c, o, l); err != nil {
		return err
	}
	return g.leave(p.init)
}

// begin has the program started, once the container runs.
func (p *process) begin(ctx context.Context, c sandbox.Command, o sandbox.Outline, l entry.Listener) error {
	until, _ := ctx.Deadline()
	until = until.Add(time.Second) // ctx ends first, and says why
	defer context.AfterFunc(ctx, l.Close)()
	stop := p.whenInitEnds(l.Close)
	conn, err := l.Accept(p.init, until)
	stop()
	if err != nil {
		return errors.Join(fmt.Errorf("its first program does not connect: %w", err), p.initEnded(ctx))
	}
	p.conn = conn
	p.guest, err = guest.Begin(ctx, conn, c, o, p.init, until)
	return err
}

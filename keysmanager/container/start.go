package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// runc is the name of containerd's runtime that starts containers with runc.
const runc = "io.containerd.runc.v2"

// start makes a container and starts a command's program in it.
func (r *Runtime) start(ctx context.Context, c sandbox.Command) (_ *process, err error) {
	p := &process{of: r, id: newID(c, r.cfg.Labels)}
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
	listener, err := entry.Listen(filepath.Join(socket, entry.Socket), outline.UID, outline.GID)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	labels := r.labels(c)
	p.container, err = r.client.NewContainer(ctx, p.id, containerd.WithSpec(spec), containerd.WithRuntime(handler, nil),
		containerd.WithContainerLabels(labels), containerd.WithImageName(labels[labelImage]))
	if err != nil {
		return nil, fmt.Errorf("containerd: %w", err)
	}
	if p.task, err = p.container.NewTask(ctx, cio.NullIO); err != nil {
		if c.Options.Class != "" {
			return nil, fmt.Errorf("runtime class %s, %s: containerd: %w", c.Options.Class, handler, err)
		}
		return nil, fmt.Errorf("containerd: %w", err)
	}
	if err := p.watch(int(p.task.Pid())); err != nil {
		return nil, err
	}
	if err := p.enter(c.Groups); err != nil {
		return nil, err
	}
	if err := p.task.Start(ctx); err != nil {
		return nil, fmt.Errorf("containerd: %w", err)
	}
	outline.Env = append(outline.Env, added...)
	if err := p.begin(ctx, c, outline, listener); err != nil {
		return nil, err
	}
	of := r.record(c)
	of.PID = p.pid
	if err := p.folder.setRecord(of); err != nil {
		return nil, err
	}
	p.ended = make(chan struct{})
	r.removes.Go(func() { defer close(p.ended); p.status = p.awaitEnd() })
	return p, nil
}

// enter moves the first process of the container, which waits for its start, into cgroups. Without
// groups it enters those of this process, as a child process would. So the program of a watchdog
// has the limits of its replica. In version 1 the files are named tasks, and take in one thread.
// That is enough: runc calls exec from this one, and the kernel ends all others then.
func (p *process) enter(groups []*os.File) error {
	if len(groups) == 0 {
		own, err := cgroup.OpenOwn()
		if err != nil {
			return err
		}
		for _, f := range own {
			defer f.Close()
		}
		groups = own
	}
	for _, g := range groups {
		if _, err := g.WriteString(strconv.Itoa(p.init)); err != nil {
			return fmt.Errorf("cgroup of the container: %w", err)
		}
	}
	return nil
}

// begin has the program started, once the container runs.
func (p *process) begin(ctx context.Context, c sandbox.Command, o sandbox.Outline, l entry.Listener) error {
	until, _ := ctx.Deadline()
	defer context.AfterFunc(ctx, l.Close)() // the Runtime may be closed meanwhile
	stop := p.whenInitEnds(l.Close)
	conn, err := l.Accept(p.init, until)
	stop()
	if err != nil {
		return errors.Join(fmt.Errorf("its first program does not connect: %w", err), p.initEnded())
	}
	p.conn = conn
	defer context.AfterFunc(ctx, conn.Close)()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	files := []*os.File{c.Stdin, c.Stdout, c.Stderr}
	for i := range files {
		if files[i] == nil {
			files[i] = null
		} else if c.Chroot != "" {
			ownPipe(files[i], o.UID, o.GID)
		}
	}
	files = append(files, c.Files...)
	wanted := entry.Wanted{Program: o.Program, Argv: o.Argv, Env: o.Env, Dir: o.Dir}
	if c.Held {
		wanted = wanted.Held(len(files) - 1)
	}
	inside, err := conn.Begin(wanted, files, until)
	if err != nil {
		return err
	}
	if p.pid, err = sandbox.PIDsOf(p.init).Outside(inside); err != nil {
		return fmt.Errorf("process %d of container %s: %w", inside, p.id, err)
	}
	// The process is not reaped yet, so the number is its own.
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return fmt.Errorf("process %d: %w", p.pid, err)
	}
	p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	return conn.Go()
}

// ownPipe makes a user the owner of a pipe, so that the user's program can open it again as
// /dev/stdout. Other files stay as they are.
func ownPipe(f *os.File, uid, gid int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { // if it fails, only that opening fails
		var st unix.Stat_t
		if unix.Fstat(int(fd), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
			_ = unix.Fchown(int(fd), uid, gid)
		}
	})
}

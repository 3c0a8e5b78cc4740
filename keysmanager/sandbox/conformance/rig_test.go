package conformance

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// numbers differ from the numbers of a Stagecoach that may run on this machine, and from those of
// other test processes.
var numbers = func() sandbox.Range {
	first, last := proctest.Numbers()
	return sandbox.Range{First: first, Last: last}
}()

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == sandbox.InitCommand {
		_ = sandbox.Init(os.Args[2:]) // returns after a failure only, which the spawner has been told
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// rig is a Runtime under test, and an account.
type rig struct {
	sandbox.Runtime
	name  string
	ctr   *containerdtest.Server // nil: there are no containers
	lease *sandbox.Lease
}

// each runs a test with each Runtime.
func each(t *testing.T, f func(t *testing.T, r rig)) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	accounts, err := sandbox.OpenAccounts(filepath.Join(proctest.Outside(t), "run"), numbers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accounts.Close() })
	for name, open := range map[string]func(t *testing.T) (sandbox.Runtime, *containerdtest.Server){
		"process":    func(*testing.T) (sandbox.Runtime, *containerdtest.Server) { return sandbox.NewSpawner(), nil },
		"containerd": openContainers,
	} {
		t.Run(name, func(t *testing.T) {
			runtime, ctr := open(t)
			r := rig{Runtime: runtime, name: name, ctr: ctr}
			t.Cleanup(r.Close)
			gid, err := accounts.Group("tenant")
			if err == nil {
				r.lease, err = accounts.Take(gid)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = r.lease.Release() })
			f(t, r)
		})
	}
}

func openContainers(t *testing.T) (sandbox.Runtime, *containerdtest.Server) {
	s := containerdtest.Start(t)
	init := containerdtest.Init(t)
	r, err := container.Open(t.Context(), container.Config{Address: s.Address, Namespace: s.Namespace, Node: t.Name(), Init: init, Log: slog.Default()})
	if err != nil {
		t.Fatal(err)
	}
	return r, s
}

// probe builds the program that says what it finds around it.
var probe = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.TempDir(), "probe-of-runtimes")
	cmd := exec.Command("go", "build", "-o", path, "../testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	return path, cmd.Run()
})

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

// image returns a folder with the program probe as ./stage, and lists of users.
func image(t *testing.T) string {
	t.Helper()
	program, err := probe()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(proctest.Outside(t), "private")
	root := filepath.Join(dir, "image")
	write(t, filepath.Join(root, "stage"), string(b), 0o755)
	write(t, filepath.Join(root, "etc/passwd"), "root:x:0:0::/root:/bin/sh\napp:x:1234:1235::/home/app:/bin/sh\n", 0o644)
	write(t, filepath.Join(root, "etc/group"), "app:x:1235:\nextra:x:1300:app\n", 0o644)
	write(t, filepath.Join(root, "home/app/file"), "of the image", 0o644)
	write(t, filepath.Join(dir, "token"), "not given", 0o644)
	if err := errors.Join(os.Chmod(dir, 0o700), os.Chown(filepath.Join(root, "home/app"), 1234, 1235)); err != nil {
		t.Fatal(err)
	}
	return root
}

// lines are what a process has printed.
type lines struct {
	mu  sync.Mutex
	all []string
	one chan string // the first line
}

func (l *lines) add(stream, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, stream+": "+line)
	select {
	case l.one <- line:
	default:
	}
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.all, "\n") + "\n"
}

// running is a process that prints lines.
type running struct {
	sandbox.Process
	lines  *lines
	output *sandbox.Output
}

// start starts a process.
func (r rig) start(t *testing.T, c sandbox.Command) running {
	t.Helper()
	p, err := r.try(t, c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (r rig) try(t *testing.T, c sandbox.Command) (running, error) {
	t.Helper()
	return r.tryWithin(t.Context(), t, c)
}

func (r rig) tryWithin(ctx context.Context, t *testing.T, c sandbox.Command) (running, error) {
	t.Helper()
	l := &lines{one: make(chan string, 1)}
	o, err := sandbox.NewOutput(l.add)
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = o.Stdout, o.Stderr
	p, err := r.Start(ctx, c)
	o.Started()
	if err != nil {
		o.Abandon()
		return running{}, err
	}
	stuck := time.AfterFunc(time.Minute, func() { _ = p.Signal(syscall.SIGKILL) })
	t.Cleanup(func() { stuck.Stop() })
	return running{p, l, o}, nil
}

// end waits for the end of a process.
func (p running) end() unix.WaitStatus {
	status := p.Wait()
	p.output.Finish(10 * time.Second)
	p.Forget()
	return status
}

// said runs a command to its end, and returns what it has printed.
func (r rig) said(t *testing.T, c sandbox.Command) string {
	t.Helper()
	p := r.start(t, c)
	if status := p.end(); status != 0 {
		t.Errorf("it ended with %v, want 0; it printed %s", status, p.lines.text())
	}
	return p.lines.text()
}

// awaitLine waits for the first line of a process.
func (p running) awaitLine(t *testing.T) string {
	t.Helper()
	select {
	case line := <-p.lines.one:
		return line
	case <-time.After(time.Minute):
		t.Fatal("it prints nothing")
		return ""
	}
}

// want checks that a text has these parts, and that it lacks those that begin with "not ".
func want(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if lacks, not := strings.CutPrefix(p, "not "); not && strings.Contains(text, lacks) || !not && !strings.Contains(text, p) {
			t.Errorf("want %q in what it printed:\n%s", p, text)
		}
	}
}

// inside returns a command that runs the probe with its own root.
func inside(root string, args ...string) sandbox.Command {
	return sandbox.Command{Chroot: root, Argv: slices.Concat([]string{"/stage"}, args)}
}

// beside returns a command that runs the probe with the rig's account.
func (r rig) beside(root string, args ...string) sandbox.Command {
	return sandbox.Command{Dir: root, Argv: slices.Concat([]string{"./stage"}, args), As: &r.lease.Account}
}

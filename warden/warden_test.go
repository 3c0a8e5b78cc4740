package warden

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/sandbox"
)

// actAs makes this test's binary a warden, so that tests have one in a process of its own, or a manager that can be killed.
const actAs = "WARDEN_TEST"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(actAs) {
	case "":
		goleak.VerifyTestMain(m)
		return
	case "warden":
		err = serve()
	case "manager":
		err = manage()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve() error {
	linger, err := time.ParseDuration(os.Args[1])
	if err != nil {
		return err
	}
	l, err := net.FileListener(os.NewFile(ListenFD, "socket"))
	if err != nil {
		return err
	}
	return Serve(context.Background(), Server{Listener: l.(*net.UnixListener), Linger: linger, Log: slog.New(slog.DiscardHandler)})
}

// launcher is of a warden in a process of its own: this test's binary.
func launcher(t testing.TB, linger time.Duration) Launcher {
	t.Setenv(actAs, "warden")
	dir, err := os.MkdirTemp("", "warden-") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return Launcher{Socket: filepath.Join(dir, "s", "socket"), Command: []string{"/proc/self/exe", linger.String()}, Log: filepath.Join(dir, "log")}
}

// manager is a Client with what it was told.
type manager struct {
	*Client
	t     *testing.T
	exits chan Exit
	kept  []Kept
}

func attach(t *testing.T, c *Client) *manager {
	t.Helper()
	m := &manager{Client: c, t: t, exits: make(chan Exit, 100)}
	var err error
	if m.kept, err = c.Attach(func(e Exit) { m.exits <- e }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(m.kept) })
	return m
}

func launch(t *testing.T, l Launcher) *manager {
	t.Helper()
	c, err := Launch(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	pid := c.to.(*relaunched).now.pid
	t.Cleanup(func() {
		c.Close()
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); got == 0 && err == nil { // it is our child and runs
			_ = syscall.Kill(pid, syscall.SIGKILL) // its processes end with it
			reap(pid)
		}
	})
	return attach(t, c)
}

// pid is the warden's.
func (m *manager) pid() int { return m.to.(*relaunched).now.pid }

func (m *manager) exit() Exit {
	m.t.Helper()
	select {
	case e := <-m.exits:
		return e
	case <-time.After(20 * time.Second):
		m.t.Fatal("no exit was told")
		return Exit{}
	}
}

func script(text string) sandbox.Command {
	return sandbox.Command{Argv: []string{"/bin/sh", "-c", text}}
}

func (m *manager) start(p Process) int {
	m.t.Helper()
	pid, err := m.Start(p)
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// each runs a test with a warden in this process and with one of its own.
func each(t *testing.T, f func(t *testing.T, m *manager)) {
	t.Run("inside", func(t *testing.T) {
		c := InProcess()
		t.Cleanup(c.Close)
		f(t, attach(t, c))
	})
	t.Run("outside", func(t *testing.T) { f(t, launch(t, launcher(t, time.Minute))) })
}

func TestProcesses(t *testing.T) {
	each(t, func(t *testing.T, m *manager) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		command := script("echo $NAME in $PWD; cat <&3; read line; echo $line; exit 7")
		stdin, err := os.Open(written(t, "from stdin\n"))
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		three, err := os.Open(written(t, "from 3\n"))
		if err != nil {
			t.Fatal(err)
		}
		defer three.Close()
		command.Dir, command.Env, command.Stdout, command.Stdin, command.Files = "/", map[string]string{"NAME": "a"}, w, stdin, []*os.File{three}
		pid := m.start(Process{Name: "a", Meta: []byte("m"), Command: command, Keep: []*os.File{r}})
		_ = w.Close()
		if out, err := io.ReadAll(r); err != nil || string(out) != "a in /\nfrom 3\nfrom stdin\n" {
			t.Errorf("printed %q, %v", out, err)
		}
		if e := m.exit(); e.Name != "a" || e.PID != pid || e.Err != nil || e.Status.ExitStatus() != 7 {
			t.Errorf("exit %+v", e)
		}
		if _, err := m.Attach(nil); err == nil || !strings.Contains(err.Error(), "one at a time") {
			t.Errorf("a second manager: %v", err)
		}
		if _, err := m.Start(Process{Name: "a", Command: script("")}); !errors.Is(err, ErrTaken) {
			t.Errorf("a second one: %v, want %v", err, ErrTaken)
		}
		if err := m.Drop("a"); err != nil {
			t.Error(err)
		}
		stays := m.start(Process{Name: "a", Command: script("exec sleep 600")})
		if err := m.Drop("a"); err == nil || !strings.Contains(err.Error(), "runs") {
			t.Errorf("what runs is dropped: %v", err)
		}
		if err := m.Signal("a", syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if e := m.exit(); e.PID != stays || e.Status.Signal() != syscall.SIGTERM {
			t.Errorf("exit %+v", e)
		}
		if err := m.Signal("a", syscall.SIGTERM); err != nil {
			t.Errorf("a signal to what has ended: %v", err)
		}
		if err := m.Signal("b", syscall.SIGTERM); !errors.Is(err, ErrUnknown) {
			t.Errorf("a signal to nobody: %v", err)
		}
		if _, err := m.Start(Process{Name: "b", Command: sandbox.Command{Argv: []string{"/no/such"}}}); err == nil || !strings.Contains(err.Error(), "/no/such") {
			t.Errorf("started: %v", err)
		}
		if err := m.Drop("b"); err != nil {
			t.Errorf("drop of what is not there: %v", err)
		}
	})
}

func written(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestWhatIsKeptIsListed(t *testing.T) {
	each(t, func(t *testing.T, m *manager) {
		f, err := os.Open(written(t, "kept"))
		if err != nil {
			t.Fatal(err)
		}
		m.start(Process{Name: "ended", Meta: []byte("0"), Command: script("exit 3")})
		m.exit()
		runs := m.start(Process{Name: "runs", Meta: []byte("1"), Command: script("exec sleep 600"), Keep: []*os.File{f, f}})
		for _, err := range []error{
			m.Put("file", []byte("old"), f, f, f),
			m.Put("file", []byte("2"), f),
			m.Put("runs", []byte("3")),
			m.Put("dropped", nil, f),
			m.Drop("dropped"),
			f.Close(),
			m.Release(),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := syscall.Kill(runs, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		var got []string
		proctest.Until(t, 20*time.Second, "the end to be in the list", func() bool {
			kept, err := m.Attach(func(Exit) {})
			if err != nil {
				t.Fatal(err)
			}
			defer closeAll(kept)
			got = nil
			for _, k := range kept {
				text := fmt.Sprintf("%s %s %d %t %d", k.Name, k.Meta, len(k.Files), k.Ended, k.Status)
				for _, f := range k.Files[:min(len(k.Files), 1)] {
					b := make([]byte, 10)
					n, _ := f.ReadAt(b, 0)
					text += " " + string(b[:n])
				}
				got = append(got, text)
			}
			if err := m.Release(); err != nil {
				t.Fatal(err)
			}
			return strings.Contains(strings.Join(got, "\n"), "runs 3 2 true")
		})
		want := []string{"ended 0 0 true 768", "file 2 1 false 0 kept", "runs 3 2 true 9 kept"}
		if !slices.Equal(got, want) {
			t.Errorf("kept %q, want %q", got, want)
		}
		if len(m.exits) != 0 {
			t.Errorf("told of %+v after its release", <-m.exits)
		}
	})
}

func TestPipesAreReadAwayWhileThereIsNoManager(t *testing.T) {
	each(t, func(t *testing.T, m *manager) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		done := filepath.Join(t.TempDir(), "done")
		c := script("read go; head -c 300000 /dev/zero; : >$DONE; read on; echo on")
		in, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		c.Env, c.Stdin, c.Stdout = map[string]string{"DONE": done}, in, w
		m.start(Process{Name: "a", Command: c, Keep: []*os.File{r}})
		for _, f := range []*os.File{r, w, in} {
			_ = f.Close()
		}
		if err := m.Release(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.WriteString("go\n"); err != nil {
			t.Fatal(err)
		}
		proctest.Until(t, 20*time.Second, "all to be printed", func() bool { _, err := os.Stat(done); return err == nil })
		m = attach(t, m.Client)
		if _, err := out.WriteString("on\n"); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(m.kept[0].Files[0])
		if err != nil || m.kept[0].Lost+int64(len(rest)) != 300000+3 || m.kept[0].Lost < 300000-64<<10 || !strings.HasSuffix(string(rest), "on\n") {
			t.Errorf("%d bytes lost and %d read, want 300003 together, %v", m.kept[0].Lost, len(rest), err)
		}
	})
}

func TestBounds(t *testing.T) {
	each(t, func(t *testing.T, m *manager) {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for name, err := range map[string]error{
			"want 1..512":         m.Put("", nil),
			"a name of 600 bytes": m.Put(strings.Repeat("x", 600), nil),
			"a description of":    m.Put("a", make([]byte, MaxMeta+1)),
			"65 descriptors":      m.Put("a", nil, slices.Repeat([]*os.File{f}, MaxFiles+1)...),
		} {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("got %v, want %q", err, name)
			}
		}
		if err := m.Put("a", make([]byte, MaxMeta), slices.Repeat([]*os.File{f}, MaxFiles)...); err != nil {
			t.Error(err)
		}
		if _, outside := m.to.(*relaunched); !outside {
			return
		}
		c := script("")
		c.Env = map[string]string{"LONG": strings.Repeat("x", maxMessage)}
		if _, err := m.Start(Process{Name: "b", Command: c}); err == nil || !strings.Contains(err.Error(), "its environment is most of it") {
			t.Errorf("got %v, want an error about the environment", err)
		}
		m.start(Process{Name: "b", Command: script("")}) // the connection is as it was
	})
}

func TestOneManagerAtATime(t *testing.T) {
	l := launcher(t, time.Minute)
	m := launch(t, l)
	_, err := Launch(t.Context(), l)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d is the manager already", os.Getpid())) {
		t.Errorf("a second one: %v", err)
	}
	pid := m.pid()
	m.start(Process{Name: "a", Command: script("exec sleep 600")}) // or the warden would end
	m.Close()
	if next := launch(t, l); next.pid() != pid || len(next.kept) != 1 {
		t.Errorf("warden %d has %+v, want %d with one process", next.pid(), next.kept, pid)
	}
	if _, err := m.Start(Process{Name: "b"}); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed client: %v", err)
	}
}

func TestTenAtOnceStartOneWarden(t *testing.T) {
	l := launcher(t, time.Minute)
	won := make(chan *Client, 10)
	lost := make(chan error, 10)
	for range 10 {
		go func() {
			c, err := Launch(t.Context(), l)
			if err != nil {
				lost <- err
				return
			}
			won <- c
		}()
	}
	for range 9 {
		if err := <-lost; !strings.Contains(err.Error(), "is the manager already") {
			t.Error(err)
		}
	}
	c := <-won
	pid := c.to.(*relaunched).now.pid
	c.Close()
	proctest.Gone(t, pid) // it has nothing to do
	reap(pid)
}

func TestWhoMayConnect(t *testing.T) {
	l := launcher(t, time.Minute)
	m := launch(t, l)
	m.start(Process{Name: "a", Command: script("exec sleep 600")})
	for path, want := range map[string]os.FileMode{l.Socket: 0o600 | os.ModeSocket, filepath.Dir(l.Socket): 0o700 | os.ModeDir} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s is %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
	m.Close()
	open := Launcher{Socket: filepath.Join(t.TempDir(), "socket"), Command: l.Command}
	if err := os.Chmod(filepath.Dir(open.Socket), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Launch(t.Context(), open); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("a folder that is open to others: %v", err)
	}
	if _, err := Launch(t.Context(), Launcher{Socket: l.Socket + "2", Command: []string{"/bin/false"}}); err == nil || !strings.Contains(err.Error(), "/bin/false was started and does not answer") {
		t.Errorf("a program that is no warden: %v", err)
	}
	long := Launcher{Socket: "/tmp/" + strings.Repeat("x", 110), Command: l.Command}
	if _, err := Launch(t.Context(), long); err == nil || !strings.Contains(err.Error(), "want at most 107") {
		t.Errorf("a long path: %v", err)
	}
	for say, want := range map[string]string{
		`{"version":7,"op":"hello"}`: "version 7 of process",
		`{"version":1,"op":"drop"}`:  `begins with "drop", want hello`,
		"\x00\xff":                   "invalid character",
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: l.Socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(say)); err != nil {
			t.Fatal(err)
		}
		answer, err := newWire(conn).receive()
		if err != nil || !strings.Contains(answer.Error, want) || answer.PID != m.pid() {
			t.Errorf("%q is answered with %+v, %v, want %q", say, answer, err, want)
		}
		_ = conn.Close()
	}
	if os.Geteuid() != 0 {
		t.Skip("another user takes root")
	}
	_ = os.Chmod(filepath.Dir(filepath.Dir(l.Socket)), 0o755)
	_ = os.Chmod(filepath.Dir(l.Socket), 0o755)
	_ = os.Chmod(l.Socket, 0o666)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", l.Socket)
	cmd.Env = []string{actAs + "=manager"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "of user 0, want 65534") && !strings.Contains(string(out), "is of user 65534, want 0") {
		t.Errorf("another user: %s, %v", out, err)
	}
}

// manage is a manager in a process of its own: it starts what it is told and says so, and then waits to be killed.
func manage() error {
	c, err := Connect(context.Background(), os.Args[1])
	if err != nil {
		return err
	}
	if _, err := c.Attach(func(Exit) {}); err != nil {
		return err
	}
	for i, text := range os.Args[2:] {
		idle := strings.HasPrefix(text, "idle:")
		p := Process{Name: strconv.Itoa(i), Command: script(strings.TrimPrefix(text, "idle:")), Idle: idle}
		if _, err := c.Start(p); err != nil {
			return err
		}
	}
	fmt.Println("started")
	select {}
}

// killed runs a manager in a process of its own, kills it once it has started everything, and returns its warden.
func killed(t *testing.T, l Launcher, scripts ...string) (wardenPID int) {
	t.Helper()
	m := launch(t, l)
	m.start(Process{Name: "holds", Command: script("exec sleep 600")}) // a warden with nothing to do would end between the two
	wardenPID = m.pid()
	m.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", append([]string{l.Socket}, scripts...)...)
	cmd.Env = append(os.Environ(), actAs+"=manager")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return wardenPID
}

func TestWhatAKilledManagerHasLeft(t *testing.T) {
	l := launcher(t, time.Minute)
	pid := killed(t, l, "exec sleep 600", "kill -9 $$", "exit 5")
	var m *manager
	proctest.Until(t, 20*time.Second, "the ends", func() bool {
		m = launch(t, l)
		defer m.Close()
		n := 0
		for _, k := range m.kept {
			if k.Ended {
				n++
			}
		}
		return n == 2
	})
	if m.pid() != pid {
		t.Errorf("warden %d, want %d", m.pid(), pid)
	}
	var got []string
	for _, k := range m.kept {
		got = append(got, fmt.Sprintf("%s %t %d", k.Name, k.Ended, k.Status))
	}
	if want := []string{"0 false 0", "1 true 9", "2 true 1280", "holds false 0"}; !slices.Equal(got, want) {
		t.Errorf("kept %q, want %q", got, want)
	}
}

func TestWithoutAManagerUselessThingsEnd(t *testing.T) {
	l := launcher(t, 100*time.Millisecond)
	pid := killed(t, l, "idle:exec sleep 600", "idle:sleep 601 & wait", "exec sleep 602")
	proctest.Until(t, 20*time.Second, "the idle one to end", func() bool { return len(proctest.Children(t, pid)) == 3 })
	all := proctest.Children(t, pid)
	for range 3 { // looked at again and again, what has children stays, and what is not idle
		m := launch(t, l)
		m.Close()
	}
	if now := proctest.Children(t, pid); !slices.Equal(now, all) {
		t.Errorf("children %v, want %v", now, all)
	}
	for _, p := range all {
		for _, child := range append(proctest.Children(t, p), p) {
			_ = syscall.Kill(child, syscall.SIGKILL) // some have ended
		}
	}
	proctest.Gone(t, pid)
	reap(pid)
}

// reap waits for a warden that this process has started and that has ended.
func reap(pid int) { _, _ = unix.Wait4(pid, nil, 0, nil) }

func TestAWardenWithNothingToDoEnds(t *testing.T) {
	m := launch(t, launcher(t, time.Hour))
	pid := m.pid()
	m.start(Process{Name: "a", Command: script("")})
	m.exit()
	if err := m.Drop("a"); err != nil {
		t.Fatal(err)
	}
	m.Close()
	proctest.Gone(t, pid)
	reap(pid)
}

func TestAWardenThatIsKilled(t *testing.T) {
	m := launch(t, launcher(t, time.Minute))
	pid := m.pid()
	pids := map[string]int{}
	for i := range 3 {
		name := strconv.Itoa(i)
		pids[name] = m.start(Process{Name: name, Command: script("exec sleep 600")})
	}
	file := filepath.Join(t.TempDir(), "child")
	parent := script("sleep 600 & echo $! >" + file + "; exec sleep 600")
	pids["parent"] = m.start(Process{Name: "parent", Command: parent})
	child := 0
	proctest.Until(t, 20*time.Second, "its child", func() bool {
		b, _ := os.ReadFile(file)
		child, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return child > 0
	})
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		e := m.exit()
		if !errors.Is(e.Err, ErrLost) || e.PID != pids[e.Name] || !strings.Contains(e.Err.Error(), strconv.Itoa(pid)) {
			t.Errorf("exit %+v, want one with %v", e, ErrLost)
		}
		delete(pids, e.Name)
		proctest.Gone(t, e.PID)
	}
	proctest.Gone(t, child)
	for err := range map[error]bool{m.Signal("0", syscall.SIGTERM): true, m.Put("x", nil): true} {
		if !errors.Is(err, ErrLost) {
			t.Errorf("got %v, want %v", err, ErrLost)
		}
	}
	if err := m.Drop("0"); err != nil {
		t.Errorf("drop of what is gone: %v", err)
	}
	m.start(Process{Name: "0", Command: script("exit 4")}) // by another warden
	if e := m.exit(); e.Err != nil || e.Status.ExitStatus() != 4 || m.pid() == pid {
		t.Errorf("exit %+v", e)
	}
	if err := m.Drop("0"); err != nil {
		t.Error(err)
	}
	next := m.pid()
	m.Close()
	proctest.Gone(t, next)
	reap(next)
}

// TestAWardenThatSpeaksNonsense: it is ended, and no half of its processes stays.
func TestAWardenThatSpeaksNonsense(t *testing.T) {
	m := launch(t, launcher(t, time.Minute))
	old := m.pid()
	p := m.start(Process{Name: "a", Command: script("exec sleep 600")})
	r := m.to.(*relaunched).now
	if err := r.wire.conn.SetReadDeadline(time.Unix(1, 0)); err != nil { // as good as nonsense
		t.Fatal(err)
	}
	if e := m.exit(); !errors.Is(e.Err, ErrLost) || e.PID != p {
		t.Errorf("exit %+v", e)
	}
	proctest.Gone(t, p)
	proctest.Gone(t, old)
}

func TestAWardenIsOnItsOwn(t *testing.T) {
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY, 0) // to be inherited
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	m := launch(t, launcher(t, time.Minute))
	sid, err := unix.Getsid(m.pid())
	if err != nil || sid != m.pid() {
		t.Errorf("session %d of warden %d, %v: want one of its own", sid, m.pid(), err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", m.pid(), fd.Name()))
		if to == "/dev/zero" {
			t.Errorf("descriptor %s of the warden is one of ours, %s", fd.Name(), to)
		}
	}
}

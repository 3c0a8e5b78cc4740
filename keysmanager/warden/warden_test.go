package warden

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// actAs makes this test's binary a warden, or a manager that can be killed, for tests that need a
// separate process.
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
	return Serve(context.Background(), Server{Listener: l.(*net.UnixListener), Runtime: sandbox.NewSpawner(), Linger: linger, Log: slog.New(slog.DiscardHandler)})
}

// launcher starts this test's binary as a warden in its own process.
func launcher(t testing.TB, linger time.Duration) Launcher {
	t.Setenv(actAs, "warden")
	dir, err := os.MkdirTemp("", "warden-") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return Launcher{Socket: filepath.Join(dir, "s", "socket"), Command: []string{"/proc/self/exe", linger.String()}, Log: filepath.Join(dir, "log")}
}

// manager is a Client with the exits that were reported to it.
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
		// It is a child of this process and still runs.
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); got == 0 && err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // its processes end with it
			reap(pid)
		}
	})
	return attach(t, c)
}

// pid returns the warden's pid.
func (m *manager) pid() int { return m.to.(*relaunched).now.pid }

func (m *manager) exit() Exit {
	m.t.Helper()
	select {
	case e := <-m.exits:
		return e
	case <-time.After(time.Minute):
		m.t.Fatal("no exit was reported")
		return Exit{}
	}
}

func script(text string) sandbox.Command {
	return sandbox.Command{Argv: []string{"/bin/sh", "-c", text}}
}

func (m *manager) start(p Process) int {
	m.t.Helper()
	pid, err := m.Start(m.t.Context(), p)
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// each runs a test with a warden in this process and with a warden in its own process.
func each(t *testing.T, f func(t *testing.T, m *manager)) {
	t.Run("inside", func(t *testing.T) {
		c := InProcess(sandbox.NewSpawner())
		t.Cleanup(c.Close)
		f(t, attach(t, c))
	})
	t.Run("outside", func(t *testing.T) { f(t, launch(t, launcher(t, time.Minute))) })
}

func TestStartSignalAndDrop(t *testing.T) {
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
		if _, err := m.Start(t.Context(), Process{Name: "a", Command: script("")}); !errors.Is(err, ErrTaken) {
			t.Errorf("a second one: %v, want %v", err, ErrTaken)
		}
		if err := m.Drop("a"); err != nil {
			t.Error(err)
		}
		stays := m.start(Process{Name: "a", Command: script("exec sleep 600")})
		if err := m.Drop("a"); err == nil || !strings.Contains(err.Error(), "runs") {
			t.Errorf("a running process is dropped: %v", err)
		}
		if err := m.Signal("a", syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if e := m.exit(); e.PID != stays || e.Status.Signal() != syscall.SIGTERM {
			t.Errorf("exit %+v", e)
		}
		if err := m.Signal("a", syscall.SIGTERM); err != nil {
			t.Errorf("a signal to an ended process: %v", err)
		}
		if err := m.Signal("b", syscall.SIGTERM); !errors.Is(err, ErrUnknown) {
			t.Errorf("a signal to nobody: %v", err)
		}
		if _, err := m.Start(t.Context(), Process{Name: "b", Command: sandbox.Command{Argv: []string{"/no/such"}}}); err == nil || !strings.Contains(err.Error(), "/no/such") {
			t.Errorf("started: %v", err)
		}
		if err := m.Drop("b"); err != nil {
			t.Errorf("drop of an unknown entry: %v", err)
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

func TestAttachListsAllEntries(t *testing.T) {
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
		proctest.Until(t, "the end to be in the list", func() bool {
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

func TestPipesAreDrainedWithoutAManager(t *testing.T) {
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
		proctest.Until(t, "all to be printed", func() bool { _, err := os.Stat(done); return err == nil })
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

func TestTooLargeEntriesAreRefused(t *testing.T) {
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
		if _, err := m.Start(t.Context(), Process{Name: "b", Command: c}); err == nil || !strings.Contains(err.Error(), "its environment is most of it") {
			t.Errorf("got %v, want an error about the environment", err)
		}
		m.start(Process{Name: "b", Command: script("")}) // the connection still works
	})
}

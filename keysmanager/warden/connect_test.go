package warden

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

func TestOneManagerAtATime(t *testing.T) {
	l := launcher(t, time.Minute)
	m := launch(t, l)
	_, err := Launch(t.Context(), l)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d is the manager already", os.Getpid())) {
		t.Errorf("a second one: %v", err)
	}
	pid := m.pid()
	m.start(Process{Name: "a", Command: script("exec sleep 600")}) // otherwise the warden would end
	m.Close()
	if next := launch(t, l); next.pid() != pid || len(next.kept) != 1 {
		t.Errorf("warden %d has %+v, want %d with one process", next.pid(), next.kept, pid)
	}
	if _, err := m.Start(t.Context(), Process{Name: "b"}); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed client: %v", err)
	}
}

func TestConcurrentLaunchesStartOneWarden(t *testing.T) {
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

func TestLaunchRefusesOtherUsers(t *testing.T) {
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
		t.Errorf("a folder that others can open: %v", err)
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
		`{"version":1,"op":"drop"}`:  `sends "drop" first, want hello`,
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
		t.Skip("acting as another user needs root")
	}
	_ = os.Chmod(filepath.Dir(filepath.Dir(l.Socket)), 0o755)
	_ = os.Chmod(filepath.Dir(l.Socket), 0o755)
	_ = os.Chmod(l.Socket, 0o666)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", l.Socket)
	cmd.Env = []string{actAs + "=manager"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "of user 0, want 65534") && !strings.Contains(string(out), "runs as user 65534, want user 0") {
		t.Errorf("another user: %s, %v", out, err)
	}
}

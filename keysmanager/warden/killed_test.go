package warden

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// manage is a manager in its own process. It starts the processes that it is told, reports them,
// and waits to be killed.
func manage() error {
	r, err := connect(context.Background(), os.Args[1])
	if err != nil {
		return err
	}
	c := &Client{r}
	if _, err := c.Attach(func(Exit) {}); err != nil {
		return err
	}
	for i, text := range os.Args[2:] {
		idle := strings.HasPrefix(text, "idle:")
		p := Process{Name: strconv.Itoa(i), Command: script(strings.TrimPrefix(text, "idle:")), Idle: idle}
		if _, err := c.Start(context.Background(), p); err != nil {
			return err
		}
	}
	fmt.Println("started")
	select {}
}

// killed runs a manager in its own process, kills it once it has started everything, and returns
// the pid of its warden.
func killed(t *testing.T, l Launcher, scripts ...string) (wardenPID int) {
	t.Helper()
	m := launch(t, l)
	// Without a process, the warden would end before the next manager connects.
	m.start(Process{Name: "holds", Command: script("exec sleep 600")})
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

func TestNextManagerFindsEntriesOfAKilledOne(t *testing.T) {
	l := launcher(t, time.Minute)
	pid := killed(t, l, "exec sleep 600", "kill -9 $$", "exit 5")
	var m *manager
	proctest.Until(t, "the ends", func() bool {
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

func TestIdleProcessesEndWithoutAManager(t *testing.T) {
	l := launcher(t, 100*time.Millisecond)
	pid := killed(t, l, "idle:exec sleep 600", "idle:sleep 601 & wait", "exec sleep 602")
	proctest.Until(t, "the idle process to end", func() bool { return len(proctest.Children(t, pid)) == 3 })
	all := proctest.Children(t, pid)
	for range 3 { // in later checks, processes with children stay, and processes that are not idle
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

func TestWardenWithoutProcessesEnds(t *testing.T) {
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

func TestProcessesEndWithAKilledWarden(t *testing.T) {
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
	proctest.Until(t, "its child", func() bool {
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
		t.Errorf("drop of an entry that does not exist: %v", err)
	}
	m.start(Process{Name: "0", Command: script("exit 4")}) // runs in another warden
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

// TestWardenThatBreaksTheProtocolIsKilled checks that a warden with invalid messages is killed, and
// that none of its processes stays.
func TestWardenThatBreaksTheProtocolIsKilled(t *testing.T) {
	m := launch(t, launcher(t, time.Minute))
	old := m.pid()
	p := m.start(Process{Name: "a", Command: script("exec sleep 600")})
	r := m.to.(*relaunched).now
	// This breaks the connection, as an invalid message does.
	if err := r.wire.conn.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if e := m.exit(); !errors.Is(e.Err, ErrLost) || e.PID != p {
		t.Errorf("exit %+v", e)
	}
	proctest.Gone(t, p)
	proctest.Gone(t, old)
}

func TestWardenInheritsNothing(t *testing.T) {
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY, 0) // a descriptor that the warden could inherit
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	m := launch(t, launcher(t, time.Minute))
	sid, err := unix.Getsid(m.pid())
	if err != nil || sid != m.pid() {
		t.Errorf("session %d of warden %d, %v: want its own session", sid, m.pid(), err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", m.pid(), fd.Name()))
		if to == "/dev/zero" {
			t.Errorf("descriptor %s of the warden is inherited from this process: %s", fd.Name(), to)
		}
	}
}

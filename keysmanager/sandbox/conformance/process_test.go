package conformance

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestProgramGetsWhatItsCommandSays checks arguments, environment, working folder and descriptors.
func TestProgramGetsWhatItsCommandSays(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		for name, c := range map[string]sandbox.Command{
			"account": r.beside(root, "dir", "env", "fd=3", "fd=4"),
			"root":    inside(root, "dir", "env", "fd=3", "fd=4"),
		} {
			read, file, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			c.Files, c.Env = []*os.File{file, file}, map[string]string{"FIRST": "1", "SECRET": "s e c r e t"}
			if c.Chroot != "" {
				c.Dir = "/made/here"
			}
			text := r.said(t, c)
			_ = file.Close()
			dir := root
			if c.Chroot != "" {
				dir = c.Dir
			}
			want(t, text, "stdout: dir: "+dir+" <nil>", "FIRST=1", "SECRET=s e c r e t", "TMPDIR=/tmp", "PATH="+sandbox.Path)
			if b, err := io.ReadAll(read); err != nil || strings.Count(string(b), "through the descriptor\n") != 2 {
				t.Errorf("%s: %q, %v, want a line through each descriptor", name, b, err)
			}
			_ = read.Close()
		}
	})
}

// TestShellReadsItsInput checks stdin, stdout and stderr, and a program that is found in PATH.
func TestShellReadsItsInput(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		in, feed, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		c := r.beside(image(t))
		c.Stdin, c.Argv = in, []string{"sh", "-c", "echo ready; cat; echo to stderr >&2; exit 0"}
		p := r.start(t, c)
		p.awaitLine(t)
		for range 100 { // it finds an empty pipe in between
			fmt.Fprintln(feed, "fed")
			runtime.Gosched()
		}
		_ = feed.Close()
		if status := p.end(); status != 0 {
			t.Errorf("%#x, want 0", status)
		}
		want(t, p.lines.text(), "stdout: fed\n", "stderr: to stderr\n")
		_ = in.Close()
		c.Stdin, c.Argv = nil, []string{"sh", "-c", "cat; echo and no input"}
		want(t, r.said(t, c), "stdout: and no input\n", "not fed")
	})
}

// TestEndsAreToldAsTheyWere checks exit codes and signals.
func TestEndsAreToldAsTheyWere(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		c := r.beside(image(t))
		for script, check := range map[string]func(s unix.WaitStatus) bool{
			"exit 0":         func(s unix.WaitStatus) bool { return s == 0 },
			"exit 7":         func(s unix.WaitStatus) bool { return s.Exited() && s.ExitStatus() == 7 },
			"exit 137":       func(s unix.WaitStatus) bool { return s.Exited() && s.ExitStatus() == 137 },
			"kill -TERM $$":  func(s unix.WaitStatus) bool { return s.Signaled() && s.Signal() == unix.SIGTERM },
			"kill -KILL $$":  func(s unix.WaitStatus) bool { return s.Signaled() && s.Signal() == unix.SIGKILL },
			"sleep 0 & wait": func(s unix.WaitStatus) bool { return s == 0 },
		} {
			c.Argv = []string{"sh", "-c", script}
			if status := r.start(t, c).end(); !check(status) {
				t.Errorf("%s: it ended with %#x", script, status)
			}
		}
		// From outside, with no handler.
		for _, s := range []syscall.Signal{unix.SIGTERM, unix.SIGUSR1, unix.SIGKILL} {
			c.Argv = []string{"sh", "-c", "echo ready; sleep 60"}
			p := r.start(t, c)
			p.awaitLine(t)
			if err := p.Signal(s); err != nil {
				t.Error(err)
			}
			if status := p.end(); status.Signal() != s {
				t.Errorf("%v: it ended with %#x", s, status)
			}
		}
		root := inside(image(t), "wait") // with a handler
		p := r.start(t, root)
		p.awaitLine(t)
		if err := p.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		if status := p.end(); status != 0 || !strings.Contains(p.lines.text(), "terminated") {
			t.Errorf("%#x, %s, want its handler to end it", status, p.lines.text())
		}
		if err := p.Signal(unix.SIGTERM); err == nil {
			t.Error("a signal to an ended process: no error")
		}
	})
}

// TestSignalAfterForgetHitsNobody signals a process whose descriptors are closed, while another has
// the same ones.
func TestSignalAfterForgetHitsNobody(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		p := r.start(t, r.beside(image(t), "wait"))
		p.awaitLine(t)
		_ = p.Signal(unix.SIGKILL)
		p.end()
		r.Close() // returns after the removal
		other := exec.Command("sleep", "600")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		for range 64 {
			fd, err := unix.PidfdOpen(other.Process.Pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
		}
		if err := p.Signal(unix.SIGKILL); err == nil {
			t.Error("a signal to a forgotten process: no error")
		}
		_ = other.Process.Signal(unix.SIGTERM)
		_ = other.Wait() // its state says how it ended
		if status := other.ProcessState.String(); status != "signal: terminated" {
			t.Errorf("another process: %s, want SIGTERM", status)
		}
	})
}

// TestNumberIsTheMachines checks that a process is known by its number on this machine.
func TestNumberIsTheMachines(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		p := r.start(t, r.beside(root, "wait"))
		p.awaitLine(t)
		name, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.PID()))
		if err != nil || !strings.HasSuffix(name, "/image") {
			t.Errorf("process %d works in %q, %v, want %s", p.PID(), name, err, root)
		}
		_ = p.Signal(unix.SIGKILL)
		p.end()
	})
}

// TestNothingOutlivesAProgram checks that what a program leaves ends with it.
func TestNothingOutlivesAProgram(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		c := r.beside(image(t))
		c.Argv = []string{"sh", "-c", "sleep 600 & echo left"}
		r.said(t, c)
		proctest.Until(t, "its child ends", func() bool { return countOf(t, r.lease.UID) == 0 })
	})
}

// TestCloseEndsProcesses checks that a Runtime's processes end with it.
func TestCloseEndsProcesses(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		p := r.start(t, r.beside(image(t), "wait"))
		p.awaitLine(t)
		r.Close()
		if status := p.end(); status.Signal() != unix.SIGKILL {
			t.Errorf("%#x, want SIGKILL", status)
		}
		if _, err := r.Start(t.Context(), r.beside(image(t), "id")); err == nil {
			t.Error("a closed Runtime starts a process")
		}
	})
}

// countOf counts the processes of a user.
func countOf(t *testing.T, uid int) (n int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, proc := range all {
		var st unix.Stat_t
		if unix.Stat(proc, &st) == nil && int(st.Uid) == uid {
			n++
		}
	}
	return n
}

// TestFailedStartsSayWhatToDo checks the errors of commands that cannot start. They leave nothing.
func TestFailedStartsSayWhatToDo(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		closed := filepath.Join(filepath.Dir(root), "closed")
		write(t, filepath.Join(closed, "file"), "x", 0o600)
		if err := os.Chmod(closed, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			c    sandbox.Command
			want []string
		}{
			{sandbox.Command{Dir: root, Argv: []string{"./absent"}, As: &r.lease.Account}, []string{"start ./absent in " + root, "no such file"}},
			{sandbox.Command{Dir: root, Argv: []string{"absent"}, As: &r.lease.Account}, []string{"absent"}},
			{sandbox.Command{Dir: closed, Argv: []string{"/bin/true"}, As: &r.lease.Account}, []string{closed, "want it readable by all (chmod -R a+rX)"}},
			{sandbox.Command{Dir: filepath.Join(root, "none"), Argv: []string{"/bin/true"}, As: &r.lease.Account}, []string{"none", "no such file"}},
			{sandbox.Command{Chroot: root, Argv: []string{"/absent"}}, []string{"start /absent in root " + root, "no such file"}},
			{sandbox.Command{Chroot: root, Argv: []string{"absent"}}, []string{"absent: not in the image's PATH"}},
			{sandbox.Command{Chroot: root, Argv: []string{"/stage"}, User: "nobody"}, []string{`user "nobody": the image's /etc/passwd has no "nobody"`}},
			{sandbox.Command{Chroot: filepath.Join(root, "none"), Argv: []string{"/stage"}}, []string{"none", "no such file"}},
			{sandbox.Command{Chroot: root, Argv: []string{"/stage"}, Binds: []sandbox.Bind{{From: "/none/x", To: "/x"}}}, []string{"bind /x", "no such file"}},
			{sandbox.Command{Chroot: root, Argv: []string{"/stage"}, Binds: []sandbox.Bind{{From: "/etc", To: "x"}}}, []string{"want an absolute path"}},
		} {
			_, err := r.try(t, tc.c)
			if err == nil {
				t.Errorf("%v: it starts", tc.c.Argv)
				continue
			}
			want(t, err.Error(), tc.want...)
		}
		proctest.Until(t, "no process is left", func() bool { return countOf(t, r.lease.UID) == 0 })
	})
}

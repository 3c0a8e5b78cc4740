package pods

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// printer returns Logs that find one process, and what the process's standard output gets.
func printer(t *testing.T) (l *Logs, found *atomic.Bool, out *os.File) {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.Stdout = in
	if err := proctest.Start(cmd); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = out.Close() })
	l = NewLogs(func(string) int { return 0 })
	found = &atomic.Bool{}
	l.find = func(string) (int, bool) { return cmd.Process.Pid, found.Load() }
	t.Cleanup(l.Close)
	return l, found, out
}

// TestLinesReachThePod adds lines, the first one before the pod is found.
func TestLinesReachThePod(t *testing.T) {
	l, found, out := printer(t)
	l.Add("web-1", "first")
	found.Store(true)
	l.Add("web-1", "second")
	lines := bufio.NewScanner(out)
	for _, want := range []string{"first", "second"} {
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("line %q, want %q", lines.Text(), want)
		}
	}
}

// TestAddDoesNotWait adds more lines than a pipe holds, and nobody reads it.
func TestAddDoesNotWait(t *testing.T) {
	l, found, _ := printer(t)
	found.Store(true)
	line := strings.Repeat("x", 4096)
	for range 10 * logLines {
		l.Add("web-1", line)
	}
}

// TestForksAreInThePodOfTheirZygote looks for the first program of a process that has a number of
// its own there, as in a pod.
func TestForksAreInThePodOfTheirZygote(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	cmd := exec.Command("sh", "-c", "sleep 1000 & echo $!; wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = proctest.Start(cmd)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	var inside int
	if _, err := fmt.Fscan(out, &inside); err != nil {
		t.Fatal(err)
	}
	fork, err := sandbox.PIDsOf(cmd.Process.Pid).Outside(inside)
	if err != nil {
		t.Fatal(err)
	}
	if pid, ok := firstProgram("fork", func(string) int { return fork }); !ok || pid != cmd.Process.Pid {
		t.Errorf("process %d, %v, want %d", pid, ok, cmd.Process.Pid)
	}
}

// TestNotesNameTheFirstProgram checks that Logs trusts no note of a process in another pod.
func TestNotesNameTheFirstProgram(t *testing.T) {
	path := noteOf("replica/of-a-test")
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if err := writeNote(path, "uid", os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if uid, pid, err := readNote(path); uid != "uid" || pid != os.Getpid() || err != nil {
		t.Errorf("note %s %d %v", uid, pid, err)
	}
	if pid, ok := firstProgram("replica/of-a-test", func(string) int { return 0 }); ok {
		t.Errorf("process %d is not of the pod", pid)
	}
	if pid, ok := firstProgram("none", func(string) int { return os.Getpid() }); ok {
		t.Errorf("process %d is in no pod", pid)
	}
	removeNote(path, 1)
	if _, _, err := readNote(path); err != nil {
		t.Errorf("the note of another process is removed: %v", err)
	}
	removeNote(path, os.Getpid())
	if _, _, err := readNote(path); err == nil {
		t.Error("the note is left")
	}
	if noteOf("") != "" || writeNote("", "uid", 1) != nil {
		t.Error(fmt.Sprint("a note without a replica: ", noteOf("")))
	}
}

package entry

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// roomEnv makes the test's program the first program of a room.
const roomEnv = "STAGECOACH_TEST_ROOM"

func TestMain(m *testing.M) {
	if os.Getenv(roomEnv) == "" {
		os.Exit(m.Run())
	}
	conn, err := connOf(3)
	if err != nil {
		panic(err)
	}
	signals := hear()
	if _, err := begin(conn); err == nil {
		panic("want a room")
	}
	os.Exit(newRoom().run(conn, signals))
}

// rig is the first program of a room.
type rig struct {
	t    *testing.T
	conn *Conn
	cmd  *exec.Cmd
}

const patience = 20 * time.Second

func newRig(t *testing.T) *rig {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := connOf(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "room")
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.ExtraFiles, cmd.Stderr = append(os.Environ(), roomEnv+"=1"), []*os.File{theirs}, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	r := &rig{t, &Conn{ours}, cmd}
	t.Cleanup(func() { r.conn.Close(); _ = cmd.Wait() })
	if err := r.conn.Room(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return r
}

// program begins a shell script, whose standard output is out.
func (r *rig) program(script string, out *os.File) (*Conn, int) {
	r.t.Helper()
	c, err := r.conn.Open()
	if err != nil {
		r.t.Fatal(err)
	}
	pid, err := c.Begin(Wanted{Argv: []string{"/bin/sh", "-c", script}, Dir: "/"}, []*os.File{nil, out, os.Stderr}, time.Now().Add(patience))
	if err != nil {
		r.t.Fatal(err)
	}
	return c, pid
}

func (r *rig) status(c *Conn, want int) {
	r.t.Helper()
	if err := c.Go(); err != nil {
		r.t.Fatal(err)
	}
	status, err := c.Status()
	if err != nil || status.ExitStatus() != want {
		r.t.Fatalf("status %v, %v; want exit status %d", status, err, want)
	}
	c.Close()
}

// TestARoomRunsSeveralPrograms runs programs at the same time and one after another.
func TestARoomRunsSeveralPrograms(t *testing.T) {
	r := newRig(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	waits, waiting := r.program("sleep 1000; echo never", write)
	if err := waits.Go(); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		c, _ := r.program(fmt.Sprintf("echo %d; exit %d", i, i), write)
		r.status(c, i)
	}
	_, err = r.conn.Open()
	if err != nil {
		t.Fatal(err)
	}
	_ = write.Close()
	waits.Close()
	out, err := io.ReadAll(read) // ends once no program has the pipe
	if err != nil || !bytes.Equal(out, []byte("0\n1\n2\n")) {
		t.Fatalf("the programs wrote %q, %v", out, err)
	}
	if waiting == 0 {
		t.Fatal("no number")
	}
}

// TestARoomTellsFaults begins a program that does not exist.
func TestARoomTellsFaults(t *testing.T) {
	r := newRig(t)
	c, err := r.conn.Open()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Begin(Wanted{Argv: []string{"/nowhere"}, Dir: "/"}, nil, time.Now().Add(patience)); err == nil || !strings.Contains(err.Error(), "/nowhere: no such file") {
		t.Fatalf("error %v, want the program's name and why", err)
	}
	again, _ := r.program("exit 7", nil)
	r.status(again, 7)
}

// TestARoomKeepsAProgramUntilItIsKnown ends a program before its process is known: it is not
// reaped. Meanwhile, another one ends.
func TestARoomKeepsAProgramUntilItIsKnown(t *testing.T) {
	r := newRig(t)
	first, pid := r.program("exit 5", nil)
	second, _ := r.program("exit 6", nil)
	r.status(second, 6)
	if b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err != nil || len(b) == 0 {
		t.Fatalf("process %d: %v, want it kept", pid, err)
	}
	r.status(first, 5)
}

// TestAProgramsGroupEndsWithIt checks that a background process of a program does not outlive it.
func TestAProgramsGroupEndsWithIt(t *testing.T) {
	r := newRig(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	c, _ := r.program("sleep 1000 & exit 3", write)
	_ = write.Close()
	r.status(c, 3)
	if _, err := io.ReadAll(read); err != nil { // returns once no process has the pipe
		t.Fatal(err)
	}
}

// TestARoomEndsWithItsConnection closes the Runtime's connection.
func TestARoomEndsWithItsConnection(t *testing.T) {
	r := newRig(t)
	r.conn.Close()
	_ = r.cmd.Wait()
	if got := r.cmd.ProcessState.ExitCode(); got != killed {
		t.Fatalf("exit status %d, want %d", got, killed)
	}
}

// TestProgramsIgnoreNoSignals checks that a program of a pod ends by SIGTERM if it does not handle
// that.
func TestProgramsIgnoreNoSignals(t *testing.T) {
	r := newRig(t)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	c, _ := r.program("exec cat /proc/self/status", out)
	_ = out.Close()
	r.status(c, 0)
	b, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "SigIgn:")
	text, _, _ := strings.Cut(rest, "\n")
	ignored, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
	if err != nil || ignored&(1<<(unix.SIGTERM-1)) != 0 {
		t.Errorf("ignored signals: %q, %v, want no SIGTERM among them", text, err)
	}
}

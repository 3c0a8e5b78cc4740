package warden

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// slow returns a client of a warden that the test plays. The test may answer after the client has
// stopped waiting.
func slow(t *testing.T) (r *remote, told chan Exit, warden *wire) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, warden := pairOf(t, pair)
	t.Cleanup(func() { _ = warden.conn.Close() })
	cmd := exec.CommandContext(t.Context(), "sleep", "600") // stands for the warden's process
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if err := warden.send(message{Op: opAnswer, PID: cmd.Process.Pid}); err != nil {
		t.Fatal(err)
	}
	if r, err = greet(ours.conn, time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	r.patience = 10 * time.Millisecond
	told = make(chan Exit, 10)
	r.onExit = func(e Exit) { told <- e }
	_ = warden.conn.SetReadDeadline(time.Now().Add(time.Minute))
	if m, err := warden.receive(); err != nil || m.Op != opHello {
		t.Fatalf("%+v, %v, want hello", m, err)
	}
	return r, told, warden
}

// startedLate starts a process whose answer does not come in time, and returns the request.
func startedLate(t *testing.T, r *remote, w *wire, name string) message {
	t.Helper()
	if _, err := r.start(t.Context(), Process{Name: name}); err == nil || !strings.Contains(err.Error(), `start "`+name+`": not answered within`) {
		t.Fatalf("got %v, want an error that there was no answer", err)
	}
	m, err := w.receive()
	if err != nil || m.Op != opStart || m.Name != name {
		t.Fatalf("%+v, %v, want the request to start it", m, err)
	}
	if c, err := w.receive(); err != nil || c.Op != opCancel || c.Of != m.ID {
		t.Fatalf("%+v, %v, want that the start is canceled", c, err)
	}
	return m
}

// TestProcessOfALateStartIsKilledAndDropped checks both orders: the answer comes before the
// process's end, or after it.
func TestProcessOfALateStartIsKilledAndDropped(t *testing.T) {
	r, told, w := slow(t)
	say := func(m message) {
		t.Helper()
		if err := w.send(m); err != nil {
			t.Fatal(err)
		}
	}
	want := func(op, name string, signal syscall.Signal) {
		t.Helper()
		m, err := w.receive()
		if err != nil || m.Op != op || m.Name != name || m.Signal != int(signal) {
			t.Fatalf("%+v, %v, want %s of %s", m, err, op, name)
		}
	}
	a := startedLate(t, r, w, "a")
	say(message{Op: opAnswer, ID: a.ID, PID: 1 << 22})
	want(opSignal, "a", syscall.SIGKILL)
	say(message{Op: opExit, Name: "a", PID: 1 << 22, Status: 9})
	want(opDrop, "a", 0)

	b := startedLate(t, r, w, "b")
	say(message{Op: opExit, Name: "b", PID: 1 << 22, Status: 9})
	say(message{Op: opAnswer, ID: b.ID, PID: 1 << 22})
	want(opDrop, "b", 0)

	c := startedLate(t, r, w, "c")
	say(message{Op: opAnswer, ID: c.ID, Error: "it cannot"})
	r.patience = time.Minute
	started := make(chan error, 1)
	go func() {
		// It is answered in time, though the process ends at once.
		_, err := r.start(t.Context(), Process{Name: "d"})
		started <- err
	}()
	d, err := w.receive()
	if err != nil || d.Op != opStart || d.Name != "d" {
		t.Fatalf("%+v, %v, want no message about c, and the request to start d", d, err)
	}
	say(message{Op: opExit, Name: "d", PID: 1 << 22, Status: 9})
	say(message{Op: opAnswer, ID: d.ID, PID: 1 << 22})
	if err := <-started; err != nil {
		t.Error(err)
	}
	if e := <-told; e.Name != "b" {
		t.Errorf("told of %+v first, want b", e)
	}
	if e := <-told; e.Name != "d" || len(told) > 0 {
		t.Errorf("told of %+v and %d more, want d", e, len(told))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending)+len(r.running)+len(r.late) != 0 {
		t.Errorf("left are %v, %v, %v, want nothing", r.pending, r.running, r.late)
	}
}

package templatetest_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

const patience = time.Minute // bounds events that normally take milliseconds

// idle is a handler that ignores the ends of its children, as a handler may. Its replicas report
// their names.
const idle = `
import os, signal, sys, threading, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def place(state, replica):
    print("placed", replica.name, threading.active_count(), flush=True)
    print("placed", replica.name, file=sys.stderr, flush=True)
    if replica.name == "leaves":
        os._exit(5)

def infer(state, calls):
    return calls
`

// imaged returns the root of an image of the handler.
func imaged(t *testing.T, handler string) string {
	t.Helper()
	root := t.TempDir()
	if err := errors.Join(os.CopyFS(root, os.DirFS(templates+"/python3-stage")), os.WriteFile(filepath.Join(root, "handler.py"), []byte(handler), 0o600)); err != nil {
		t.Fatal(err)
	}
	return root
}

// zygote starts a zygote of the handler idle and waits until it is ready.
func zygote(t *testing.T) *keeper {
	t.Helper()
	return started(t, proctest.Python(t), imaged(t, idle))
}

// keeper is the manager's end of the control socket of a Python stage's zygote.
type keeper struct {
	*proctest.Keeper
	t *testing.T
}

// started starts the stage in the folder root as a zygote, or in the role that env selects. It
// returns when the process is ready.
func started(t *testing.T, python, root string, env ...string) *keeper {
	t.Helper()
	k := &keeper{proctest.Keep(t, root, env, python, "stage"), t}
	if o := k.Want(wire.ZygoteReady); int(o.PID) != k.Cmd.Process.Pid || o.Nanos == 0 || o.Threads != 0 {
		t.Errorf("ready: %+v", o)
	}
	return k
}

// began gives a child its replica, and returns its stage socket and its output.
func (k *keeper) began(gate *net.UnixConn, env ...string) (stage *net.UnixConn, stdout, stderr *os.File) {
	k.t.Helper()
	stage, there := proctest.Pair(k.t, unix.SOCK_STREAM)
	files := []*os.File{there}
	var out []*os.File
	for range 2 {
		r, w, err := os.Pipe()
		if err != nil {
			k.t.Fatal(err)
		}
		k.t.Cleanup(func() { _ = r.Close() })
		if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
			k.t.Fatal(err)
		}
		files, out = append(files, w), append(out, r)
	}
	k.Say(gate, proctest.Encode(wire.Order{Kind: wire.OrderBegin, Threads: 1, Env: env}), files...)
	for _, f := range files {
		f.Close()
	}
	gate.Close()
	return stage, out[0], out[1]
}

// descriptors returns the descriptors of a process, by number, with their targets.
func descriptors(pid int) (all []string) {
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(folder) // a process that has ended has none
	for _, e := range entries {
		to, _ := os.Readlink(filepath.Join(folder, e.Name()))
		all = append(all, e.Name()+" "+to)
	}
	return all
}

func comm(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestPythonChildWaitsAtItsGate checks that a forked child waits at its gate until an order makes
// it a replica. The child ends if the gate is closed, or if the message is invalid.
func TestPythonChildWaitsAtItsGate(t *testing.T) {
	k := zygote(t)
	own := comm(t, k.Cmd.Process.Pid)
	pid, gate := k.Fork(1)
	if got := comm(t, pid); got != "spare\n" || got == own {
		t.Errorf("it is called %q and its zygote %q, want spare and not", got, own)
	}
	proctest.Until(t, "it to have the gate in place of its zygote's own descriptors, and no signal blocked", func() bool {
		want := slices.DeleteFunc(descriptors(k.Cmd.Process.Pid), func(fd string) bool { return strings.Contains(fd, "signalfd") })
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		return err == nil && len(descriptors(pid)) == len(want) && !slices.Equal(descriptors(pid), want) && bytes.Contains(status, []byte("SigBlk:\t0000000000000000\n"))
	})
	stage, stdout, stderr := k.began(gate, wire.EnvReplica+"=me")
	for _, f := range []*os.File{stdout, stderr} {
		b := make([]byte, 100)
		n, err := f.Read(b)
		if got := string(b[:n]); err != nil || !strings.HasPrefix(got, "placed me") || f == stdout && got != "placed me 1\n" {
			t.Errorf("it prints %q, %v", got, err)
		}
	}
	if _, err := stage.Read(make([]byte, 1)); err != nil {
		t.Errorf("no hello: %v", err)
	}
	if got := comm(t, pid); got != own {
		t.Errorf("the replica is called %q, want %q as its zygote", got, own)
	}
	begin := proctest.Encode(wire.Order{Kind: wire.OrderBegin, Env: []string{"A=1"}})
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, tc := range map[string]struct {
		message []byte
		files   int
		status  int
		stderr  string
	}{
		"closed":              {nil, 0, 0, ""},
		"another kind":        {[]byte{'K', wire.OrderVersion, 0, 0, 0, 0, 0, 0}, 3, 1, "invalid begin order"},
		"another version":     {append([]byte{'B', 9}, begin[2:]...), 3, 1, "invalid begin order"},
		"short":               {begin[:7], 3, 1, "invalid begin order"},
		"too few descriptors": {begin, 2, 1, "invalid begin order"},
		"too long":            {append(slices.Clone(begin), make([]byte, 70<<10)...), 3, 1, "invalid begin order"},
		"unended environment": {begin[:len(begin)-1], 3, 1, "no end"},
	} {
		pid, gate := k.Fork(2)
		said := len(k.Stderr.String())
		if tc.message != nil {
			k.Say(gate, tc.message, slices.Repeat([]*os.File{null}, tc.files)...)
		}
		gate.Close()
		if o := k.Want(wire.ChildExited); int(o.PID) != pid || unix.WaitStatus(o.Status).ExitStatus() != tc.status {
			t.Errorf("%s: it ended with %+v, want pid %d and status %d", name, o, pid, tc.status)
		}
		deadline := time.Now().Add(patience)
		for !strings.Contains(k.Stderr.String()[said:], tc.stderr) && time.Now().Before(deadline) {
			runtime.Gosched() // its last line is still in the test's pipe
		}
		if got := k.Stderr.String()[said:]; !strings.Contains(got, tc.stderr) || tc.stderr == "" && got != "" {
			t.Errorf("%s: it said %q, want %q", name, got, tc.stderr)
		}
	}
}

// TestPythonChildMapsTheModelsPages checks a model that is mapped from model.safetensors in the
// stage's folder. The stage finds the file without STAGECOACH_MODEL. A fork does not copy the page
// table entries of a mapped file. So a waiting child has to fill its page tables with all pages of
// the file, and must not make private copies of these pages.
func TestPythonChildMapsTheModelsPages(t *testing.T) {
	const size = 40 << 20
	root := imaged(t, "def load(model):\n    return model.tensors\n\ndef infer(state, calls):\n    return calls\n")
	f, err := os.Create(filepath.Join(root, "model.safetensors"))
	if err == nil {
		err = safetensors.Write(f, nil, []safetensors.Source{{Name: "w", Dtype: "U8", Shape: []int64{size}, Data: bytes.NewReader(make([]byte, size))}})
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	k := &keeper{proctest.Keep(t, root, nil, proctest.Python(t), "stage"), t}
	if o := k.Want(wire.ZygoteReady); !o.Prepacked {
		t.Errorf("ready %+v, want parameters that are mapped", o)
	}
	const populateRead = 22
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	if err := unix.Madvise(page, populateRead); err != nil {
		t.Skipf("MADV_POPULATE_READ: %v: Linux 5.14 has it", err)
	}
	pid, _ := k.Fork(1)
	proctest.Until(t, "all of the model in a child's page tables", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
		_, model, _ := strings.Cut(string(b), "/model.safetensors\n")
		model, _, _ = strings.Cut(model, "VmFlags")
		fields := strings.Fields(model)
		kb := func(name string) int {
			n, _ := strconv.Atoi(fields[slices.Index(fields, name)+1])
			return n << 10
		}
		return err == nil && len(fields) > 0 && kb("Rss:") >= size && kb("Private_Clean:")+kb("Private_Dirty:") == 0
	})
}

// TestPythonZygoteReportsEachEndOnce checks that every child's end is reported once, for any number
// of children and any behaviour of the handler. The zygote must list its living children, and kill
// no other process.
func TestPythonZygoteReportsEachEndOnce(t *testing.T) {
	k := zygote(t)
	if got := k.Alive(77); len(got) != 0 {
		t.Errorf("before any fork: %v", got)
	}
	live, gates := map[uint32]bool{}, []*net.UnixConn{}
	var pids []int
	for range 30 {
		pid, gate := k.Fork(77)
		live[uint32(pid)], pids, gates = true, append(pids, pid), append(gates, gate)
	}
	slices.Sort(pids)
	if got := k.Alive(77); !slices.Equal(got, pids) {
		t.Errorf("children %v, want %v", got, pids)
	}
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGTERM), PID: uint32(pids[0])})
	if o := k.Want(wire.ChildExited); int(o.PID) != pids[0] || unix.WaitStatus(o.Status).Signal() != syscall.SIGTERM {
		t.Errorf("killed: %+v", o)
	}
	// not a child: no answer
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGTERM), PID: uint32(os.Getpid())})
	for _, pid := range pids[1:] {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	delete(live, uint32(pids[0]))
	for range pids[1:] {
		o := k.Want(wire.ChildExited)
		if !live[o.PID] {
			t.Errorf("pid %d: not known or reported twice", o.PID)
		}
		delete(live, o.PID)
	}
	for _, g := range gates {
		g.Close()
	}
	pid, gate := k.Fork(1)
	k.began(gate, wire.EnvReplica+"=leaves")
	if o := k.Want(wire.ChildExited); int(o.PID) != pid || unix.WaitStatus(o.Status).ExitStatus() != 5 {
		t.Errorf("a hook that leaves: %+v", o)
	}
}

// TestPythonZygoteEndsWithItsSocket checks that a zygote ends when its control socket closes. Its
// children must end with it, also if it is killed.
func TestPythonZygoteEndsWithItsSocket(t *testing.T) {
	for name, end := range map[string]func(k *keeper){
		"control socket closed": func(k *keeper) { k.Socket.Close() },
		"killed":                func(k *keeper) { _ = k.Cmd.Process.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			k := zygote(t)
			spare, _ := k.Fork(1)
			replica, gate := k.Fork(2)
			stage, _, _ := k.began(gate)
			if _, err := stage.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			end(k)
			if err := k.Cmd.Wait(); name == "killed" != (err != nil) {
				t.Errorf("the zygote ended with %v", err)
			}
			proctest.Gone(t, spare)
			proctest.Gone(t, replica)
		})
	}
}

// TestPythonRefusesInvalidOrders checks that invalid orders are refused as by package stage/zygote,
// and leave no descriptor open.
func TestPythonRefusesInvalidOrders(t *testing.T) {
	k := zygote(t)
	open := func() int { return len(descriptors(k.Cmd.Process.Pid)) }
	before := open()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fork := proctest.Encode(wire.Order{Kind: wire.OrderFork, ID: 5})
	const none = 1<<32 - 1
	for name, tc := range map[string]struct {
		message []byte
		fds     int
		id      uint32
		text    string
	}{
		"too short":              {[]byte("F"), 1, none, "1 bytes"},
		"unknown kind":           {append([]byte{'?', wire.OrderVersion}, fork[2:]...), 1, none, "kind 63"},
		"other version":          {append([]byte{'F', 9}, fork[2:]...), 1, 5, "version 9"},
		"no descriptor":          {fork, 0, 5, "0 descriptors, want 1"},
		"two gates":              {fork, 2, 5, "2 descriptors"},
		"too many descriptors":   {fork, 40, 5, "16 descriptors"},
		"fork with bytes behind": {append(slices.Clone(fork), 0), 1, 5, "9 bytes, want 8"},
		"too long":               {append(slices.Clone(fork), make([]byte, 70<<10)...), 1, 5, "65536 bytes"},
		"list with bytes behind": {[]byte{'L', wire.OrderVersion, 0, 0, 1, 0, 0, 0, 0}, 0, none, "kind 76 of 9 bytes"},
		"kill with bytes behind": {[]byte{'K', wire.OrderVersion, 9, 0, 1, 0, 0, 0, 0}, 0, none, "kind 75 of 9 bytes"},
	} {
		k.Say(k.Socket, tc.message, slices.Repeat([]*os.File{null}, tc.fds)...)
		if o := k.Want(wire.ZygoteError); o.ID != tc.id || !strings.Contains(o.Text, tc.text) {
			t.Errorf("%s: error %d %q, want %d and %q", name, o.ID, o.Text, tc.id, tc.text)
		}
	}
	pid, _ := k.Fork(1)
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: 200, PID: uint32(pid)})
	if o := k.Want(wire.ZygoteError); o.ID != none || !strings.Contains(o.Text, "signal 200") {
		t.Errorf("kill with signal 200: %+v", o)
	}
	if after := open(); after != before {
		t.Errorf("the zygote has %d descriptors open, want %d as before", after, before)
	}
}

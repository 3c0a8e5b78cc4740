package zygote_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func TestZygoteWithoutModelForks(t *testing.T) {
	k := start(t)
	if ready := k.Want(wire.ZygoteReady); ready.PID != uint32(k.Cmd.Process.Pid) || ready.Threads != 0 || ready.Nanos == 0 {
		t.Errorf("ready %+v, want pid %d, no threads, a load time", ready, k.Cmd.Process.Pid)
	}
	a := k.fork(1, "NAME=one", "EMPTY=", "ODD==x").do(question{Do: "look"})
	if a.Session {
		t.Error("a session without a model")
	}
	if want := []string{"NAME=one", "EMPTY=", "ODD==x"}; !slices.Equal(a.Env, want) {
		t.Errorf("environment of the order %q, want %q", a.Env, want)
	}
	for _, want := range []string{"PATH=" + os.Getenv("PATH"), "AFTER=1"} {
		if !slices.Contains(a.Environ, want) {
			t.Errorf("environment %q, want the zygote's %s in it", a.Environ, want)
		}
	}
	for _, v := range a.Environ {
		if strings.HasPrefix(v, wire.EnvZygoteFD) {
			t.Errorf("the child sees %s", v)
		}
	}
	if a.PID == k.Cmd.Process.Pid || !slices.Equal(a.Args, k.Cmd.Args) {
		t.Errorf("pid %d, arguments %q, want a pid of its own and %q", a.PID, a.Args, k.Cmd.Args)
	}
	if b := k.fork(0).do(question{Do: "look"}); len(b.Env) != 0 {
		t.Errorf("environment of an order without one: %q", b.Env)
	}
}

// TestChildInheritsNoDescriptorsOfSiblings checks a child's descriptors and signal mask while
// siblings run.
func TestChildInheritsNoDescriptorsOfSiblings(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	var others []*replica
	for range 3 {
		others = append(others, k.fork(1))
	}
	r := k.fork(1)
	a := r.do(question{Do: "look"})
	if a.Error != "" {
		t.Fatal(a.Error)
	}
	var fds []string
	for fd := range a.FDs {
		fds = append(fds, fd)
	}
	slices.Sort(fds)
	if !slices.Equal(fds, []string{"0", "1", "2", "3"}) {
		t.Errorf("descriptors %v, want 0 to 3", a.FDs)
	}
	if a.FDs["1"] != r.stdout.Name() || a.FDs["2"] != r.stderr.Name() || !strings.HasPrefix(a.FDs["3"], "socket:") {
		t.Errorf("descriptors %v, want stdout %s, stderr %s, a socket at 3", a.FDs, r.stdout.Name(), r.stderr.Name())
	}
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"SigBlk:", "SigIgn:"} {
		if got, want := line(a.Status, key), line(string(own), key); got != want {
			t.Errorf("%s %s, want %s as in this process", key, got, want)
		}
	}
	seeds := map[string]bool{a.Seeds: true}
	for _, o := range others {
		seeds[o.do(question{Do: "look"}).Seeds] = true
	}
	if len(seeds) != 4 {
		t.Errorf("%d different random seeds among four siblings: %v", len(seeds), seeds)
	}
}

func line(status, key string) string {
	for l := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(l, key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return "missing"
}

func TestStdoutAndStderrComeFromTheOrder(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	r := k.fork(1)
	r.do(question{Do: "print"})
	if got := content(t, r.stdout); got != "to stdout of " {
		t.Errorf("stdout %q", got)
	}
	if got := content(t, r.stderr); got != "to stderr" {
		t.Errorf("stderr %q", got)
	}
	if s := k.Stderr.String(); s != "" {
		t.Errorf("the zygote's own stderr got %q", s)
	}
}

// TestEachEndOfAChildIsReportedOnce checks that each end of a child is reported once, with its
// cause.
func TestEachEndOfAChildIsReportedOnce(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	for name, tc := range map[string]struct {
		end  func(r *replica)
		want func(unix.WaitStatus) bool
	}{
		"killed by order": {func(r *replica) {
			k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(r.pid)})
		}, func(s unix.WaitStatus) bool { return s.Signaled() && s.Signal() == syscall.SIGKILL }},
		"killed by someone": {func(r *replica) {
			if err := syscall.Kill(r.pid, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}, func(s unix.WaitStatus) bool { return s.Signaled() && s.Signal() == syscall.SIGKILL }},
		"asked to end": {func(r *replica) {
			k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGTERM), PID: uint32(r.pid)})
		}, func(s unix.WaitStatus) bool { return s.Signaled() && s.Signal() == syscall.SIGTERM }},
		"socket closed": {func(r *replica) { r.socket.Close() }, func(s unix.WaitStatus) bool { return s.Exited() && s.ExitStatus() == 0 }},
		"exit status":   {func(r *replica) { _ = r.ask.Encode(question{Do: "exit"}) }, func(s unix.WaitStatus) bool { return s.Exited() && s.ExitStatus() == 7 }},
	} {
		r := k.fork(1)
		r.do(question{Do: "look"}) // waits until it has started
		tc.end(r)
		if o := k.Want(wire.ChildExited); int(o.PID) != r.pid || !tc.want(unix.WaitStatus(o.Status)) {
			t.Errorf("%s: %+v of pid %d", name, o, r.pid)
		}
		// The order comes too late and is ignored.
		k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(r.pid)})
	}
	// A kill of a process that is no child of the zygote is ignored. Otherwise, this test would end.
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(os.Getpid())})
	k.fork(1)
}

// TestChildWaitsForItsBeginOrder checks that a child waits at its gate for its begin order. The
// child ends if the gate is closed or the order is invalid.
func TestChildWaitsForItsBeginOrder(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	pid, gate := k.Fork(77)
	waits := func() bool { // it is not a Go program yet, which would have threads
		all, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		return err == nil && len(all) == 1
	}
	if !waits() {
		t.Error("a child starts before its begin order")
	}
	comm := func(pid int) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	own := comm(k.Cmd.Process.Pid)
	if got := comm(pid); got != "spare\n" || own == got {
		t.Errorf("it is called %q and its zygote %q, want spare and not", got, own)
	}
	socket, there := proctest.Pair(t, unix.SOCK_STREAM)
	r := newReplica(t, socket)
	k.Say(gate, proctest.Encode(wire.Order{Kind: wire.OrderBegin, Env: []string{"A=1"}}), there, r.stdout, r.stderr)
	if a := r.do(question{Do: "look"}); len(a.FDs) != 4 || !slices.Equal(a.Env, []string{"A=1"}) {
		t.Errorf("descriptors %v, want 0 to 3; environment %v, want A=1", a.FDs, a.Env)
	}
	if got := comm(pid); waits() || got != own {
		t.Errorf("the replica is called %q, want %q as its zygote; or the number of threads says nothing", got, own)
	}
	there.Close()
	socket.Close()
	k.Want(wire.ChildExited)

	begin := proctest.Encode(wire.Order{Kind: wire.OrderBegin, Env: []string{"A=1"}})
	for name, tc := range map[string]struct {
		message []byte // nil: no message
		files   []*os.File
		status  int
		stderr  string
	}{
		"closed":              {nil, nil, 0, ""},
		"another kind":        {[]byte{'K', wire.OrderVersion, 0, 0, 0, 0, 0, 0}, []*os.File{r.stdout, r.stdout, r.stderr}, 1, "invalid begin order"},
		"another version":     {append([]byte{'B', 9}, begin[2:]...), []*os.File{r.stdout, r.stdout, r.stderr}, 1, "invalid begin order"},
		"short":               {begin[:7], []*os.File{r.stdout, r.stdout, r.stderr}, 1, "invalid begin order"},
		"too few descriptors": {begin, []*os.File{r.stdout, r.stderr}, 1, "invalid begin order"},
		"too long":            {append(slices.Clone(begin), make([]byte, 70<<10)...), []*os.File{r.stdout, r.stdout, r.stderr}, 1, "invalid begin order"},
		"unended environment": {begin[:len(begin)-1], []*os.File{r.stdout, r.stdout, r.stderr}, 1, "no end"},
	} {
		pid, gate := k.Fork(77)
		said := len(k.Stderr.String())
		if tc.message != nil {
			k.Say(gate, tc.message, tc.files...)
		}
		gate.Close()
		if o := k.Want(wire.ChildExited); int(o.PID) != pid || unix.WaitStatus(o.Status).ExitStatus() != tc.status {
			t.Errorf("%s: it ended with %+v, want pid %d and status %d", name, o, pid, tc.status)
		}
		deadline := time.Now().Add(patience)
		for !strings.Contains(k.Stderr.String()[said:], tc.stderr) && time.Now().Before(deadline) {
			runtime.Gosched() // its last line is still on its way through the test's pipe
		}
		if got := k.Stderr.String()[said:]; !strings.Contains(got, tc.stderr) || tc.stderr == "" && got != "" {
			t.Errorf("%s: it said %q, want %q", name, got, tc.stderr)
		}
	}
}

// TestListNamesRunningChildren lists the children that run.
func TestListNamesRunningChildren(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	if got := k.Alive(77); len(got) != 0 {
		t.Errorf("before any fork: %v", got)
	}
	a, b := k.fork(1), k.fork(1)
	want := []int{a.pid, b.pid}
	slices.Sort(want)
	if got := k.Alive(77); !slices.Equal(got, want) {
		t.Errorf("children %v, want %v", got, want)
	}
	a.socket.Close()
	k.Want(wire.ChildExited)
	if got := k.Alive(77); !slices.Equal(got, []int{b.pid}) {
		t.Errorf("after the first has ended: %v, want %d", got, b.pid)
	}
}

func TestEveryEndIsReportedOnce(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	live := map[uint32]bool{}
	var all []*replica
	for range 20 {
		r := k.fork(1)
		live[uint32(r.pid)] = true
		all = append(all, r)
	}
	for _, r := range all {
		if err := syscall.Kill(r.pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	for range all {
		o := k.Want(wire.ChildExited)
		if !live[o.PID] {
			t.Errorf("pid %d: unknown or reported twice", o.PID)
		}
		delete(live, o.PID)
	}
}

// TestChildrenEndWithTheZygote checks that the zygote ends when its control socket closes. However
// a zygote ends, its children must end with it.
func TestChildrenEndWithTheZygote(t *testing.T) {
	for name, end := range map[string]func(k *keeper){
		"control socket closed": func(k *keeper) { k.Socket.Close() },
		"killed":                func(k *keeper) { _ = k.Cmd.Process.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			k := start(t)
			k.Want(wire.ZygoteReady)
			idle, fresh := k.fork(1), k.fork(1)
			idle.do(question{Do: "look"})
			end(k)
			err := k.Cmd.Wait()
			if name == "killed" != (err != nil) {
				t.Errorf("the zygote ended with %v", err)
			}
			idle.gone()
			fresh.gone()
		})
	}
}

func TestRefusedOrders(t *testing.T) {
	k := start(t)
	k.Want(wire.ZygoteReady)
	open := func() int {
		all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", k.Cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	before := open()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fds := func(n int) []*os.File { return slices.Repeat([]*os.File{null}, n) }
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
		k.Say(k.Socket, tc.message, fds(tc.fds)...)
		if o := k.Want(wire.ZygoteError); o.ID != tc.id || !strings.Contains(o.Text, tc.text) {
			t.Errorf("%s: error %d %q, want %d and %q", name, o.ID, o.Text, tc.id, tc.text)
		}
	}
	r := k.fork(1)
	k.Say(k.Socket, []byte{'K', wire.OrderVersion, 200, 0, byte(r.pid), byte(r.pid >> 8), byte(r.pid >> 16), byte(r.pid >> 24)})
	if o := k.Want(wire.ZygoteError); o.ID != none || !strings.Contains(o.Text, "signal 200") {
		t.Errorf("kill with signal 200: %+v", o)
	}
	if after := open(); after != before {
		t.Errorf("the zygote has %d descriptors open, want %d as before", after, before)
	}
}

func TestFailedLoadNamesTheCause(t *testing.T) {
	lib := library(t)
	garbage := filepath.Join(t.TempDir(), "garbage.onnx")
	if err := os.WriteFile(garbage, []byte("not a model"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		env  []string
		want string
	}{
		"no library named":  {[]string{wire.EnvModel + "=m.onnx"}, wire.EnvORT},
		"no such library":   {[]string{wire.EnvModel + "=m.onnx", wire.EnvORT + "=/nosuch.so"}, "/nosuch.so"},
		"another library":   {[]string{wire.EnvModel + "=m.onnx", wire.EnvORT + "=libm.so.6"}, "OrtGetApiBase"},
		"no such model":     {[]string{wire.EnvModel + "=nosuch.onnx", wire.EnvORT + "=" + lib}, "nosuch.onnx"},
		"no model":          {[]string{wire.EnvModel + "=" + garbage, wire.EnvORT + "=" + lib}, "garbage.onnx"},
		"threads no number": {[]string{wire.EnvModel + "=m.onnx", wire.EnvORT + "=" + lib, wire.EnvPoolThreads + "=two"}, "two"},
		"too many threads":  {[]string{wire.EnvModel + "=m.onnx", wire.EnvORT + "=" + lib, wire.EnvPoolThreads + "=1000"}, "1..256"},
	} {
		t.Run(name, func(t *testing.T) {
			k := start(t, tc.env...)
			if o := k.Want(wire.ZygoteError); o.ID != 0 || !strings.Contains(o.Text, tc.want) {
				t.Errorf("error %d %q, want 0 and %q in it", o.ID, o.Text, tc.want)
			}
			if err := k.Cmd.Wait(); err == nil {
				t.Error("the zygote ended with status 0")
			}
		})
	}
}

func TestControlDescriptorIsChecked(t *testing.T) {
	for _, fd := range []string{"", "x", "99", "-1", "3x"} {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = []string{wire.EnvZygoteFD + "=" + fd}
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), wire.EnvZygoteFD+"="+fd) {
			t.Errorf("descriptor %q: %v, output %q, want a refusal that names it", fd, err, out)
		}
	}
}

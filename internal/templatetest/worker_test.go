package templatetest_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// tenant is a handler of a stage in a worker. It reports what it sees, and does what the file WORD
// says.
const tenant = `
import logging, os, socket, sys, threading, weakref
import part
socket.setdefaulttimeout(0.001)

WORD = "%s"

class State:
    def __init__(self):
        self.itself = self

def load(model):
    import part as again
    print("load", WORD, part.WORD, again is part, model.path)
    if WORD == "broken":
        raise ValueError("no good")
    if WORD == "b":
        sys.path.pop(0)
    if WORD == "stays":
        threading.Event().wait()
    state = State()
    weakref.finalize(state, os.write, 2, b"let go of " + WORD.encode() + b"\n")
    return state

def place(state, replica):
    print("place", replica.name, replica.device, os.environ["NAME"], os.getenv("CUDA_VISIBLE_DEVICES"), open("word").read())
    print("to stderr", WORD, file=sys.stderr)
    logging.info("logged by %%s", WORD)
    os.environ["NAME"] = WORD
    return state

def infer(state, calls):
    return calls
`

// tenantImage returns the root of an image of the handler tenant, with its own module.
func tenantImage(t *testing.T, word string) string {
	t.Helper()
	root := imaged(t, fmt.Sprintf(tenant, word))
	if err := errors.Join(os.WriteFile(filepath.Join(root, "part.py"), []byte("WORD = 'part of "+word+"'\n"), 0o600), os.WriteFile(filepath.Join(root, "word"), []byte(word), 0o600)); err != nil {
		t.Fatal(err)
	}
	return root
}

// resident is a stage in a worker.
type resident struct {
	tid            int
	stage          *net.UnixConn
	stdout, stderr *bufio.Reader
}

// moveIn makes a worker start the stage of an image.
func (k *keeper) moveIn(name, root string) resident {
	k.t.Helper()
	tid, gate := k.Fork(77)
	stage, stdout, stderr := k.began(gate, wire.EnvReplica+"="+name, wire.EnvStageRoot+"="+root, wire.EnvModel+"=model", "NAME="+name, "CUDA_VISIBLE_DEVICES=GPU-other")
	return resident{tid, stage, bufio.NewReader(stdout), bufio.NewReader(stderr)}
}

func (k *keeper) line(r *bufio.Reader, want ...string) {
	k.t.Helper()
	for _, w := range want {
		if got, err := r.ReadString('\n'); err != nil || !strings.Contains(got, w) {
			k.t.Errorf("line %q, %v, want %q", got, err, w)
		}
	}
}

// serves checks what a stage of the image word has reported when it sends its Hello.
func (k *keeper) serves(r resident, name, word, root string) {
	k.t.Helper()
	k.line(r.stdout, "load "+word+" part of "+word+" True "+root+"/model\n", "place "+name+" cpu "+name+" None "+word+"\n")
	k.line(r.stderr, "to stderr "+word+"\n", "INFO logged by "+word+"\n")
	c := wire.NewConn(wire.NewSocket(r.stage))
	if f, err := c.Read(); err != nil || f.Type != wire.FrameHello {
		k.t.Errorf("no hello of %s: %v, %v", name, f.Type, err)
	}
	if err := c.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version}.Append(nil)}); err != nil {
		k.t.Error(err)
	}
}

// exits checks how a stage has ended.
func (k *keeper) exits(r resident, status uint32) {
	k.t.Helper()
	if o := k.Want(wire.ChildExited); int(o.PID) != r.tid || o.Status != status {
		k.t.Errorf("ended: %+v, want %d with status %#x", o, r.tid, status)
	}
	proctest.Until(k.t, "its thread to be gone", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", k.Cmd.Process.Pid, r.tid))
		return err != nil
	})
}

// worker starts a worker.
func worker(t *testing.T) *keeper {
	t.Helper()
	return started(t, proctest.Python(t), tenantImage(t, "first"), wire.EnvWorker+"=1")
}

// TestPythonStagesOfAWorkerAreSeparate checks stages whose modules, environments, folders and
// outputs have equal names. They must run in one process, but each must see only its own. When one
// stage ends, the others must go on.
func TestPythonStagesOfAWorkerAreSeparate(t *testing.T) {
	k := worker(t)
	roots := map[string]string{"a": tenantImage(t, "a"), "b": tenantImage(t, "b")}
	a := k.moveIn("one", roots["a"])
	b := k.moveIn("two", roots["b"])
	k.serves(a, "one", "a", roots["a"])
	k.serves(b, "two", "b", roots["b"])
	spare, gate := k.Fork(77)
	again := k.moveIn("three", roots["a"])
	k.serves(again, "three", "a", roots["a"])
	if got := k.Alive(77); len(got) != 4 {
		t.Errorf("stages %v, want three, and a spare thread", got)
	}
	for _, r := range []resident{a, b, again} {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", k.Cmd.Process.Pid, r.tid)); err != nil {
			t.Errorf("stage %d is no thread of the worker: %v", r.tid, err)
		}
	}
	a.stage.Close()
	k.exits(a, 0)
	proctest.Until(t, "what a stage had to be free", func() bool { return strings.Contains(k.Stderr.String(), "let go of a\n") })
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGTERM), PID: uint32(b.tid)})
	k.exits(b, 0)
	for _, r := range []resident{a, b} {
		if rest, err := r.stdout.ReadString('\n'); err == nil || rest != "" {
			t.Errorf("it has printed %q, and has not closed", rest)
		}
	}
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(again.tid)})
	k.exits(again, uint32(syscall.SIGKILL))
	gate.Close()
	k.exits(resident{tid: spare}, 0)
	if got := k.Alive(77); len(got) != 0 {
		t.Errorf("stages %v, want none", got)
	}
	before := len(descriptors(k.Cmd.Process.Pid))
	for range 3 {
		r := k.moveIn("four", roots["b"])
		k.serves(r, "four", "b", roots["b"])
		r.stage.Close()
		k.exits(r, 0)
	}
	proctest.Until(t, "no more descriptors to be open than before", func() bool { return len(descriptors(k.Cmd.Process.Pid)) <= before })
}

// TestPythonWorkerOutlivesFailedStarts checks stages that fail to start. Each must report its
// failure on its own stderr, and the others must go on. The worker must end only if a failed stage
// does not end.
func TestPythonWorkerOutlivesFailedStarts(t *testing.T) {
	k := worker(t)
	root := tenantImage(t, "a")
	lives := k.moveIn("lives", root)
	k.serves(lives, "lives", "a", root)
	empty := t.TempDir()
	for name, tc := range map[string]struct{ root, want string }{
		"load raises": {tenantImage(t, "broken"), "stage: load: ValueError: no good (at handler.py:16)\n"},
		"no handler":  {empty, "stage: no handler.py in " + empty},
		"no root":     {empty + "/none", "want the folder of the stage's image"},
		"relative":    {"x", "want the folder of the stage's image"},
	} {
		r := k.moveIn("fails", tc.root)
		last := ""
		for {
			line, err := r.stderr.ReadString('\n')
			if err != nil {
				break
			}
			last = line
		}
		if !strings.Contains(last, tc.want) {
			t.Errorf("%s: its last line is %q, want %q", name, last, tc.want)
		}
		k.exits(r, 1<<8)
	}
	begin := proctest.Encode(wire.Order{Kind: wire.OrderBegin})
	for name, tc := range map[string]struct {
		message []byte
		status  uint32
	}{
		"gate closed": {nil, 0},
		"parked":      {proctest.Encode(wire.Order{Kind: wire.OrderPark}), 1 << 8},
		"no sockets":  {begin, 1 << 8},
	} {
		tid, gate := k.Fork(3)
		if tc.message != nil {
			k.Say(gate, tc.message)
		}
		gate.Close()
		t.Log(name)
		k.exits(resident{tid: tid}, tc.status)
	}
	tid, _ := k.Fork(3)
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(tid)})
	k.exits(resident{tid: tid}, uint32(syscall.SIGKILL))
	if got := k.Alive(77); len(got) != 1 || got[0] != lives.tid {
		t.Errorf("stages %v, want %d", got, lives.tid)
	}
	stays := tenantImage(t, "stays")
	stuck := k.moveIn("stuck", stays)
	k.line(stuck.stdout, "load stays part of stays True "+stays+"/model\n")
	k.Order(wire.Order{Kind: wire.OrderKill, Signal: uint16(syscall.SIGKILL), PID: uint32(stuck.tid)})
	if err := k.Cmd.Wait(); err == nil || k.Cmd.ProcessState.ExitCode() != 1 || !strings.Contains(k.Stderr.String(), "replica stuck does not end 2 s after it was killed") {
		t.Errorf("the worker ended with %v and said %q", err, k.Stderr)
	}
}

// noContext is a handler in PyTorch that has lost its context on the device.
const noContext = `
import sys, types

def gone():
    raise RuntimeError("CUDA error: unspecified launch failure")

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(empty_cache=gone)

def place(state, replica):
    raise ValueError("no good")

def infer(state, calls):
    return calls
`

// TestPythonWorkerWithoutContext checks that a worker ends when a stage has lost the context that
// all stages share. The stage's end must be reported.
func TestPythonWorkerWithoutContext(t *testing.T) {
	none := t.TempDir()
	if err := os.WriteFile(filepath.Join(none, "torch.py"), []byte("raise ImportError\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := started(t, proctest.Python(t), tenantImage(t, "first"), wire.EnvWorker+"=1", "CUDA_VISIBLE_DEVICES=GPU-a", "PYTHONPATH="+none)
	k.moveIn("lost", imaged(t, noContext))
	const want = "replica lost could not be removed: RuntimeError: CUDA error: unspecified launch failure; this process and all its stages end\n"
	if err := k.Cmd.Wait(); err == nil || k.Cmd.ProcessState.ExitCode() != 1 || !strings.Contains(k.Stderr.String(), want) {
		t.Errorf("the worker ended with %v and said %q", err, k.Stderr)
	}
}

// TestPythonWorkerEndsWithItsSocket checks that a worker ends when its control socket closes.
// Before that, it must refuse invalid orders, as a zygote does.
func TestPythonWorkerEndsWithItsSocket(t *testing.T) {
	k := worker(t)
	k.Say(k.Socket, []byte{'?', wire.OrderVersion, 0, 0, 0, 0, 0, 0})
	if o := k.Want(wire.ZygoteError); !strings.Contains(o.Text, "kind 63") {
		t.Errorf("an order of no kind: %+v", o)
	}
	k.Order(wire.Order{Kind: wire.OrderFork, ID: 5})
	if o := k.Want(wire.ZygoteError); o.ID != 5 || !strings.Contains(o.Text, "0 descriptors, want 1") {
		t.Errorf("a fork without a gate: %+v", o)
	}
	k.moveIn("lives", tenantImage(t, "a"))
	k.Socket.Close()
	if err := k.Cmd.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

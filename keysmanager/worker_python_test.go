package keysmanager

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Handlers of stages that share a worker.
const (
	// pyTenant reports which function it is; its image has a module of the same name as another's.
	pyTenant = `
import os, threading
import stagecoach as sc

def load(model):
    print("loads", NAME)
    return {"weights": dict(model.tensors) if model.path else {}}

def place(state, replica):
    return {**state, "replica": replica.name}

def infer(state, calls):
    env = {"name": NAME, "own": os.environ.get("OWN", ""), "root": os.path.basename(os.path.dirname(os.getcwd())), "replica": state["replica"],
           "weights": str(sorted(state["weights"])), "device": os.environ.get("CUDA_VISIBLE_DEVICES", "none")}
    print("infers", NAME)
    return [{"pid": os.getpid(), "env": env} for c in calls]
`
	pyLeft, pyRight = "NAME = 'left'\n" + pyTenant, "NAME = 'right'\n" + pyTenant
	// pyStuck never answers, and ignores all messages.
	pyStuck = "NAME = 'stuck'\n" + pyTenant + `
def infer(state, calls):
    import time
    print("begins")
    while True: time.sleep(0.1)
`
)

// sharing returns a function in the worker "shared".
func sharing(python, image string, env ...string) node.Spec {
	s := pySpec(python, image, env...)
	s.Worker = "shared"
	return s
}

// TestPythonStagesInAWorker runs two functions of two images in one process. One stops and starts
// again while the other goes on.
func TestPythonStagesInAWorker(t *testing.T) {
	python, dir := proctest.Python(t), t.TempDir()
	n := pyNode(t, dir, map[string]string{
		"left": pyLeft, "right": pyRight, "raises": pyLeft + "\ndef load(model): raise ValueError('bad shape')\n",
		"misplaced": pyLeft + "\ndef place(state, replica): raise OSError('no place')\n",
	}, nil)
	if err := os.Remove(filepath.Join(dir, "py", "right", "1", "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	left, right := sharing(python, "left", "OWN=1", "STAGECOACH_MODEL=model.safetensors"), sharing(python, "right", "OWN=2")
	a, b := n.start("a", left), n.start("b", right)
	if a.Path != PathResident || a.PID != b.PID || n.worker("").PID != a.PID {
		t.Errorf("path %s, processes %d and %d", a.Path, a.PID, b.PID)
	}
	for r, want := range map[*startedReplica]map[string]string{
		a: {"name": "left", "own": "1", "root": "left", "replica": "a", "weights": "['w']", "device": ""},
		b: {"name": "right", "own": "2", "root": "right", "replica": "b", "weights": "[]", "device": ""},
	} {
		p := n.probe(r)
		for k, v := range want {
			if p.PID != a.PID || p.Env[k] != v {
				t.Errorf("%s: process %d, %s is %q, want %d and %q", r.Name, p.PID, k, p.Env[k], a.PID, v)
			}
		}
		for _, line := range []string{"stdout: loads " + want["name"], "stdout: infers " + want["name"]} {
			proctest.Until(t, r.Name+" to have printed "+line, func() bool { return slices.Contains(n.printedBy(r.Name), line) })
		}
		if got := n.printedBy("worker"); len(got) > 0 {
			t.Errorf("its worker has printed %q", got)
		}
	}
	for name, want := range map[string]string{"raises": "exit status 1: stage: load: ValueError: bad shape", "misplaced": "exit status 1: stage: place: OSError: no place"} {
		if r := n.start(name, sharing(python, name)); r.PID != a.PID {
			t.Errorf("%s: process %d, want %d", name, r.PID, a.PID)
		}
		if e := n.exit(); e.Replica != name || !strings.Contains(e.Cause, want) {
			t.Errorf("exit %+v, want %q", e, want)
		}
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "a" || e.Cause != resources.ExitedWell {
		t.Errorf("exit %+v", e)
	}
	if again := n.start("a", left); again.PID != b.PID || n.probe(again).Env["name"] != "left" {
		t.Errorf("again in process %d, want %d", again.PID, b.PID)
	}
	if err := syscall.Kill(b.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended := map[string]string{}
	for range 2 {
		e := n.exit()
		ended[e.Replica] = e.Cause
	}
	if want := "its worker ended: killed by SIGKILL"; ended["a"] != want || ended["b"] != want {
		t.Errorf("ends %v", ended)
	}
	// There is a back-off, as for a zygote that has ended without being asked to.
	proctest.Until(t, "its back-off to be over", func() bool {
		r, err := n.Start(t.Context(), node.Order{Replica: "a", Spec: left})
		if err != nil {
			return false
		}
		defer r.Conn.Close()
		return r.PID != b.PID && n.probe(r).Env["name"] == "left"
	})
}

// TestAStuckPythonStageEndsItsWorker kills a stuck replica. Its worker must end, and no other start
// or stop may have to wait.
func TestAStuckPythonStageEndsItsWorker(t *testing.T) {
	python := proctest.Python(t)
	n := pyNode(t, t.TempDir(), map[string]string{"stuck": pyStuck, "right": pyRight}, nil)
	b, a := n.start("b", sharing(python, "right")), n.start("a", sharing(python, "stuck"))
	n.probe(b)
	c := wire.NewConn(a.Conn)
	if err := a.Conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	_, err := c.Read() // Hello
	batch := wire.Batch{Calls: []wire.Call{{}}}
	if err = errors.Join(err, c.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version}.Append(nil)}),
		c.Write(wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: batch.Append(nil)})); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "it to be stuck", func() bool { return slices.Contains(n.printedBy("a"), "stdout: begins") })
	if err := n.Stop(t.Context(), "a", time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e := n.exit(); !strings.HasPrefix(e.Cause, "its worker ended: exit status 1: worker: replica a does not end") {
			t.Errorf("exit %+v", e)
		}
	}
}

// TestAWorkerIsAdopted checks that a worker is adopted with all replicas that run in it.
func TestAWorkerIsAdopted(t *testing.T) {
	python, dir, w, g := proctest.Python(t), t.TempDir(), wardenOf(t), groups(t)
	n := pyNode(t, dir, map[string]string{"left": pyLeft, "right": pyRight}, func(c *Config) { c.Warden, c.Groups = w, g })
	a, b := n.start("a", sharing(python, "left")), n.start("b", sharing(python, "right"))
	n.probe(a)
	n.Detach()
	drain(n)
	log := &lockedLog{}
	n = pyNode(t, dir, nil, func(c *Config) { c.Warden, c.Groups, c.Log = w, g, slog.New(slog.NewTextHandler(log, nil)) })
	if z := n.worker(""); z.PID != a.PID || z.Replicas != 2 || z.Path != PathResident || !slices.Equal(n.names(), []string{"a", "b"}) {
		t.Errorf("adopted %+v with %q", z, n.names())
	}
	if log.count("WARN") > 0 {
		t.Error("the log has warnings")
	}
	proctest.Until(t, "what they use", func() bool {
		inv := n.Inventory()
		z, r := inv.Zygotes[0].Usage, inv.Replicas
		for _, r := range r {
			if r.PID != a.PID || r.Path != PathResident || r.CPUMilli != 0 {
				t.Fatalf("adopted %+v, want process %d", r, a.PID)
			}
		}
		return z != nil && z.Memory > 0 && r[0].Usage.Memory == z.Memory/2 && r[1].Usage.Memory == z.Memory/2
	})
	if got := n.probe(b); got.Env["name"] != "right" {
		t.Errorf("it answers %+v", got)
	}
	c := n.start("c", sharing(python, "left"))
	if c.PID != a.PID || n.probe(c).PID != a.PID {
		t.Errorf("a later one is process %d, want %d", c.PID, a.PID)
	}
	for _, name := range []string{"a", "c"} {
		if err := n.Stop(t.Context(), name, time.Minute); err != nil {
			t.Fatal(err)
		}
		if e := n.exit(); e.Replica != name || e.Cause != resources.ExitedWell {
			t.Errorf("exit %+v", e)
		}
	}
	if z := n.worker(""); z.Replicas != 1 {
		t.Errorf("worker %+v", z)
	}
	if _, err := n.Evict(t.Context(), sharing(python, "right").Function); !errors.Is(err, ErrBusy) {
		t.Errorf("evict: %v, want that it is busy", err)
	}
}

// TestAWorkerUnderAnAccountReadsItsImages checks that a worker reads images of its namespace
// although other users cannot read them.
func TestAWorkerUnderAnAccountReadsItsImages(t *testing.T) {
	python, dir := proctest.Python(t), openDir(t)
	closed := filepath.Join(dir, "closed")
	images := filepath.Join(closed, "images")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	n := pyNode(t, images, map[string]string{"left": pyLeft, "right": pyRight}, func(c *Config) { c.Accounts = accountsIn(t, dir) })
	for _, name := range []string{"left", "right"} { // with the modes that an image store sets
		if err := os.Chmod(filepath.Join(images, "py", name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	a, b := n.start("a", sharing(python, "left")), n.start("b", sharing(python, "right", "STAGECOACH_MODEL=model.safetensors"))
	if again := n.start("c", sharing(python, "right")); n.probe(again).PID != a.PID {
		t.Error("again: in another process")
	}
	if p := n.probe(a); p.Env["name"] != "left" {
		t.Errorf("a answers %+v", p)
	}
	if p := n.probe(b); p.PID != a.PID || p.Env["weights"] != "['w']" || userOf(t, p.PID) == 0 {
		t.Errorf("b answers %+v as user %d", p, userOf(t, p.PID))
	}
}

// TestAWorkerThatDoesNotStart checks that the error of the start says why.
func TestAWorkerThatDoesNotStart(t *testing.T) {
	python := proctest.Torch(t)
	n := pyNode(t, t.TempDir(), map[string]string{"left": pyLeft}, func(c *Config) {
		c.Devices = func() []Device { return []Device{{ID: "GPU-none", Memory: 10 * gib}} }
	})
	s := sharing(python, "left")
	s.DeviceMemory = gib
	r, err := n.Start(t.Context(), node.Order{Replica: "a", Spec: s, Device: "GPU-none"})
	if err == nil {
		t.Fatalf("started as %+v", r)
	}
	if got := err.Error(); !strings.Contains(got, "stagecoach.dev/process is shared: ") || !strings.Contains(got, "worker: ") || strings.Contains(got, "zygote") {
		t.Errorf("got %v", err)
	}
	if d := n.Inventory().Devices[0]; d.Reserved != 0 {
		t.Errorf("device %+v, want nothing reserved", d)
	}
}

package keysmanager

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// pyPlaced has parameters that are placed without a hook, and reports the device that it uses.
const pyPlaced = `
import os
import torch
import stagecoach as sc

def load(model):
    return {"weights": model.torch(), "loaded": os.getpid()}

def infer(state, calls):
    env = {"device": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "sum": str(int(state["weights"]["w"].sum()))}
    return [{"pid": os.getpid(), "loaded": state["loaded"], "env": env} for c in calls]
`

// onStandIn changes images of stages so that they use a device in host memory in place of CUDA's.
// The stand-in is imported only when a device is asked for, because it imports PyTorch. If PyTorch
// is imported before the number of threads is set, its BLAS starts threads.
func onStandIn(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		root := filepath.Join(dir, "py", name, "1")
		program, err := os.ReadFile(filepath.Join(root, "stage"))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Replace(string(program), "stagecoach.main()", `stagecoach.device._Cuda = lambda torch, name: __import__("runpy").run_path(root + "/standin.py")["StandIn"](); stagecoach.main()`, 1)
		if text == string(program) {
			t.Fatalf("the template's stage does not call stagecoach.main():\n%s", text)
		}
		stand, err := os.ReadFile("../internal/templatetest/testdata/standin.py")
		if err = errors.Join(err, os.WriteFile(filepath.Join(root, "stage"), []byte(text), 0o755), os.WriteFile(filepath.Join(root, "standin.py"), stand, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPythonChildrenPark parks children on a stand-in for a device. When a parked child becomes a
// replica, its parameters are copied to the device. A stage that does not find its device has no
// parked child, and its replicas are forked.
func TestPythonChildrenPark(t *testing.T) {
	python, dir := proctest.Torch(t), t.TempDir()
	r := &rack{all: []Device{{ID: "GPU-a", Memory: 10 * gib}}}
	n := pyNode(t, dir, map[string]string{"placed": pyPlaced, "none": pyPlaced}, func(c *Config) { c.Devices = r.look })
	onStandIn(t, dir, "placed")
	s := pySpec(python, "placed", "STAGECOACH_MODEL=model.safetensors")
	s.Devices, s.DeviceMemory = 1, gib
	n.keyStages(s)
	parked := n.parkedOn("GPU-a")["GPU-a"]
	rep := n.on("r", "GPU-a", s)
	p := n.probe(rep)
	if rep.Path != PathParked || rep.PID != parked || p.PID != parked || p.Loaded != n.zygote() || p.Env["device"] != "GPU-a" || p.Env["sum"] != "0" {
		t.Errorf("path %s, process %d, %+v; want the parked child %d", rep.Path, rep.PID, p, parked)
	}
	proctest.Until(t, "it to say how long its copy took", func() bool {
		return slices.ContainsFunc(n.printedBy("r"), func(line string) bool { return strings.Contains(line, "device GPU-a has its parameters") })
	})
	if next := n.parkedOn("GPU-a")["GPU-a"]; next == parked {
		t.Error("no other child is parked")
	}
	none := pySpec(python, "none", "STAGECOACH_MODEL=model.safetensors") // PyTorch has no such device
	none.Devices, none.DeviceMemory = 1, gib
	n.keyStages(none)
	proctest.Until(t, "a child that cannot be parked", func() bool {
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		for _, s := range n.store.slots.Values() {
			if s.zygote != nil && s.zygote.Function == none.Function {
				return s.zygote.Family.Waiting()["GPU-a"].Failures > 0
			}
		}
		return false
	})
	if rep := n.on("n", "", none); rep.Path != PathFork || n.probe(rep).Env["device"] != "" {
		t.Errorf("without a device: path %s", rep.Path)
	}
}

// TestPythonStagesShareADevice runs two stages in one worker, whose device is a stand-in.
func TestPythonStagesShareADevice(t *testing.T) {
	python, dir := proctest.Torch(t), t.TempDir()
	r := &rack{all: []Device{{ID: "GPU-a", Memory: 10 * gib}}}
	n := pyNode(t, dir, map[string]string{"left": pyPlaced, "right": pyPlaced}, func(c *Config) { c.Devices = r.look })
	onStandIn(t, dir, "left", "right")
	var pids []int
	for _, name := range []string{"left", "right"} {
		s := sharing(python, name, "STAGECOACH_MODEL=model.safetensors")
		s.Devices, s.DeviceMemory = 1, gib
		rep := n.on(name, "GPU-a", s)
		p := n.probe(rep)
		pids = append(pids, p.PID)
		if rep.Path != PathResident || p.PID != rep.PID || p.Loaded != rep.PID || p.Env["device"] != "GPU-a" {
			t.Errorf("%s: path %s, process %d, %+v", name, rep.Path, rep.PID, p)
		}
		proctest.Until(t, "it to say how long its copy took", func() bool {
			return slices.ContainsFunc(n.printedBy(name), func(line string) bool { return strings.Contains(line, "device GPU-a has its parameters") })
		})
	}
	if d := n.Inventory().Devices[0]; pids[0] != pids[1] || d.Reserved != 2*gib+resources.ContextOverhead {
		t.Errorf("processes %d, device %+v", pids, d)
	}
}

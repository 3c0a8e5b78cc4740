package templatetest_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// onStandIn is a handler whose device is a stand-in in host memory. It has no place hook; its
// tensors go there without one.
const onStandIn = `
import torch
from standin import StandIn
from stagecoach import device
device._Cuda = lambda torch, name: StandIn()

def load(model):
    return {"w": torch.arange(300000)}

def infer(state, calls):
    return calls
`

// onCUDA is a handler with PyTorch's own device, which tests do not have.
const onCUDA = `
import torch

def infer(state, calls):
    return calls
`

// TestPythonCopiesParametersToDevice checks the copy of parameters to a device, which is a stand-in
// in host memory:
//   - the parameters of every kind of state arrive unchanged
//   - a buffer is used again only after its copy has ended
//   - if the device has no room, the error has the sizes
func TestPythonCopiesParametersToDevice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, proctest.Torch(t), "testdata/device_test.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+templates+"/python3-stage:testdata", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// answer reads a child's answer from its gate.
func (k *keeper) answer(gate interface{ Read([]byte) (int, error) }) wire.Order {
	k.t.Helper()
	b := make([]byte, 4096)
	n, err := gate.Read(b)
	if err != nil {
		k.t.Fatalf("at the gate: %v", err)
	}
	o, err := wire.DecodeOrder(b[:n])
	if err != nil {
		k.t.Fatal(err)
	}
	return o
}

// TestPythonParkedChildPreparesItsDevice checks that a child prepares its device before an order
// makes it a replica. The child must report how long the preparation took.
func TestPythonParkedChildPreparesItsDevice(t *testing.T) {
	root := imaged(t, onStandIn)
	b, err := os.ReadFile("testdata/standin.py")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "standin.py"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	k := started(t, proctest.Torch(t), root)
	park := proctest.Encode(wire.Order{Kind: wire.OrderPark, Env: []string{"CUDA_VISIBLE_DEVICES=GPU-a", "A=1"}})
	pid, gate := k.Fork(1)
	k.Say(gate, park)
	if o := k.answer(gate); o.Kind != wire.ChildParked || o.Nanos == 0 {
		t.Fatalf("parked: %+v", o)
	}
	if got := comm(t, pid); got != "spare\n" {
		t.Errorf("it is called %q, want spare", got)
	}
	ready := regexp.MustCompile(`device GPU-a is ready.*: context \d+\.\d+ s, first kernels \d+\.\d+ s\n`)
	proctest.Until(t, "a line about the device", func() bool { return ready.MatchString(k.Stderr.String()) })
	stage, _, stderr := k.began(gate, wire.EnvReplica+"=me")
	placed := regexp.MustCompile(`device GPU-a has its parameters: 0\.002 GB copied in \d+\.\d+ s \(\d+\.\d GB/s\)$`)
	if line, err := bufio.NewReader(stderr).ReadString('\n'); err != nil || !placed.MatchString(strings.TrimSpace(line)) {
		t.Errorf("it says %q, %v", line, err)
	}
	if _, err := stage.Read(make([]byte, 1)); err != nil {
		t.Errorf("no hello: %v", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, tc := range map[string]struct {
		parks, files, status int
	}{
		"gate closed":  {1, 0, 0},
		"parked twice": {2, 0, 1},
		"a descriptor": {1, 1, 1},
	} {
		pid, gate := k.Fork(2)
		for i := range tc.parks {
			k.Say(gate, park, []*os.File{null}[:tc.files]...)
			if i == 0 && tc.files == 0 {
				k.answer(gate)
			}
		}
		gate.Close()
		if o := k.Want(wire.ChildExited); int(o.PID) != pid || unix.WaitStatus(o.Status).ExitStatus() != tc.status {
			t.Errorf("%s: it ended with %+v, want pid %d and status %d", name, o, pid, tc.status)
		}
	}
}

// TestPythonWithoutDeviceDoesNotPark checks that a child whose device is missing reports that and
// ends.
func TestPythonWithoutDeviceDoesNotPark(t *testing.T) {
	k := started(t, proctest.Torch(t), imaged(t, onCUDA), "CUDA_VISIBLE_DEVICES=")
	pid, gate := k.Fork(1)
	k.Say(gate, proctest.Encode(wire.Order{Kind: wire.OrderPark, Env: []string{"CUDA_VISIBLE_DEVICES=GPU-none"}}))
	if o := k.answer(gate); o.Kind != wire.ZygoteError || !strings.Contains(o.Text, "CUDA") && !strings.Contains(o.Text, "NVIDIA") {
		t.Errorf("it says %+v, want an error", o)
	}
	if o := k.Want(wire.ChildExited); int(o.PID) != pid || unix.WaitStatus(o.Status).ExitStatus() != 1 {
		t.Errorf("it ended with %+v, want pid %d and status 1", o, pid)
	}
	if _, gate := k.Fork(2); gate != nil { // the zygote still forks
		gate.Close()
	}
	k.Want(wire.ChildExited)
}

package keysmanager

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// Handlers of Python stages.
const (
	// pyProbe reports what a replica sees.
	pyProbe = `
import gc, json, os, random, signal, sys
import stagecoach as sc

LOADED, AT = os.getpid(), dict(os.environ)
gc.collect()

def load(model):
    print("loads")
    return {"file": open(__file__)}

def infer(state, calls):
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    out = {"pid": os.getpid(), "loaded": LOADED, "env": dict(os.environ), "at": AT, "random": [random.random()], "gc": gc.isenabled(),
           "open": state["file"].fileno(), "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])]}
    if numpy: out["random"].append(float(numpy.random.rand()))
    if torch: out["random"].append(float(torch.rand(1))); out["threads"] = torch.get_num_threads()
    return [out for c in calls]
`
	pyMapped = "import torch\n" + pyProbe + `
def load(model):
    return {"file": open(__file__), "weights": model.torch()}
`
	pyCopied = "import torch\n" + pyProbe + `
def load(model):
    return {"file": open(__file__), "model": model, "weights": {k: v.clone() for k, v in model.torch().items()}}
`
	pyThreads = pyProbe + `
import threading
def load(model):
    threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()
    return {"file": open(__file__)}
`
	pyJoined = pyProbe + `
from concurrent.futures import ThreadPoolExecutor
def load(model):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(str, range(100)))
    return {"file": open(__file__)}
`
	pyCuda = "import torch\n" + pyProbe + `
torch.cuda._initialized = True  # as the first tensor on a device has it
`
)

// pyNode returns a node whose images are Python stages with these handlers, by name. It has no ONNX
// Runtime.
func pyNode(t *testing.T, dir string, handlers map[string]string, change func(*Config)) *rig {
	t.Helper()
	for name, text := range handlers {
		root := filepath.Join(dir, "py", name, "1")
		if err := errors.Join(os.CopyFS(root, os.DirFS("../templates/python3-stage")), os.WriteFile(filepath.Join(root, "handler.py"), []byte(text), 0o644),
			os.Chmod(filepath.Join(root, "stage"), 0o755), weights(filepath.Join(root, "model.safetensors"), 32<<20)); err != nil {
			t.Fatal(err)
		}
	}
	return newNode(t, func(c *Config) {
		c.Images, c.ORT, c.Threads = sandbox.Images{Dir: dir}, "", 2
		if change != nil {
			change(c)
		}
	})
}

// weights writes a model of this many bytes.
func weights(path string, size int64) error {
	var b bytes.Buffer
	err := safetensors.Write(&b, nil, []safetensors.Source{{Name: "w", Dtype: "F32", Shape: []int64{size / 4}, Data: bytes.NewReader(make([]byte, size))}})
	return errors.Join(err, os.WriteFile(path, b.Bytes(), 0o644))
}

// pySpec returns a function of such an image.
func pySpec(python, name string, env ...string) node.Spec {
	s := node.Spec{Function: name + ".ns", Namespace: "ns", Image: "py/" + name + ":1", Process: python + " ./stage", Env: map[string]string{wire.EnvRuntime: "python"}}
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		s.Env[k] = v
	}
	return s
}

// probed is what a probe reports.
type probed struct {
	PID, Loaded, Threads int
	Env, At              map[string]string
	Random               []float64
	GC                   bool
	Open                 int
	Blocked              []int
	Compiled             compiled
}

// compiled is what a probe and its zygote have compiled with torch.compile.
type compiled struct {
	// Compiled graphs; how many of them were in the folder of compiled code, and how many were not.
	Graphs, Hits, Misses int
	Value                []float64
	Folder               string
}

// probe makes a replica do its first call.
func (n *rig) probe(r *startedReplica) (p probed) {
	n.t.Helper()
	c := wire.NewConn(r.Conn)
	if err := r.Conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		n.t.Fatal(err)
	}
	f, err := c.Read()
	if err != nil || f.Type != wire.FrameHello {
		n.t.Fatalf("%s: %v, %v, want Hello; it printed %q", r.Name, f.Type, err, n.printedBy(r.Name))
	}
	b := wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Bytes: []byte("x")}}}}}}}
	err = errors.Join(c.Write(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: wire.Version}.Append(nil)}),
		c.Write(wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: b.Append(nil)}))
	if err != nil {
		n.t.Fatal(err)
	}
	if f, err = c.Read(); err != nil || f.Type != wire.FrameResult {
		n.t.Fatalf("%s answers %v %q, %v; it printed %q", r.Name, f.Type, f.Payload, err, n.printedBy(r.Name))
	}
	res, err := wire.DecodeResult(f.Payload)
	if err == nil {
		err = json.Unmarshal(res.Output[0].Bytes, &p)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

// printedBy returns the lines that a replica, or "zygote", has printed.
func (n *rig) printedBy(replica string) []string {
	n.printing.Lock()
	defer n.printing.Unlock()
	return slices.Clone(n.lines[replica])
}

func startError(t *testing.T, n *rig, s node.Spec) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if r, err := n.Start(ctx, node.Order{Replica: "x", Spec: s}); err != nil {
		return err.Error()
	} else if err := errors.Join(r.Conn.Close(), n.Stop(t.Context(), "x", time.Second)); err != nil {
		t.Fatal(err)
	}
	return ""
}

// drain takes the lines that a node has reported.
func drain(n *rig) {
	for len(n.exits) > 0 {
		<-n.exits
	}
}

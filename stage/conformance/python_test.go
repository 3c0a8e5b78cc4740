package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// TestPythonUnitTestsPass runs the Python tests of the SDK's parts.
func TestPythonUnitTestsPass(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), proctest.Python(t), "-X", "dev", "-W", "error", "testdata/test_sdk.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../templates/python3-stage", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func ownStage(t *testing.T) *replica {
	t.Helper()
	return launch(t, pythonHandler(t, "testdata/own.py"))
}

func TestInferMayReturnAGenerator(t *testing.T) {
	r := ownStage(t)
	if h := r.hello(); h.Slots != 2 || h.MaxBatch != 4 || h.Load <= 0 {
		t.Errorf("hello %+v, want the handler's numbers", h)
	}
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	r.batch(1, never, "generator", "b")
	if a, b := r.text(), r.text(); a != "GENERATOR" || b != "B" {
		t.Errorf("a generator of results: %q, %q", a, b)
	}
	for text, want := range map[string]string{
		"exit": "SystemExit: enough", "str": "infer returned str, want one result per call", "none": "infer returned NoneType",
	} {
		r.batch(1, never, text, "generator")
		r.failure(task.Failed, want)
		if got := r.text(); got != "GENERATOR" {
			t.Errorf("beside %q: %q", text, got)
		}
	}
	r.batch(1, never, "raise late")
	r.failure(task.BadInput, "want JSON")
	for text, want := range map[string]string{
		"long": strings.Repeat("x", 1000), "mute": "Mute: (its text raised AttributeError)", "huge": "output: 10737418", "pieces": "a piece of a stream of dict, want bytes or str",
	} {
		r.batch(1, never, text)
		r.failure(task.Failed, want)
	}
	if got := r.ask(1, "thread"); got != "true" {
		t.Error("load, place and infer run in several threads")
	}
	if got := r.ask(1, "remaining"); got != "[true, false, false]" {
		t.Errorf("a call without a deadline: %s", got)
	}
	r.batch(1, never, "unserialisable", "b", "c", "d")
	r.failure(task.Failed, "a result of dict: ndarray among JSON, whose tolist() is JSON; want bytes, str")
	r.failure(task.Failed, "a result of set")
	if m := r.result(); m.Index != 2 || string(m.Output[0].Bytes) != "fine" || !slices.Equal(m.Header, []task.Header{{Name: "X-Fine", Value: "yes"}}) {
		t.Errorf("beside them: %+v", m)
	}
	r.failure(task.Failed, "a result of float")
	r.drained()
}

func TestGeneratorsStream(t *testing.T) {
	r := ownStage(t).greet(welcome)
	b := wire.Batch{Calls: []wire.Call{call(0, never, "2"), call(1, never, "3"), call(2, never, "1")}}
	b.Calls[0].Key.Request, b.Calls[1].Key.Request, b.Calls[2].Key.Request = "first", "second", "third"
	b.Calls[2].Header = []task.Header{{Name: "X-Fail", Value: "1"}}
	r.send(wire.FrameBatch, 7, b.Append(nil))
	var got []string
	for range 6 {
		got = append(got, r.chunk())
	}
	if want := []string{"0:0", "1:0", "2:0", "0:1", "1:1", "1:2"}; !slices.Equal(got, want) {
		t.Errorf("pieces %q, want %q", got, want)
	}
	if m := r.result(); m.Index != 0 || string(m.Output[0].Bytes) != `{"pieces": 2}` || m.Output[0].ContentType != "application/json" {
		t.Errorf("result %+v", m)
	}
	r.text()
	r.failure(task.BadInput, "after all")

	b.Calls = b.Calls[:1]
	b.Calls[0] = call(0, never, "1000000000")
	b.Calls[0].Key.Request = "endless"
	r.send(wire.FrameBatch, 8, b.Append(nil))
	r.chunk()
	r.cancel(8, 0)
	for {
		f, err := r.conn.Read()
		if err != nil {
			t.Fatal(err)
		}
		if f.Type == wire.FrameChunk {
			r.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
			continue
		}
		if m, err := wire.DecodeError(f.Payload); f.Type != wire.FrameError || err != nil || m.Code != task.Canceled {
			t.Errorf("frame %v %+v, %v", f.Type, m, err)
		}
		break
	}
	if got := r.ask(9, "closed"); got != "third,first,second,endless" {
		t.Errorf("generators were closed in the order %s", got)
	}
	r.drained()
}

// TestLinesArePrintedAtOnce checks that a handler's output arrives before its call's answer.
func TestLinesArePrintedAtOnce(t *testing.T) {
	r := ownStage(t).greet(welcome)
	r.batch(1, never, "log")
	r.result()
	proctest.Until(t, "what the handler printed", func() bool {
		return strings.HasSuffix(r.stdout.String(), "loading\nplacing f-1 f.ns cpu True\nhello print\n") && strings.Contains(r.stderr.String(), "hello log call=r\n")
	})
	if got := r.stderr.String(); !strings.Contains(got, "INFO") || strings.Contains(got, "not this") {
		t.Errorf("stderr %q", got)
	}
	r.drained()
}

func TestHandlersThatDoNotLoad(t *testing.T) {
	for name, tc := range map[string]struct{ code, want string }{
		"no infer":       {"x = 1\n", "handler.py has no function infer, want infer(state, calls)"},
		"syntax":         {"x = 1\ndef infer(state, calls)\n", "handler.py, line 2: "},
		"missing module": {"import no_such_module.part\n", "the handler needs the module 'no_such_module', which "},
		"what to do":     {"import no_such_module\n", "put it into requirements.txt and build again, or install it on the machine (apt-get install python3-no-such-module)"},
		"raises":         {"\n1 / 0\n", "import of the handler: ZeroDivisionError: division by zero (at handler.py:2)"},
		"exits":          {"import sys; sys.exit(3)\n", "import of the handler: SystemExit: 3 (at handler.py:1)"},
		"no function":    {"infer = 3\n", "handler.infer is int, want a function"},
		"arguments":      {"def infer(calls): pass\n", "handler.infer(calls): too many positional arguments, want it to take 2"},
		"async":          {"async def infer(state, calls): pass\n", "handler.infer is an async def, want a plain def"},
		"async stream":   {"async def infer(state, calls): yield\n", "handler.infer is an async def"},
		"async load":     {"class Load:\n  async def __call__(self, model): pass\nload = Load()\ndef infer(state, calls): pass\n", "handler.load is an async def"},
		"async each":     {"import stagecoach as sc\n@sc.each\nasync def infer(state, call): pass\n", "infer is an async def"},
		"batch":          {"MAX_BATCH = 0\ndef infer(state, calls): pass\n", "handler.MAX_BATCH = 0, want a number from 1 to 10000"},
		"load raises":    {"def load(model):\n  raise KeyError('k')\ndef infer(state, calls): pass\n", "load: KeyError: 'k' (at handler.py:2)"},
		"load exits":     {"def load(model): exit(0)\ndef infer(state, calls): pass\n", "load: SystemExit: 0"},
		"load, module":   {"def load(model): import no_such_module\ndef infer(state, calls): pass\n", "load: it needs the module 'no_such_module'"},
		"no model":       {"def load(model): model.tensors\ndef infer(state, calls): pass\n", "no model: put model.safetensors"},
		"place raises":   {"def place(state, replica):\n\n  raise OSError\ndef infer(state, calls): pass\n", "place: OSError (at handler.py:3)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handler := filepath.Join(t.TempDir(), "handler.py")
			if err := os.WriteFile(handler, []byte(tc.code), 0o600); err != nil {
				t.Fatal(err)
			}
			launch(t, pythonHandler(t, handler)).exits(1, tc.want)
		})
	}
	r := launch(t, pythonHandler(t, "testdata/own.py"), wire.EnvModel+"=none.safetensors")
	r.greet(welcome).drained() // it is not used
}

// TestStateWithoutLoadIsTheModel checks that infer gets the model as its state if the handler has
// no load.
func TestStateWithoutLoadIsTheModel(t *testing.T) {
	handler := filepath.Join(t.TempDir(), "handler.py")
	code := "def infer(state, calls): return [type(state).__name__ for c in calls]\n"
	if err := os.WriteFile(handler, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	r := launch(t, pythonHandler(t, handler)).greet(welcome)
	if got := r.ask(1, "x"); got != "Model" {
		t.Errorf("the state is a %s", got)
	}
	r.drained()
}

// TestAWorkerThatFailsEndsTheReplica checks that a replica ends if one of its worker threads fails,
// so that no caller waits in vain. The thread may be the main thread or another one.
func TestAWorkerThatFailsEndsTheReplica(t *testing.T) {
	handler := filepath.Join(t.TempDir(), "handler.py")
	code := `import logging
SLOTS = 2
class Broken(logging.Handler):
    def emit(self, record): raise KeyError("emit")
logging.getLogger("stagecoach").addHandler(Broken())
def infer(state, calls): return [c.wait() if c.input.text() == "wait" else 1 / 0 for c in calls]
`
	if err := os.WriteFile(handler, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	r := launch(t, pythonHandler(t, handler)).greet(welcome)
	r.batch(1, never, "wait")
	r.batch(2, never, "fail")
	r.exits(1, "results of batch 2: KeyError: 'emit'")
}

// TestALostContextEndsTheReplica checks that a replica ends after errors of CUDA that make all
// later calls fail. Otherwise the replica would fail fast, and so get even more calls.
func TestALostContextEndsTheReplica(t *testing.T) {
	handler := filepath.Join(t.TempDir(), "handler.py")
	code := `import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.set_grad_enabled = lambda on: None
def cuda(lost=True):
    if lost: raise RuntimeError("CUDA error: an illegal memory access was encountered")
def infer(state, calls):
    lost = calls[0].input.text() == "lost"
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: cuda(lost))
    cuda()
`
	if err := os.WriteFile(handler, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	r := launch(t, pythonHandler(t, handler)).greet(welcome)
	for id, text := range []string{"other", "lost"} {
		r.batch(uint64(id), never, text)
		r.failure(task.Failed, "RuntimeError: CUDA error: an illegal memory access")
	}
	r.exits(1, "stage: the device's context is lost: CUDA error: an illegal memory access was encountered\n")
}

// TestTorchInAReplica checks that PyTorch uses the number of threads from the environment and from
// Threads frames, and that it records no gradients.
func TestTorchInAReplica(t *testing.T) {
	handler := filepath.Join(t.TempDir(), "handler.py")
	code := `import torch
def load(model): return torch.nn.Linear(2, 2)
def infer(state, calls): return [[torch.get_num_threads(), state(torch.ones(1, 2)).requires_grad] for c in calls]
`
	if err := os.WriteFile(handler, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := pythonHandler(t, handler)
	cmd.Path = proctest.Torch(t)
	r := launch(t, cmd, wire.EnvThreads+"=1", "max_inflight=2")
	if h := r.hello(); h.Threads != 1 {
		t.Errorf("hello %+v, want 1 thread", h)
	}
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	for id, tc := range []struct {
		total uint16
		want  string
	}{{0, "[1, false]"}, {2, "[2, false]"}, {1, "[2, false]"}} {
		r.send(wire.FrameThreads, 0, wire.Threads{Total: tc.total}.Append(nil))
		b := batch(time.Time{}, "x")
		r.send(wire.FrameBatch, uint64(2*id), b) // to both workers
		r.send(wire.FrameBatch, uint64(2*id+1), b)
		for range 2 {
			if got := r.text(); got != tc.want {
				t.Errorf("asked for %d threads: %s, want %s", tc.total, got, tc.want)
			}
		}
	}
	r.drained()
}

// TestPythonTestsOfFillPass runs the Python tests of Model.fill with PyTorch. They compare the
// outputs of filled modules, and check which modules fill refuses. A test is skipped, and its name
// printed, if the interpreter lacks a package that the test needs.
func TestPythonTestsOfFillPass(t *testing.T) {
	for _, file := range []string{"test_fill", "test_architectures"} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), proctest.Torch(t), "-W", "error::ResourceWarning", "-m", "unittest", "-v", file)
			cmd.Dir = "testdata"
			cmd.Env = append(os.Environ(), "PYTHONPATH=../../../templates/python3-stage", "PYTHONDONTWRITEBYTECODE=1")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}

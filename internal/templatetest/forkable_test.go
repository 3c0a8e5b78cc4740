package templatetest_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// driverSource is a stand-in for CUDA's driver. As in the driver, cuDeviceGetCount fails before
// cuInit, and cuInit fails without devices. The stand-in has only the functions that CUDA's runtime
// needs to call cuInit.
const driverSource = `
#include <stdlib.h>
#include <string.h>

static int there = 0;

int cuInit(unsigned flags) {
	if (getenv("NO_DEVICES")) return 100;
	there = 1;
	return 0;
}

int cuDeviceGetCount(int *count) {
	*count = there;
	return there ? 0 : 3;
}

int cuDriverGetVersion(int *version) {
	*version = 13030;
	return 0;
}

static int other(void) { return 999; }

int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long flags, int *status) {
	*at = !strcmp(name, "cuInit") ? (void *)cuInit
	    : !strcmp(name, "cuDeviceGetCount") ? (void *)cuDeviceGetCount
	    : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
	    : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2 : (void *)other;
	if (status) *status = 0;
	return 0;
}
`

// library compiles C into a shared library with this name, and returns its folder.
func library(t *testing.T, name, source string) string {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "library.c")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-Wl,-soname,"+name, "-o", filepath.Join(dir, name), file).CombinedOutput()
	if err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return dir
}

// unforkable starts a handler's zygote and returns why it cannot be forked. It returns "" if the
// zygote is ready and a child of it becomes a replica.
func unforkable(t *testing.T, command []string, handler string, env ...string) string {
	t.Helper()
	k := &keeper{proctest.Keep(t, imaged(t, handler), env, command[0], append(command[1:], "stage")...), t}
	o := k.Read()
	if o.Kind == wire.ZygoteError {
		if !o.Unforkable {
			t.Errorf("it fails with %q, want that it cannot be forked", o.Text)
		}
		return o.Text
	}
	_, gate := k.Fork(1)
	stage, _, _ := k.began(gate, wire.EnvReplica+"=me")
	if _, err := stage.Read(make([]byte, 1)); err != nil {
		t.Errorf("no hello of a replica: %v; stderr: %s", err, k.Stderr)
	}
	return ""
}

// saysAll checks that a text has all parts. If there are no parts, the text must be empty.
func saysAll(t *testing.T, what, text string, parts []string) {
	t.Helper()
	if len(parts) == 0 && text != "" {
		t.Errorf("%s: %q, want that it can be forked", what, text)
	}
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: %q, want %q in it", what, text, part)
		}
	}
}

// TestPythonFindsInitialisedDriver checks a handler that initialises CUDA's driver without PyTorch.
// Its zygote cannot be forked, and the error must name the handler's line. If the handler only
// loads the driver, its zygote can be forked.
func TestPythonFindsInitialisedDriver(t *testing.T) {
	t.Parallel()
	const infer = "\ndef infer(state, calls):\n    return calls\n"
	env := "LD_LIBRARY_PATH=" + library(t, "libcuda.so.1", driverSource)
	for name, tc := range map[string]struct {
		handler string
		want    []string
	}{
		"in load": {
			"import ctypes\n\ndef load(model):\n    driver = ctypes.CDLL('libcuda.so.1')\n    driver.cuInit(0)\n" + infer,
			[]string{"CUDA was initialised", "handler.py:4", "cuDeviceGetCount returns 0", "place hook"},
		},
		"while it is imported": {
			"import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n" + infer,
			[]string{"CUDA was initialised", "handler.py:2"},
		},
		"by another library": {
			"import ctypes, _ctypes\n_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen('libcuda.so.1', 2), 'cuInit'), (0,))\n" + infer,
			[]string{"CUDA was initialised while", "cuDeviceGetCount returns 0"},
		},
		"loaded alone": {"import ctypes\nctypes.CDLL('libcuda.so.1')\n" + infer, nil},
		"asked in vain": {
			"import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 3\n" + infer, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			saysAll(t, name, unforkable(t, []string{proctest.Python(t)}, tc.handler, env), tc.want)
		})
	}
}

// TestPythonFindsDeviceFiles checks a zygote that has a file of NVIDIA's devices open or mapped. It
// cannot be forked, unless NVML has opened the file. The files are empty, in the zygote's own /dev.
func TestPythonFindsDeviceFiles(t *testing.T) {
	t.Parallel()
	const infer = "\ndef infer(state, calls):\n    return calls\n"
	own := []string{
		"unshare", "--mount", "sh", "-c",
		`mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && printf %4096s > /dev/nvidia-uvm && cp /dev/nvidia-uvm /dev/nvidia0 && exec "$0" "$@"`,
		proctest.Python(t),
	}
	if out, err := exec.CommandContext(t.Context(), own[0], append(own[1:], "-c", "open('/dev/nvidia0')")...).CombinedOutput(); err != nil {
		const why = "a /dev of a test's own needs root: %v\n%s"
		if os.Getenv("CI") == "true" {
			t.Fatalf(why, err, out)
		}
		t.Skipf(why, err, out)
	}
	env := "LD_LIBRARY_PATH=" + library(t, "libnvidia-ml.so.1", "int nvmlInit_v2(void) { return 0; }\n")
	const nvml = "import ctypes\nctypes.CDLL('libnvidia-ml.so.1')\n"
	for name, tc := range map[string]struct {
		handler string
		want    []string
	}{
		"open":           {"f = open('/dev/nvidia0')\n" + infer, []string{"CUDA was initialised", "/dev/nvidia0 open"}},
		"mapped":         {"import mmap\nwith open('/dev/nvidia0') as f: m = mmap.mmap(f.fileno(), 4096, prot=1)\n" + infer, []string{"/dev/nvidia0 open or mapped"}},
		"closed":         {"open('/dev/nvidia0').close()\n" + infer, nil},
		"of NVML":        {nvml + "f = open('/dev/nvidia0')\n" + infer, nil},
		"never of NVML":  {nvml + "f = open('/dev/nvidia-uvm')\n" + infer, []string{"/dev/nvidia-uvm open"}},
		"something else": {"f = open('/dev/urandom')\n" + infer, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			saysAll(t, name, unforkable(t, own, tc.handler, env), tc.want)
		})
	}
}

// Tests that import PyTorch take turns, because each keeps a processor busy for seconds.

// withCUDA returns an interpreter whose PyTorch is built for CUDA. Debian's PyTorch is not. If
// there is no such interpreter, withCUDA skips the test.
func withCUDA(t *testing.T) string {
	t.Helper()
	python := proctest.Torch(t)
	out, err := exec.CommandContext(t.Context(), python, "-c", "import torch; print(torch.__version__, torch.version.cuda)").Output()
	if err != nil {
		t.Fatal(err)
	}
	if version := strings.TrimSpace(string(out)); strings.HasSuffix(version, "None") {
		t.Skipf("PyTorch %s is not made for CUDA: make test-torch runs this test with one that is", version)
	}
	return python
}

// TestPyTorchWithoutDriverForks checks calls of PyTorch that fail because there is no driver.
// Afterwards the zygote can still be forked.
func TestPyTorchWithoutDriverForks(t *testing.T) {
	const handler = `
import torch

def load(model):
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    for touch in (lambda: torch.ones(3).pin_memory(), lambda: torch.empty(3, pin_memory=True), lambda: torch.ones(3, device="cuda"), torch.cuda.init):
        try:
            touch()
        except (RuntimeError, AssertionError) as err:
            assert "driver" in str(err) or "CUDA" in str(err) or "accelerator" in str(err), err
        else:
            raise AssertionError("it works without a driver")
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad

def infer(state, calls):
    return calls
`
	saysAll(t, "without a driver", unforkable(t, []string{withCUDA(t)}, handler), nil)
}

// TestPyTorchThatAsksDriverDoesNotFork checks handlers that make PyTorch's C++ code ask CUDA's
// driver for devices. PyTorch's own flag does not record such a call. The zygote must notice the
// call, refuse to fork, and name the handler's line. This holds on a machine without devices, too,
// because CUDA's runtime would remember that there were none.
func TestPyTorchThatAsksDriverDoesNotFork(t *testing.T) {
	python := withCUDA(t)
	env := "LD_LIBRARY_PATH=" + library(t, "libcuda.so.1", driverSource)
	const look = "import importlib.util; assert importlib.util.find_spec('torch'); " // as libraries do
	for name, tc := range map[string]struct {
		code, env string
		want      []string
	}{
		"nothing":                 {"pass", "A=1", nil},
		"backward":                {"(x * 2).sum().backward()", "A=1", []string{"by a backward pass at handler.py:6", "cuDeviceGetCount returns 0"}},
		"backward, no devices":    {"(x * 2).sum().backward()", "NO_DEVICES=1", []string{"by a backward pass at handler.py:6", "asked libcuda.so.1 for devices"}},
		"pinned, no devices":      {"try: x.detach().pin_memory()\n    except RuntimeError: pass", "NO_DEVICES=1", []string{"by torch.Tensor.pin_memory at handler.py:6"}},
		"on a hidden device":      {"try: x.to('cuda')\n    except RuntimeError: pass", "NO_DEVICES=1", nil},
		"as torch.compile":        {"try: torch.cuda.get_device_properties(torch.cuda.current_device())\n    except RuntimeError: pass", "NO_DEVICES=1", nil},
		"counted":                 {"assert torch._C._cuda_getDeviceCount() == 0", "NO_DEVICES=1", nil},
		"on a device, no devices": {"import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n    try: x.to('cuda')\n    except RuntimeError: pass", "NO_DEVICES=1", []string{"by torch.cuda at handler.py:7"}},
	} {
		t.Run(name, func(t *testing.T) {
			handler := look + "import torch\n\ndef load(model):\n    x = torch.ones(3, requires_grad=True)\n    assert not torch.cuda.is_initialized()\n    " + tc.code +
				"\n    assert not torch.cuda.is_initialized()\n\ndef infer(state, calls):\n    return calls\n"
			saysAll(t, name, unforkable(t, []string{python}, handler, env, tc.env), tc.want)
		})
	}
}

// TestPythonForksWithStubOfDriver checks an image for builds, which has a stub of CUDA's driver.
// The functions of the stub only return an error.
func TestPythonForksWithStubOfDriver(t *testing.T) {
	t.Parallel()
	const source = "int cuInit(unsigned flags) { return 34; }\nint cuDeviceGetCount(int *count) { return 34; }\n"
	const handler = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n\ndef infer(state, calls):\n    return calls\n"
	env := "LD_LIBRARY_PATH=" + library(t, "libcuda.so.1", source)
	saysAll(t, "a stub", unforkable(t, []string{proctest.Python(t)}, handler, env), nil)
}

// TestPythonKeepsWhatHandlerReplaces checks a handler that replaces a watched function. Replicas
// must have the replacement.
func TestPythonKeepsWhatHandlerReplaces(t *testing.T) {
	t.Parallel()
	const handler = `
import ctypes

theirs = ctypes.CDLL.__init__

def mine(*args, **kwargs):
    return theirs(*args, **kwargs)

ctypes.CDLL.__init__ = mine

def place(state, replica):
    assert ctypes.CDLL.__init__ is mine
    ctypes.CDLL(None)

def infer(state, calls):
    return calls
`
	saysAll(t, "a function replaced", unforkable(t, []string{proctest.Python(t)}, handler), nil)
}

// TestPyTorchWithoutCUDAForks checks a PyTorch that is built without CUDA. It asks no driver, even
// if another library has loaded one.
func TestPyTorchWithoutCUDAForks(t *testing.T) {
	const handler = `
import ctypes
import torch

def load(model):
    ctypes.CDLL("libcuda.so.1")
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    try:
        x.to("cuda")
    except (RuntimeError, AssertionError):
        pass
    return x.grad

def infer(state, calls):
    return calls
`
	python := proctest.Torch(t)
	out, err := exec.CommandContext(t.Context(), python, "-c", "import torch; print(torch.version.cuda)").Output()
	if err != nil {
		t.Fatal(err)
	}
	if version := strings.TrimSpace(string(out)); version != "None" {
		t.Skipf("PyTorch is made for CUDA %s, want one without: Debian's is", version)
	}
	env := "LD_LIBRARY_PATH=" + library(t, "libcuda.so.1", driverSource)
	saysAll(t, "without CUDA", unforkable(t, []string{python}, handler, env), nil)
}

// TestPyTorchThreadsOfBackward checks that the zygote finds the thread that a deeply nested
// backward pass starts and leaves behind. A single backward pass computes in its caller's thread.
func TestPyTorchThreadsOfBackward(t *testing.T) {
	const handler = `
import torch

class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(3, requires_grad=True)
                Inside.apply(x, ctx.depth - 1).sum().backward()
        return grad * 2, None

def load(model):
    x = torch.ones(3, requires_grad=True)
    Inside.apply(x, DEPTH).sum().backward()

def infer(state, calls):
    return calls
`
	python := proctest.Torch(t)
	for depth, want := range map[string][]string{"0": nil, "200": {"threads after loading, want 1", "not of Python"}} {
		t.Run(depth, func(t *testing.T) {
			saysAll(t, "depth "+depth, unforkable(t, []string{python}, strings.ReplaceAll(handler, "DEPTH", depth)), want)
		})
	}
}

// TestPyTorchThreadsOfOpenMP checks that threads that OpenMP starts while the handler loads are
// ended, and that replicas start new ones.
func TestPyTorchThreadsOfOpenMP(t *testing.T) {
	const handler = `
import os
import torch

def load(model):
    a = torch.ones(1024, 1024)
    (a @ a).sum(), (a + a).exp().sum()
    if hasattr(torch, "compile"):
        assert torch.get_num_threads() == 3 and len(os.listdir("/proc/self/task")) > 1, "it loads with one thread"
    return a

def place(a, replica):
    assert torch.get_num_threads() == replica.threads, torch.get_num_threads()
    torch.set_num_threads(3)
    (a @ a).sum(), (a + a).exp().sum()
    assert len(os.listdir("/proc/self/task")) > 1
    return a

def infer(state, calls):
    return calls
`
	saysAll(t, "threads of OpenMP", unforkable(t, []string{proctest.Torch(t)}, handler, wire.EnvThreads+"=3"), nil)
}

// TestPythonStartsNoThreadsThatItCannotEnd checks an OpenMP runtime that cannot end its threads,
// such as that of GCC before version 9. With such a runtime, the handler must load with one thread.
// The runtime is a stand-in, because the machine's own runtime can end its threads.
func TestPythonStartsNoThreadsThatItCannotEnd(t *testing.T) {
	t.Parallel()
	const old = "static int threads = 1;\nvoid omp_set_num_threads(int n) { threads = n; }\nint omp_get_max_threads(void) { return threads; }\n"
	const code = `
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from stagecoach import _threads
library = ctypes.CDLL(sys.argv[2])
_threads.load_with(3)
loads = library.omp_get_max_threads()
_threads.end_openmp()
print(loads, library.omp_get_max_threads())
`
	for name, tc := range map[string]struct{ source, want string }{
		"libgomp-old.so.1": {old, "1 1"},
		"libgomp-new.so.1": {old + "int omp_pause_resource_all(int kind) { return kind; }\n", "3 1"},
	} {
		path := filepath.Join(library(t, name, tc.source), name)
		out, err := exec.CommandContext(t.Context(), proctest.Python(t), "-c", code, templates+"/python3-stage", path).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != tc.want {
			t.Errorf("%s: %v, threads while it loads and after that %q, want %q", name, err, got, tc.want)
		}
	}
}

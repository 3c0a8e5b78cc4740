package zygote_test

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// memfds creates the files for a packed model.
func memfds(t *testing.T) (graph, weights *os.File) {
	t.Helper()
	var files [2]*os.File
	for i, name := range []string{"graph", "weights"} {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		files[i] = os.NewFile(uintptr(fd), name)
		t.Cleanup(func() { files[i].Close() })
	}
	return files[0], files[1]
}

// pack runs this test binary as a process that packs a model, and returns its output.
func pack(t *testing.T, model string, graph, weights *os.File) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = []string{wire.EnvPack + "=1", wire.EnvModel + "=" + model, wire.EnvORT + "=" + library(t), wire.EnvPoolThreads + "=2"}
	cmd.ExtraFiles = []*os.File{nil, graph, weights}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// packed packs a model and seals it.
func packed(t *testing.T, model string) (graph, weights *os.File) {
	t.Helper()
	graph, weights = memfds(t)
	if out, err := pack(t, model, graph, weights); err != nil || out != "" {
		t.Fatalf("pack: %v: %q", err, out)
	}
	for _, f := range []*os.File{graph, weights} {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
			t.Fatalf("seal %s: %v", f.Name(), err)
		}
	}
	return graph, weights
}

func mappedOptions(t *testing.T, model string) zygote.Options {
	return zygote.Options{Library: library(t), Model: model, Threads: 2, Start: 2, Mapped: true}
}

// TestMappedProcessesSharePages loads one packed model in several processes. They compute what a
// cold process computes, and share the pages.
func TestMappedProcessesSharePages(t *testing.T) {
	model, in := encoder(t), sequence(64)
	want := cold(t, model, 1, in)
	graph, weights := packed(t, model)
	const n = 4
	var all []int
	for range n {
		r := process(t, mappedOptions(t, model), graph, weights)
		a := r.do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		if a.Error != "" {
			t.Fatal(a.Error)
		}
		same(t, a.Tensors, want)
		if a := r.do(question{Do: "look"}); a.FDs["4"]+a.FDs["5"] != "" {
			t.Errorf("descriptors %v, want 4 and 5 closed", a.FDs)
		}
		all = append(all, r.pid)
	}
	weightsOf := func(pid int) (pss, rss int) {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps")
		if err != nil {
			t.Fatal(err)
		}
		ours := false
		for l := range strings.Lines(string(b)) {
			f := strings.Fields(l)
			switch {
			case !strings.HasSuffix(f[0], ":"):
				ours = strings.Contains(l, "/memfd:weights")
			case ours && (f[0] == "Pss:" || f[0] == "Rss:"):
				kb, err := strconv.Atoi(f[1])
				if err != nil {
					t.Fatal(err)
				}
				if f[0] == "Pss:" {
					pss += kb
				} else {
					rss += kb
				}
			}
		}
		return pss, rss
	}
	for _, pid := range all {
		if pss, rss := weightsOf(pid); rss < 8000 || pss > rss/n+100 {
			t.Errorf("process %d: %d kB of the weights, its share %d kB, want about a %dth of at least 8000", pid, rss, pss, n)
		}
	}
}

func TestPackedIsSealed(t *testing.T) {
	graph, weights := packed(t, encoder(t))
	for _, f := range []*os.File{graph, weights} {
		if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: a write: %v, want EPERM", f.Name(), err)
		}
		if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: a truncation: %v, want EPERM", f.Name(), err)
		}
		if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: a shared mapping for writing: %v, want EPERM", f.Name(), err)
		}
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: seals can be added: %v", f.Name(), err)
		}
	}
}

// TestMappedRealModelsCompute packs real models, which have many small weights.
func TestMappedRealModelsCompute(t *testing.T) {
	for _, name := range []string{"rec.onnx", "det.onnx"} {
		model := proctest.Built(t, "models", "ocr", name)
		in := tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, 3, 64, 320}, Data: make([]byte, 4*3*64*320)}
		if name == "rec.onnx" {
			in.Shape[2], in.Data = 48, in.Data[:4*3*48*320]
		}
		for i := range in.Data {
			in.Data[i] = byte(i % 59) // small numbers
		}
		want := cold(t, model, 1, in)
		graph, weights := packed(t, model)
		a := process(t, mappedOptions(t, model), graph, weights).do(question{Do: "run", Inputs: []tensor.Tensor{in}})
		if a.Error != "" {
			t.Fatalf("%s: %s", name, a.Error)
		}
		same(t, a.Tensors, want)
	}
}

// TestPrepackedInAnOrdinaryProcess loads the files that a zygote has written, and the model itself
// if there are none.
func TestPrepackedInAnOrdinaryProcess(t *testing.T) {
	model, in, dir := encoder(t), sequence(64), t.TempDir()
	want := cold(t, model, 1, in)
	k := start(t, wire.EnvORT+"="+library(t), wire.EnvModel+"="+model, wire.EnvPrepacked+"="+dir)
	if ready := k.Want(wire.ZygoteReady); !ready.Prepacked {
		t.Error("the zygote does not report that its weights are mapped")
	}
	empty := t.TempDir()
	for folder, mapped := range map[string]bool{dir: true, empty: false} {
		r := process(t, zygote.Options{Library: library(t), Model: model, Threads: 1, Start: 1, Prepacked: folder})
		same(t, r.do(question{Do: "run", Inputs: []tensor.Tensor{in}}).Tensors, want)
		maps, err := os.ReadFile("/proc/" + strconv.Itoa(r.pid) + "/maps")
		if err != nil || strings.Contains(string(maps), ".prepacked/weights.bin") != mapped {
			t.Errorf("%s: mapped %v, want %v (error %v)", folder, !mapped, mapped, err)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) != 0 {
		t.Errorf("an ordinary process wrote %v, %v", left, err)
	}
}

func TestPackNamesTheFault(t *testing.T) {
	graph, weights := memfds(t)
	for want, try := range map[string]func() (string, error){
		"nosuch.onnx":                   func() (string, error) { return pack(t, "nosuch.onnx", graph, weights) },
		"no " + wire.EnvModel:           func() (string, error) { return pack(t, "", graph, weights) },
		"descriptor 4: Bad file descri": func() (string, error) { return pack(t, encoder(t), nil, nil) },
	} {
		if out, err := try(); err == nil || !strings.Contains(out, want) || strings.Count(out, "\n") < 1 {
			t.Errorf("%v and %q, want a status and %q", err, out, want)
		}
	}
}

// TestLibraryWithThreadsIsNotForked uses a library that starts a thread. The zygote reports that it
// cannot be forked, and loads nothing.
func TestLibraryWithThreadsIsNotForked(t *testing.T) {
	k := start(t, wire.EnvORT+"="+threaded(t), wire.EnvModel+"=nosuch.onnx", "THREADED_ORT="+library(t))
	if o := k.Want(wire.ZygoteError); o.ID != 0 || !o.Unforkable || !strings.Contains(o.Text, "threads after loading, want 1") {
		t.Errorf("error %+v, want one that says it cannot be forked", o)
	}
	if err := k.Cmd.Wait(); err == nil {
		t.Error("the zygote ended with status 0")
	}
}

// threaded builds a library that is ONNX Runtime with an extra thread, as later versions have.
func threaded(t *testing.T) string {
	t.Helper()
	lib := t.TempDir() + "/libthreaded.so"
	cc := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-o", lib, "testdata/threaded.c", "-ldl", "-lpthread")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("cc, which this package needs anyway: %v: %s", err, out)
	}
	return lib
}

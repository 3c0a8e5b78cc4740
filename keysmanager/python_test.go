package keysmanager

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// TestPythonStartsOnEachPath starts real PyTorch stages on each path: forked with mapped
// parameters, forked with parameters in the heap, and cold. Each replica has its own environment,
// threads and random numbers.
func TestPythonStartsOnEachPath(t *testing.T) {
	python := proctest.Torch(t)
	n := pyNode(t, t.TempDir(), map[string]string{"mapped": pyMapped, "copied": pyCopied}, nil)
	for _, tc := range []struct{ image, start, path string }{
		{"mapped", "auto", PathFork}, {"copied", "fork", PathHeap}, {"mapped", "cold", PathCold},
	} {
		t.Run(tc.image+" "+tc.start, func(t *testing.T) {
			s := pySpec(python, tc.image, "STAGECOACH_MODEL=model.safetensors", "OWN=1", wire.EnvStageFD+"=77", wire.EnvThreads+"=9")
			s.Start, s.Function = tc.start, tc.start+".ns"
			chance := map[float64]bool{}
			for i, cpus := range []int{2000, 1000} {
				r, err := n.Start(t.Context(), node.Order{Replica: fmt.Sprint(tc.start, i), Spec: s, CPUMilli: cpus})
				if err != nil {
					t.Fatal(err)
				}
				p := n.probe(r)
				_ = r.Conn.Close()
				if r.Path != tc.path || p.PID != r.PID || (p.PID == p.Loaded) != (tc.path == PathCold) || p.Threads != cpus/1000 {
					t.Errorf("path %s, process %d of %d with %d threads; want %s and %d threads", r.Path, p.PID, p.Loaded, p.Threads, tc.path, cpus/1000)
				}
				if got := phase(r, "load"); tc.path != PathCold && (got != 0) != (i == 0) {
					t.Errorf("start %d: phases %v", i, r.Phases)
				}
				if p.At["OWN"] != "1" || p.Env["OWN"] != "1" || p.Env[wire.EnvReplica] != r.Name || p.Env["OMP_NUM_THREADS"] != fmt.Sprint(cpus/1000) ||
					p.Env[wire.EnvZygoteFD] != "" || p.Env["TOKENIZERS_PARALLELISM"] != "" || p.Env["OMP_WAIT_POLICY"] != "PASSIVE" || tc.path != PathCold && p.At["OMP_NUM_THREADS"] != "1" {
					t.Errorf("environment when imported %v\nand now %v", p.At, p.Env)
				}
				if !p.GC || len(p.Blocked) != 0 || p.Open < 3 || len(p.Random) != 3 {
					t.Errorf("%+v", p)
				}
				for _, x := range p.Random {
					if chance[x] {
						t.Errorf("two replicas draw %v", x)
					}
					chance[x] = true
				}
			}
		})
	}
	s := pySpec(python, "mapped", "STAGECOACH_MODEL=model.safetensors")
	if s.Start = "map"; startError(t, n, s) == "" || !strings.Contains(startError(t, n, s), "want auto, fork, heap or cold") {
		t.Errorf("start map: %s", startError(t, n, s))
	}
}

// TestPythonFaultsAreReportedOnce checks that an error in a handler is reported once.
func TestPythonFaultsAreReportedOnce(t *testing.T) {
	python := proctest.Python(t)
	n := pyNode(t, t.TempDir(), map[string]string{
		"missing": "import no_such_module\n" + pyProbe, "raises": pyProbe + "\ndef load(model): raise ValueError('bad shape')\n",
		"leaves": pyProbe + "\ndef load(model): import os; os._exit(7)\n", "killed": pyProbe + "\ndef load(model): os.kill(os.getpid(), 9)\n",
		"syntax": "def infer(:\n", "place": pyProbe + "\ndef place(state, replica): raise OSError('no place')\n",
	}, nil)
	for name, want := range map[string][]string{
		"missing": {"the module 'no_such_module'", "requirements.txt", "(Python 3."}, "raises": {"load: ValueError: bad shape", "handler.py:"},
		"leaves": {"before it had loaded", "exit status 7"}, "killed": {"killed by SIGKILL"}, "syntax": {"handler.py", "line 1"},
	} {
		got := startError(t, n, pySpec(python, name))
		for _, w := range want {
			if strings.Count(got, w) != 1 {
				t.Errorf("%s: %q, want %q in it once", name, got, w)
			}
		}
	}
	if got := startError(t, n, pySpec(python, "missing")); !strings.Contains(got, "has not loaded 2 times in a row") {
		t.Errorf("at once again: %q", got)
	}
	s := pySpec("/no/such/python", "raises")
	if got := startError(t, n, s); !strings.Contains(got, "/no/such/python") {
		t.Errorf("without an interpreter: %q", got)
	}
	s = pySpec(python, "raises", wire.EnvRuntime+"=perl")
	if got := startError(t, n, s); !strings.Contains(got, `="perl", want onnx or python`) {
		t.Errorf("of another runtime: %q", got)
	}
	r := n.start("p", pySpec(python, "place"))
	if e := n.exit(); e.Replica != r.Name || !strings.Contains(e.Cause, "exit status 1: stage: place: OSError: no place") {
		t.Errorf("exit %+v", e)
	}
}

// TestPythonThatCannotForkStartsCold checks that a stage that cannot be forked starts cold, and
// that the log says why. If the function asks for a fork by name, the start fails.
func TestPythonThatCannotForkStartsCold(t *testing.T) {
	python := proctest.Torch(t)
	log := &lockedLog{}
	n := pyNode(t, t.TempDir(), map[string]string{"threads": pyThreads, "cuda": pyCuda, "joined": pyJoined}, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(log, nil)) })
	for name, why := range map[string]string{"threads": "poller", "cuda": "CUDA was initialised"} {
		r := n.start(name, pySpec(python, name))
		if p := n.probe(r); r.Path != PathCold || p.PID != p.Loaded {
			t.Errorf("%s: path %s, process %d of %d", name, r.Path, p.PID, p.Loaded)
		}
		if log.count(why) != 1 || log.count("path=cold") == 0 {
			t.Errorf("%s: the log has %q %d times", name, why, log.count(why))
		}
		s := pySpec(python, name)
		if s.Start = "heap"; !strings.Contains(startError(t, n, s), why) {
			t.Errorf("%s by name: %s", name, startError(t, n, s))
		}
	}
	if r := n.start("joined", pySpec(python, "joined")); r.Path != PathHeap {
		t.Errorf("with threads that have ended: path %s", r.Path)
	}
}

// TestPythonEnds checks that ends of children and zygotes are reported, that invalidated parameters
// are freed, and that a later node forks from the zygotes that it adopts.
func TestPythonEnds(t *testing.T) {
	python, w, dir := proctest.Python(t), wardenOf(t), t.TempDir()
	n := pyNode(t, dir, map[string]string{"probe": pyProbe}, func(c *Config) { c.Warden = w })
	s := pySpec(python, "probe")
	a, b := n.start("a", s), n.start("b", s)
	z := n.probe(a).Loaded
	if got := n.probe(b).Loaded; got != z || n.zygote() != z {
		t.Errorf("b is loaded by %d, a by %d", got, z)
	}
	if err := syscall.Kill(a.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "a" || e.Cause != "killed by SIGKILL" {
		t.Errorf("exit %+v", e)
	}
	spare, of := n.spare(z), n.only()
	if err := syscall.Kill(spare, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "the spare child's end to be heard of", func() bool {
		return !waits(of, spare)
	})
	n.probe(n.start("c", s))
	if err := n.Stop(t.Context(), "c", time.Minute); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "c" || e.Cause != resources.ExitedWell {
		t.Errorf("exit %+v", e)
	}

	n.Detach()
	drain(n)
	n = pyNode(t, dir, nil, func(c *Config) { c.Warden = w })
	if got := n.probe(n.start("d", s)).Loaded; got != z {
		t.Errorf("a later daemon forks from %d, want %d", got, z)
	}
	other := s
	other.Function, other.Env = "other.ns", maps.Clone(s.Env)
	other.Env["OWN"] = "2"
	if p := n.probe(n.start("e", other)); p.Loaded == z || p.At["OWN"] != "2" {
		t.Errorf("another environment: loaded by %d with OWN=%q", p.Loaded, p.At["OWN"])
	}
	if out, err := n.Invalidate(t.Context(), s.Function); err != nil || out.Generation != 1 || !slices.Equal(out.Replicas, []string{"b", "d"}) {
		t.Errorf("invalidated: %+v, %v", out, err)
	}
	if p := n.probe(n.start("f", s)); p.Loaded == z {
		t.Error("a replica starts from parameters that were invalidated")
	}
	if err := syscall.Kill(z, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e := n.exit(); e.Replica != "b" && e.Replica != "d" || !strings.HasPrefix(e.Cause, "its zygote ended: killed by SIGKILL") {
			t.Errorf("exit %+v", e)
		}
	}
	proctest.Gone(t, b.PID)
}

// TestPythonIsKeptWarm checks that Python stages without a model are loaded ahead of need, once for
// all starts, and can be evicted.
func TestPythonIsKeptWarm(t *testing.T) {
	python := proctest.Python(t)
	n := pyNode(t, t.TempDir(), map[string]string{"probe": pyProbe}, nil)
	s := pySpec(python, "probe")
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: s, Key: true}}); err != nil {
		t.Fatal(err)
	}
	z := n.zygote()
	if info, err := n.Load(t.Context(), s); err != nil || info.PID != z || !info.Key || info.Path != PathHeap || info.Bytes < 1<<20 {
		t.Errorf("loaded: %+v, %v", info, err)
	}
	var starts sync.WaitGroup
	for i := range 20 {
		starts.Go(func() {
			r, err := n.Start(t.Context(), node.Order{Replica: fmt.Sprint("r", i), Spec: s})
			if err != nil {
				t.Error(err)
				return
			}
			if p := n.probe(r); p.Loaded != z || p.PID != r.PID {
				t.Errorf("%s: process %d of %d, want %d of %d", r.Name, p.PID, p.Loaded, r.PID, z)
			}
			_ = r.Conn.Close()
		})
	}
	starts.Wait()
	for range 20 {
		if e := n.exit(); e.Cause != resources.ExitedWell {
			t.Errorf("exit %+v", e)
		}
	}
	if bytes, err := n.Evict(t.Context(), s.Function); err != nil || bytes < 1<<20 {
		t.Errorf("evicted: %d, %v", bytes, err)
	}
	proctest.Gone(t, z)
	s.Env = maps.Clone(s.Env)
	s.Env[wire.EnvRuntime] = "perl"
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: s}}); err == nil || !strings.Contains(err.Error(), "want onnx or python") {
		t.Errorf("of another runtime: %v", err)
	}
}

// TestPythonUnderAnAccount checks that a process with PyTorch runs as a user of its own, among
// files that this user cannot change. Other users cannot look into the process.
func TestPythonUnderAnAccount(t *testing.T) {
	python, dir := proctest.Torch(t), openDir(t)
	images := filepath.Join(dir, "images")
	look := pyMapped + `
def infer(state, calls):
    import ctypes, multiprocessing, subprocess, tempfile
    x = torch.nn.Linear(64, 64)(torch.rand(8, 64)).sum()  # with an operator's own threads
    tempfile.NamedTemporaryFile().write(b"x")
    open("/dev/shm/x", "w").close()
    env = {"dumpable": str(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)), "home": os.path.expanduser("~"), "lock": str(multiprocessing.Lock()),
           "child": subprocess.run(["/bin/echo", "-n", "child"], capture_output=True, text=True).stdout}
    try: open("written", "w")
    except OSError as err: env["write"] = err.strerror
    return [{"pid": os.getpid(), "loaded": LOADED, "env": env} for c in calls]
`
	n := pyNode(t, images, map[string]string{"look": look}, func(c *Config) { c.Accounts = accountsIn(t, dir) })
	if err := os.Chmod(images, 0o755); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"dumpable": "0", "home": "/tmp", "child": "child", "write": "Read-only file system"}
	for _, start := range []string{"auto", "cold"} {
		s := pySpec(python, "look", "STAGECOACH_MODEL=model.safetensors")
		s.Start, s.Function = start, start+".ns"
		r := n.start(start, s)
		p := n.probe(r)
		delete(p.Env, "lock")
		if !maps.Equal(p.Env, want) || userOf(t, r.PID) == 0 || r.Path != map[string]string{"auto": PathFork, "cold": PathCold}[start] {
			t.Errorf("%s: path %s, user %d, %v, want %v", start, r.Path, userOf(t, r.PID), p.Env, want)
		}
	}
	if got, _ := filepath.Glob(filepath.Join(images, "py", "look", "1", "*", "__pycache__")); len(got) > 0 {
		t.Errorf("the image has %q", got)
	}
}

// TestPythonNeedsAreEstimatedFromFiles checks that the memory of a zygote is estimated from the
// sizes of its model's files.
func TestPythonNeedsAreEstimatedFromFiles(t *testing.T) {
	m := &loader{store: newStore(new(Config), nil, nil)}
	root := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(root, "model"), 0o755), weights(filepath.Join(root, "model", "a.safetensors"), 8<<20),
		os.Mkdir(filepath.Join(root, "other"), 0o755), os.WriteFile(filepath.Join(root, "other", "model.onnx"), make([]byte, 1<<20), 0o644),
		os.WriteFile(filepath.Join(root, "bad.safetensors"), []byte("x"), 0o644)); err != nil {
		t.Fatal(err)
	}
	for model, want := range map[string]int64{"": python.base, "other": python.base + 1<<20 + 1<<20/needShare, "model": python.base + 8<<20 + 8<<20/needShare} {
		got, err := m.need(zygote.Key{Model: model, Engine: python.name}, sandbox.Image{Root: root})
		if err != nil || got.bytes < want || got.bytes > want+4096 {
			t.Errorf("%q: %+v, %v, want about %d", model, got, err, want)
		}
	}
	for _, model := range []string{"bad.safetensors", "none"} {
		if _, err := m.need(zygote.Key{Model: model, Engine: python.name}, sandbox.Image{Root: root}); err == nil || !strings.Contains(err.Error(), model) {
			t.Errorf("%s: %v", model, err)
		}
	}
}

// Package proctest is for tests with foreign processes, which send no events to wait for. It is the
// only place where tests poll, always with a deadline.
package proctest

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// untilLimit is long enough for a busy machine.
const untilLimit = 3 * time.Minute

// Until calls done again and again until it returns true, and fails the test after a few minutes.
func Until(t testing.TB, what string, done func() bool) {
	t.Helper()
	Within(t, untilLimit, what, done)
}

// Within is Until with another limit.
func Within(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after %v still waiting: %s", limit, what)
		}
	}
}

// Gone waits until no process has this pid, or only a zombie.
func Gone(t testing.TB, pid int) {
	t.Helper()
	Until(t, "process "+strconv.Itoa(pid)+" to be gone", func() bool { return !runs(pid) })
}

func runs(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // after the name
	return len(f) > 0 && f[0] != "Z" && f[0] != "X"
}

// Children returns the child processes of pid.
func Children(t testing.TB, pid int) []int {
	t.Helper()
	tasks, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task", "*", "children"))
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, task := range tasks {
		b, _ := os.ReadFile(task) // a thread that has ended has no children
		for _, f := range strings.Fields(string(b)) {
			child, err := strconv.Atoi(f)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, child)
		}
	}
	return out
}

// Built returns the path of something that `make images` or `make fetch` puts under build/. If it
// is missing, the test is skipped, or fails with CI=true.
func Built(t testing.TB, path ...string) string {
	t.Helper()
	_, here, _, _ := runtime.Caller(0)
	full := filepath.Join(append([]string{filepath.Dir(here), "..", "..", "build"}, path...)...)
	if _, err := os.Stat(full); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make images first", err)
		}
		t.Skipf("%v: run make images first", err)
	}
	return full
}

// Python returns an interpreter of version 3.9 or later with numpy: Torch's, or the first python3
// in PATH. If there is none, the test is skipped, or fails with CI=true.
func Python(t testing.TB) string {
	t.Helper()
	return interpreter(t, "import sys, numpy; assert sys.version_info >= (3, 9)", "python3-numpy", torchPython(), "python3")
}

// Pip is Python for an interpreter that also has pip.
func Pip(t testing.TB) string {
	t.Helper()
	return interpreter(t, "import sys, numpy, pip; assert sys.version_info >= (3, 9)", "python3-numpy python3-pip", torchPython(), "python3")
}

// Torch returns an interpreter with PyTorch: $STAGECOACH_TORCH_PYTHON, else /usr/bin/python3. If
// this interpreter has no PyTorch, the test is skipped, or fails with CI=true.
func Torch(t testing.TB) string {
	t.Helper()
	return interpreter(t, "import torch, numpy", "python3-torch python3-numpy", torchPython())
}

func torchPython() string { return cmp.Or(os.Getenv("STAGECOACH_TORCH_PYTHON"), "/usr/bin/python3") }

// interpreters caches which candidates could run which Python code. A test process runs each
// candidate only once, because importing PyTorch takes seconds.
var interpreters sync.Map

// try runs code with an interpreter. It returns the interpreter's path, and why it cannot be used.
func try(code, candidate string) (path, why string) {
	v, _ := interpreters.LoadOrStore(code+candidate, sync.OnceValues(func() (string, string) {
		path, err := exec.LookPath(candidate)
		if err != nil {
			return "", err.Error() + "\n"
		}
		if out, err := exec.Command(path, "-c", code).CombinedOutput(); err != nil {
			return path, fmt.Sprintf("%s: %v\n%s", path, err, out)
		}
		return path, ""
	}))
	once, _ := v.(func() (string, string))
	return once()
}

// interpreter returns the path of the first of candidates that runs code.
func interpreter(t testing.TB, code, packages string, candidates ...string) string {
	t.Helper()
	var all strings.Builder
	for _, c := range candidates {
		path, why := try(code, c)
		if why == "" {
			return path
		}
		all.WriteString(why)
	}
	const missing = "no interpreter for this test (Debian: apt-get install %s; another one: STAGECOACH_TORCH_PYTHON):\n%s"
	if os.Getenv("CI") == "true" {
		t.Fatalf(missing, packages, all.String())
	}
	t.Skipf(missing, packages, all.String())
	return ""
}

// Copy copies a file with its mode. Images must not contain links to files outside: functions with
// separate users do not see this machine's /tmp, where the repository may be.
func Copy(from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, info.Mode().Perm()) //nolint:gosec // a file of a test
}

// Outside makes a folder that every user can enter. It is outside of /tmp, because some processes
// have their own /tmp. It needs root.
func Outside(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "stagecoach-test-") //nolint:usetesting // not in /tmp
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // others pass through it
		t.Fatal(err)
	}
	return dir
}

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/gpu"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// gpuBenchmark runs `bench gpu` in a process of its own, and returns its report, the lines of the
// file and its status.
func gpuBenchmark(t *testing.T, program, file string, change func(*exec.Cmd), args ...string) (report bench.Report, lines []gpu.Line, status int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, append([]string{"bench", "gpu", "--json", "--json-lines", file, "--python", proctest.Torch(t), "--rounds", "2"}, args...)...)
	var out, said bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = append(os.Environ(), actAsMain+"=1"), &out, &said, 10*time.Second
	if change != nil {
		change(cmd)
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatalf("%v: %q\n%s", err, out.String(), said.String())
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var l gpu.Line
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		lines = append(lines, l)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(said.String())
		}
	})
	return report, lines, cmd.ProcessState.ExitCode()
}

// openFolder returns a folder that every user may write to.
func openFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bench-gpu-") //nolint:usetesting // users that are not root pass it
	if err == nil {
		err = os.Chmod(dir, 0o777) //nolint:gosec // every user writes to it
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// wantFigures fails the test unless each case of the size has these metrics in the report.
func wantFigures(t *testing.T, r *bench.Report, want map[string]string) {
	t.Helper()
	got := figures(r)
	for name, metrics := range want {
		for metric := range strings.FieldsSeq(metrics) {
			if !slices.Contains(got, name+" "+metric) {
				t.Errorf("no figure %q of %s in %q", metric, name, got)
			}
		}
	}
}

// TestBenchGPUWithAStandIn measures all paths, as in the product and bare, with stand-ins for the
// driver's library and for CUDA. All lines run except those that need CUDA.
func TestBenchGPUWithAStandIn(t *testing.T) {
	full := twoGPUs(t)
	if err := os.WriteFile(filepath.Join(full, "filling"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	folder := seenCUDA(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(openFolder(t), "lines")
	seen := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "PYTHONPATH="+folder) }
	r, lines, status := gpuBenchmark(t, program, file, seen, "--size", "2MB,20GB")
	if status != 0 {
		t.Errorf("status %d", status)
	}
	const (
		start = "first_output_p50_ms inference_p50_ms context_p50_ms copy_p50_ms kernels_p50_ms copy_gb_per_s share_of_pinned device_mb_per_replica"
		fork  = " hello_p50_ms order_p50_ms fork_p50_ms first_call_p50_ms"
	)
	// Parked children have these before the order.
	parked := strings.ReplaceAll(strings.ReplaceAll(start, "context_p50_ms ", ""), "kernels_p50_ms ", "")
	want := map[string]string{
		"device":               "import_p50_ms context_p50_ms kernels_p50_ms context_device_mb kernels_device_mb",
		"2MB_pinned_1_streams": "copy_gb_per_s", "2MB_pinned_2_streams": "copy_gb_per_s", "2MB_pinned_4_streams": "copy_gb_per_s",
		"2MB_ring":  "copy_gb_per_s share_of_pinned",
		"2MB_plain": start + " import_p50_ms load_p50_ms", "2MB_plain_x4": start + " first_output_last_ms",
		"2MB_fork": start + fork + " speedup_over_plain", "2MB_fork_x4": start + fork + " first_output_last_ms",
		"2MB_heap": start + fork, "2MB_heap_x4": start + fork,
		"2MB_parked": parked + " fork_p50_ms speedup_over_plain", "2MB_parked_x4": start,
		"2MB_resident": parked + " speedup_over_plain beyond_pinned_p50_ms", "2MB_resident_x4": parked,
		"2MB_cold": start + " spawn_p50_ms load_p50_ms", "2MB_cold_x4": start,
	}
	if os.Geteuid() == 0 {
		want["2MB_fork_bare"] = "first_output_p50_ms copy_gb_per_s speedup_over_plain"
	}
	wantFigures(t, &r, want)
	for _, name := range []string{"cuda", "device", "torch"} {
		if r.Versions[name] == "" {
			t.Errorf("versions %v, want %s", r.Versions, name)
		}
	}
	if len(r.Goals) != 9 { // all goals of a size except those of the headline
		t.Errorf("%d goals, want 9: %v", len(r.Goals), r.Goals)
	}
	// The device has 10 GiB, so 20 GB fit no cell.
	for _, name := range []string{"20GB_pinned", "20GB_weights", "20GB_ring", "20GB_fork"} {
		if !slices.ContainsFunc(r.Notes, func(n bench.Note) bool { return n.Case == name && strings.HasPrefix(n.Text, gpu.NotRun+": ") }) {
			t.Errorf("no note that %s was not run in %v", name, r.Notes)
		}
	}
	if !slices.ContainsFunc(r.Notes, func(n bench.Note) bool {
		return n.Case == "2MB_parked_x4" && strings.HasPrefix(n.Text, "paths: 3 fork") && strings.HasSuffix(n.Text, ", 1 parked")
	}) {
		t.Errorf("notes %v, want the paths of parked_x4", r.Notes)
	}
	if lines[0].Run == nil || lines[0].Run.Host.Cores == 0 {
		t.Errorf("first line %+v, want the machine", lines[0])
	}
	var told []bench.Result
	var goals []bench.Goal
	for _, l := range lines {
		told, goals = append(told, l.Results...), append(goals, l.Goals...)
	}
	if !slices.Equal(told, r.Results) || !slices.Equal(goals, r.Goals) {
		t.Errorf("the lines have results %v, goals %v, want those of the report: %v, %v", told, goals, r.Results, r.Goals)
	}

	// A run that was cut off goes on where it ended.
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	cut := bytes.Index(whole, []byte(`"cell":"2MB_resident"`))
	if err := os.WriteFile(file, whole[:cut+100], 0o644); err != nil { //nolint:gosec // results are for everybody
		t.Fatal(err)
	}
	again, lines, status := gpuBenchmark(t, program, file, seen, "--size", "2MB", "--paths", "fork,parked,resident,plain")
	if status != 0 || len(again.Goals) != len(r.Goals)-1 { // no goal of heap
		t.Errorf("status %d, %d goals, want 0 and those of %v without heap's", status, len(again.Goals), r.Goals)
	}
	wantFigures(t, &again, map[string]string{"2MB_fork": "first_output_p50_ms", "2MB_resident": "first_output_p50_ms speedup_over_plain share_of_pinned"})
	count := map[string]int{}
	for _, l := range lines {
		if l.Status == gpu.Measured {
			count[l.Cell]++
		}
	}
	if count["2MB_pinned"] != 1 || count["2MB_fork"] != 1 || count["2MB_resident"] != 1 || count["2MB_weights"] != 2 {
		t.Errorf("measured %v, want pinned, fork and resident once, and weights by each run", count)
	}
}

// TestBenchGPUWithoutAccounts runs `bench gpu` on the CPU, as a user who may not create accounts,
// cgroups or networks. torch.load cannot read the saved model of one cell. The bench reports this
// cell as failed, measures all other cells, and ends with status 1.
func TestBenchGPUWithoutAccounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it becomes another user")
	}
	t.Parallel()
	folder := openFolder(t)
	self, err := os.Executable()
	program := filepath.Join(folder, "stagecoach")
	if err == nil {
		err = proctest.Copy(self, program)
	}
	if err == nil {
		err = os.Chmod(program, 0o755) //nolint:gosec // another user runs it
	}
	saved := filepath.Join(folder, "weights", "2MB-F32", "model.pt")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(saved), 0o777) //nolint:gosec // another user writes to it
	}
	if err == nil {
		err = os.WriteFile(saved, []byte("not a model"), 0o644) //nolint:gosec // another user reads it
	}
	for _, dir := range []string{filepath.Dir(saved), filepath.Dir(filepath.Dir(saved))} {
		if err == nil {
			err = os.Chown(dir, 65534, 65534)
		}
	}
	if err == nil {
		err = os.Chown(saved, 65534, 65534) // otherwise it may not be linked
	}
	if err != nil {
		t.Fatal(err)
	}
	nobody := func(cmd *exec.Cmd) {
		cmd.Env, cmd.Dir = append(cmd.Env, "HOME="+folder, "TMPDIR="+folder), folder
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	r, lines, status := gpuBenchmark(t, program, filepath.Join(openFolder(t), "lines"), nobody, "--device", "cpu", "--size", "2MB", "--paths", "fork,plain", "--weights", filepath.Dir(filepath.Dir(saved)))
	if status != 1 {
		t.Errorf("status %d, want 1", status)
	}
	wantFigures(t, &r, map[string]string{
		"2MB_pinned_1_streams": "copy_gb_per_s", "2MB_fork": "first_output_p50_ms fork_p50_ms", "2MB_fork_x4": "first_output_p50_ms first_output_last_ms",
	})
	for _, got := range figures(&r) {
		if strings.Contains(got, "_bare") || strings.Contains(got, "share_of_pinned") || strings.HasPrefix(got, "2MB_plain") {
			t.Errorf("figure %q", got)
		}
	}
	if !slices.Contains(r.Notes, bench.Note{Case: "2MB_fork", Text: "without accounts, cgroups, networks"}) || len(r.Goals) > 0 {
		t.Errorf("notes %v, goals %v; want what the machine lacks, and goals of GPUs alone", r.Notes, r.Goals)
	}
	i := slices.IndexFunc(lines, func(l gpu.Line) bool { return l.Cell == "2MB_plain" })
	if i < 0 || lines[i].Status != gpu.Failed || !strings.Contains(lines[i].Cause, "torch.load by hand") {
		t.Errorf("lines %+v, want one of plain that failed", lines)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(saved), "1.safetensors")); err != nil {
		t.Errorf("the weights are not kept: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(folder, "weights", "stagecoach-bench-*")); len(left) > 0 || err != nil {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

// TestBenchGPUWithoutGPU checks that the bench ends with its own status for a missing device, so
// that a script can tell it from a failure.
func TestBenchGPUWithoutGPU(t *testing.T) {
	var out bytes.Buffer
	err := run(t.Context(), []string{"bench", "gpu", "--device", "none"}, &out)
	if err == nil || console.StatusOf(err) != 3 || !strings.Contains(err.Error(), "NVML shows no GPU") || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
		t.Errorf("status %d, %v, printed %q; want 3, a line, and nothing", console.StatusOf(err), err, out.String())
	}
	if got := console.StatusOf(errors.New("any other")); got != 1 {
		t.Errorf("status %d of any other error, want 1", got)
	}
}

// bundleLimit bounds the working tree and the carried files together, in bytes. It is the limit of
// a borrowed machine, 64 MiB, less a margin. The program is compressed.
const bundleLimit = 60 << 20

// TestBenchGPUBundle builds the file that `make bench-gpu-bundle` makes for another machine. The
// file and the tracked files together stay below bundleLimit.
func TestBenchGPUBundle(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	make := exec.CommandContext(t.Context(), "make", "-C", "../..", "bench-gpu-bundle", "GPU="+folder)
	if out, err := make.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), "git", "-C", "../..", "ls-files", "-z").Output()
	if err != nil {
		t.Skipf("git ls-files: %v: this is no clone", err)
	}
	total := int64(0)
	for file := range strings.SplitSeq(strings.Trim(string(out), "\x00"), "\x00") {
		// Otherwise it was removed.
		if info, err := os.Lstat(filepath.Join("..", "..", file)); err == nil {
			total += info.Size()
		}
	}
	program := filepath.Join(folder, "stagecoach")
	info, err := os.Stat(program + ".gz")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "gunzip", program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if total += info.Size(); total > bundleLimit {
		t.Errorf("the tracked files and the compressed program are %.2f MiB, want at most %d: what has grown?", float64(total)/(1<<20), bundleLimit>>20)
	}
	t.Logf("%.2f MiB", float64(total)/(1<<20))
	if out, err := exec.CommandContext(t.Context(), program, "version").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// seenCUDA returns a folder with the stand-in of CUDA. Replicas see this folder even if the sources
// are in /tmp, which replicas do not share with the machine.
func seenCUDA(t *testing.T) string {
	t.Helper()
	folder := proctest.Outside(t)
	if err := os.Chmod(folder, 0o755); err != nil { //nolint:gosec // stages are users of their own
		t.Fatal(err)
	}
	if err := proctest.Copy("testdata/cuda/sitecustomize.py", filepath.Join(folder, "sitecustomize.py")); err != nil {
		t.Fatal(err)
	}
	return folder
}

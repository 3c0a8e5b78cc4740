package gpu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// TestGPUCells runs cells that end in different ways: each has its note and its line.
func TestGPUCells(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testGPUCells)
}

func testGPUCells(t *testing.T) {
	var lines bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	r := &bench.Report{}
	c := &gpuCells{
		report: r, lines: &lines, look: func(context.Context) (int64, error) { return 10e9, nil }, host: func() (int64, error) { return 20e9, nil },
		end: time.Now().Add(time.Hour),
	}
	c.begin()
	measured := func(context.Context) error { r.Add("good", "ms", 1, 1); return nil }
	must := func(context.Context) error { t.Error("it ran"); return nil }
	c.run(ctx, gpuCell{name: "good", measure: measured, device: 10e9, host: 20e9})
	c.run(ctx, gpuCell{name: "bad", measure: func(context.Context) error { r.Add("bad", "ms", 2, 1); return errors.New("two\nlines") }})
	c.run(ctx, gpuCell{name: "long", measure: must, takes: 2 * time.Hour})
	c.run(ctx, gpuCell{name: "device", measure: must, device: 11e9})
	c.run(ctx, gpuCell{name: "host", measure: must, host: 21e9})
	c.end = time.Now().Add(time.Minute)
	c.run(ctx, gpuCell{name: "late", measure: func(ctx context.Context) error { <-ctx.Done(); return errors.New("it hung") }})
	c.goals([]bench.Goal{{Goal: "good: at most 2", Figure: 1, Met: true}})
	cancel()
	c.run(ctx, gpuCell{name: "stopped", measure: must})
	for _, want := range []string{
		"bad failed: two lines", "long not run: budget: it takes about 2h0m0s, and 1h0m0s are left",
		"device not run: memory of the device: want 11.0 GB free, got 10.0 GB", "host not run: memory of the machine: want 21.0 GB free, got 20.0 GB",
		"late failed: not done at its deadline, after 1m0s (it hung)", "stopped not run: interrupted",
	} {
		if !slices.ContainsFunc(r.Notes, func(n bench.Note) bool { return strings.HasPrefix(n.Case+" "+n.Text, want) }) {
			t.Errorf("no note %q in %q", want, r.Notes)
		}
	}
	if err := c.err(); err == nil || err.Error() != "2 cells failed: bad, late" {
		t.Errorf("error %v, want the cells that failed", err)
	}
	var got []string
	for line := range strings.Lines(lines.String()) {
		var l Line
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprint(l.Cell, " ", l.Status, " ", len(l.Results), len(l.Notes), len(l.Goals)))
	}
	want := []string{
		"  0 0 0", "good measured 1 0 0", "bad failed 1 1 0", "long not run 0 1 0", "device not run 0 1 0", "host not run 0 1 0", "late failed 0 1 0",
		"  0 0 1", "stopped not run 0 1 0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("lines %q, want %q", got, want)
	}
}

// TestSkipLeavesOutMeasuredCells checks that a resumed run does not report a cell as not run if an
// earlier run has measured it.
func TestSkipLeavesOutMeasuredCells(t *testing.T) {
	t.Parallel()
	c := &gpuCells{report: &bench.Report{}, before: map[string]bool{"1GB_fork": true}}
	c.skip("1GB_fork", "there are no weights")
	c.skip("1GB_heap", "there are no weights")
	if notes := c.report.Notes; len(notes) != 1 || notes[0].Case != "1GB_heap" {
		t.Errorf("notes %v, want one of 1GB_heap", notes)
	}
}

// TestWayNamesTheCellsOfItsTurn checks which cells fail if there is no KeysManager: the cells of
// this turn that no earlier run has measured.
func TestWayNamesTheCellsOfItsTurn(t *testing.T) {
	t.Parallel()
	g := &gpuBench{paths: gpuPaths, cells: &gpuCells{before: map[string]bool{"1GB_fork": true, "1GB_heap_x4": true}}}
	var got []string
	for turn := range turns {
		for _, w := range g.ways(gpuSize{"1GB", 1e9}, turn) {
			got = append(got, w.names()...)
		}
	}
	want := []string{
		"1GB_plain", "1GB_fork_x4", "1GB_parked", "1GB_resident", "1GB_heap", "1GB_cold",
		"1GB_plain_x4", "1GB_parked_x4", "1GB_resident_x4", "1GB_cold_x4", "1GB_fork_bare",
	}
	if !slices.Equal(got, want) {
		t.Errorf("cells %q, want %q", got, want)
	}
}

// TestBareStartsAreLeftOutIfAnEarlierRunWasBare resumes a run on a machine without accounts,
// cgroups and networks. There is no stage, so the test would fail if it measured bare starts.
func TestBareStartsAreLeftOutIfAnEarlierRunWasBare(t *testing.T) {
	t.Parallel()
	lines := filepath.Join(t.TempDir(), "lines")
	line := `{"cell":"1GB_fork","status":"measured","notes":[{"case":"1GB_fork","text":"without accounts, cgroups, networks"}]}` + "\n"
	if err := os.WriteFile(lines, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(lines, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r := &bench.Report{}
	g := &gpuBench{paths: gpuPaths, report: r, cells: &gpuCells{report: r}}
	if err := g.cells.resume(file); err != nil {
		t.Fatal(err)
	}
	g.starts(t.Context(), nil, g.ways(gpuSize{"1GB", 1e9}, turnBare), true)
	if len(g.cells.failed) > 0 {
		t.Errorf("cells %q failed, want none", g.cells.failed)
	}
}

func TestGPUGoals(t *testing.T) {
	t.Parallel()
	g := &gpuBench{at: gpuDevice{Device: starts.Device{Name: "cuda:0"}}, report: &bench.Report{}}
	small, large := gpuSize{"1GB", 1e9}, gpuSize{"5400MB", 54e8}
	for _, f := range []struct {
		name, metric string
		value        float64
	}{
		{"1GB_ring", "share_of_pinned", 0.79},
		{"1GB_fork", "first_output_p50_ms", 2000}, // it has no goal
		{"1GB_fork", "speedup_over_plain", 4.9},
		{"1GB_resident", "beyond_pinned_p50_ms", 49},
		{"5400MB_ring", "share_of_pinned", 0.8},
		{"5400MB_fork", "first_output_p50_ms", 999},
		{"5400MB_parked", "first_output_p50_ms", 301},
		{"5400MB_fork_bare", "speedup_over_plain", 6}, // only the product's path has a goal
		{"5400MB_resident", "beyond_pinned_p50_ms", 51},
		{"5400MB_resident", "speedup_over_plain", 30},
	} {
		g.report.Add(f.name, f.metric, f.value, 5)
	}
	var got []string
	for _, goal := range append(g.goals(small), g.goals(large)...) {
		got = append(got, fmt.Sprint(goal.Figure, goal.Met))
	}
	if want := []string{"0.79 false", "49 true", "4.9 false", "0.8 true", "999 true", "301 false", "51 false", "30 true"}; !slices.Equal(got, want) {
		t.Errorf("goals %q, want %q", got, want)
	}
	if g.at.Device = starts.OnCPU; len(g.goals(large)) > 0 {
		t.Error("there are goals of the CPU")
	}
}

// TestDeviceLine reads what templates/python3-stage/stagecoach/device.py logs.
func TestDeviceLine(t *testing.T) {
	t.Parallel()
	const head = "2026-11-23 10:00:00,000 INFO device GPU-5f has its parameters: "
	for line, want := range map[string]starts.DeviceParts{
		head + "context 0.250 s, 5.400 GB copied in 0.1234 s (43.8 GB/s), first kernels 0.010 s": {Context: 250 * time.Millisecond, Copied: 123400 * time.Microsecond, Kernels: 10 * time.Millisecond},
		head + "5.400 GB copied in 0.1000 s (54.0 GB/s)":                                         {Copied: 100 * time.Millisecond},
		head + "context": {},
	} {
		if got, ok := deviceLine(line); !ok || got != want {
			t.Errorf("%q: %+v, %v, want %+v", line, got, ok, want)
		}
	}
	if _, ok := deviceLine("device GPU-5f is ready: context 0.250 s"); ok {
		t.Error("a line of a parked child is one of a replica with parameters")
	}
}

// TestFindPythonAndNVML finds interpreters and the driver's library where machines have them.
func TestFindPythonAndNVML(t *testing.T) {
	env, path, home, lib := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	var want []string
	for _, file := range []string{filepath.Join(env, "bin", "python3"), filepath.Join(path, "python3"), filepath.Join(home, "miniforge3", "envs", "torch", "bin", "python3")} {
		if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		want = append(want, file)
	}
	t.Setenv("VIRTUAL_ENV", env)
	t.Setenv("CONDA_PREFIX", "")
	t.Setenv("PATH", path+":"+path)
	t.Setenv("HOME", home)
	got := slices.DeleteFunc(starts.Interpreters(), func(p string) bool { return !slices.Contains(want, p) })
	if !slices.Equal(got, want) {
		t.Errorf("interpreters %q, want %q", got, want)
	}
	t.Setenv("LD_LIBRARY_PATH", "/no/such/folder")
	if got := findNVML(nil); got != "" {
		t.Errorf("NVML %q, want none", got)
	}
	file := filepath.Join(lib, "libnvidia-ml.so.1")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := findNVML([]string{lib}); got != file {
		t.Errorf("NVML %q, want %q", got, file)
	}
}

// TestFirstHealthyDeviceIsChosen checks that the first healthy device is chosen, and that the error
// says what is wrong with the first device if none is healthy.
func TestFirstHealthyDeviceIsChosen(t *testing.T) {
	t.Parallel()
	ill := []keysmanager.Device{{ID: "GPU-1", Unhealthy: "XID 79"}, {ID: "GPU-2"}}
	if d, err := firstWell(ill); err != nil || d.ID != "GPU-2" {
		t.Errorf("%v, %v, want the one that is well", d, err)
	}
	if _, err := firstWell(ill[:1]); err == nil || !strings.Contains(err.Error(), "XID 79") {
		t.Errorf("error %v, want what is wrong with it", err)
	}
}

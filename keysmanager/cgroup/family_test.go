package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestFamilyInAUnifiedHierarchy checks the order in which a zygote's container needs its groups:
// the family's folder has no controllers until the zygote is in its own group. Later groups have
// their limits at once.
func TestFamilyInAUnifiedHierarchy(t *testing.T) {
	f := newFake(t, "/svc", "cpu memory pids")
	root, err := open(f.system, "n1")
	if err != nil {
		t.Fatal(err)
	}
	family := filepath.Join(f.mount, "svc/stagecoach/n1/family-z")
	control := filepath.Join(family, "cgroup.subtree_control")
	z, err := root.Create("z/z", Limits{Memory: 1 << 30, PIDs: 64})
	if err != nil {
		t.Fatal(err)
	}
	if err := z.SetCPU(500); err != nil {
		t.Error(err)
	}
	for _, file := range []string{control, filepath.Join(family, "z/memory.max"), filepath.Join(family, "z/cpu.max")} {
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s before the zygote is in its group: %v, want none", file, err)
		}
	}
	if _, err := z.Usage(); err != nil {
		t.Errorf("usage before: %v", err)
	}
	for range 2 { // the second call does nothing
		if err := z.Enforce(); err != nil {
			t.Fatal(err)
		}
	}
	if got := read(t, control); got != "+cpu +memory +pids" {
		t.Errorf("the family hands down %q, want cpu, memory and pids", got)
	}
	f.write(t, filepath.Join(family, "cpu.weight"), "100")
	if _, err := root.Create("z/child", Limits{Memory: 1 << 20, PIDs: 7}); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"z/memory.max": "1073741824", "z/pids.max": "64", "z/cpu.max": "50000 100000", "child/memory.max": "1048576", "child/pids.max": "7"} {
		if got := read(t, filepath.Join(family, file)); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	for _, file := range []string{"memory.max", "pids.max", "cpu.max"} {
		if _, err := os.Stat(filepath.Join(family, file)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s of the family: %v, want no limit", file, err)
		}
	}
	for i, want := range []string{"100", "200", "300"} {
		if _, err := root.Create(fmt.Sprint("z/more", i), Limits{}); err != nil {
			t.Fatal(err)
		}
		if got := read(t, filepath.Join(family, "cpu.weight")); got != want {
			t.Errorf("cpu.weight with a zygote and %d children: %q, want %q", i+2, got, want)
		}
	}
	for i := range 3 {
		_ = os.RemoveAll(filepath.Join(family, fmt.Sprint("more", i))) // with the kernel's files
	}
	if _, err := root.Adopt("z/child"); err != nil {
		t.Error(err)
	}
	if names, err := root.Names(); err != nil || !slices.Equal(names, []string{"z/child", "z/z"}) {
		t.Errorf("names %v, %v, want those of a family", names, err)
	}
}

// TestRemoveFoldersLeavesNoHierarchyOut removes the folders of a container in each hierarchy.
func TestRemoveFoldersLeavesNoHierarchyOut(t *testing.T) {
	f := newFake(t, "/", "cpu")
	other := filepath.Join(filepath.Dir(f.mount), "v1")
	f.write(t, f.mountinfo, "30 22 0:26 / "+f.mount+" rw - cgroup2 cgroup2 rw\n31 22 0:27 / "+other+" rw - cgroup cgroup rw,devices\n")
	for _, dir := range []string{f.mount + "/stagecoach.a/inner/more", other + "/stagecoach.a", other + "/stagecoach.b"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second call finds nothing
		if err := removeFolders(f.system, "/stagecoach.a"); err != nil {
			t.Error(err)
		}
	}
	left, err := filepath.Glob(filepath.Dir(f.mount) + "/*/stagecoach.*")
	if err != nil || !slices.Equal(left, []string{other + "/stagecoach.b"}) {
		t.Errorf("%v, %v, want the other container's alone", left, err)
	}
	f.write(t, other+"/stagecoach.b/tasks", "1") // stands for a process
	if err := removeFolders(f.system, "/stagecoach.b"); err == nil || !strings.Contains(err.Error(), "stagecoach.b") {
		t.Errorf("a group with processes: %v, want an error that names it", err)
	}
}

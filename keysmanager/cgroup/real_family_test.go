package cgroup_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestFamilyEndsWithItsLastGroup ends a zygote before its child. The child and its group stay. With
// the last group the family ends, and so does what is in its folder.
func TestFamilyEndsWithItsLastGroup(t *testing.T) {
	root, s := open(t), spawner(t)
	zygote, child := create(t, root, "z/z", cgroup.Limits{PIDs: 10}), create(t, root, "z/child", cgroup.Limits{Memory: 32 << 20})
	create(t, root, "flat", cgroup.Limits{})
	files, err := child.Files()
	if err != nil {
		t.Fatal(err)
	}
	family := filepath.Dir(filepath.Dir(files[0].Name()))
	for _, f := range files {
		_ = f.Close()
	}
	parent, _ := start(t, s, zygote, "exec sleep 1000")
	first, out := start(t, s, nil, fmt.Sprintf("for f in %s; do echo 0 >$f; done; echo in; exec sleep 1000", strings.ReplaceAll(family, "/cpu/", "/*/")+"/cgroup.procs"))
	if !out.Scan() || out.Text() != "in" {
		t.Fatalf("it says %q, want that it is in the family's folder", out.Text())
	}
	eats, _ := start(t, s, child, "dd if=/dev/zero of=/dev/null bs=256M count=1; exec sleep 1000")
	wait(t, child, "its limit", func(u cgroup.Usage) bool { return u.OOMKills > 0 })
	if u := usage(t, zygote); u.OOMKills > 0 {
		t.Errorf("usage of the zygote %+v, want nothing of its child", u)
	}
	if names, err := root.Names(); err != nil || !slices.Equal(names, []string{"flat", "z/child", "z/z"}) {
		t.Errorf("names %v, %v, want three groups", names, err)
	}
	if err := root.Retain([]string{"z/child"}); err != nil {
		t.Error(err)
	}
	if st := parent.Wait(); !st.Signaled() {
		t.Errorf("the zygote ended with %v, want it killed with its group", st)
	}
	adopted, err := root.Adopt("z/child")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", eats.PID())); err != nil || usage(t, adopted).OOMKills == 0 {
		t.Errorf("the child: %v, usage %+v, want it alive with what it was counted", err, usage(t, adopted))
	}
	if err := adopted.Remove(); err != nil {
		t.Error(err)
	}
	for _, p := range []sandbox.Process{eats, first} {
		if st := p.Wait(); !st.Signaled() {
			t.Errorf("process %d ended with %v, want it killed with the family", p.PID(), st)
		}
	}
	if _, err := os.Stat(family); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the family's folder: %v, want it gone", err)
	}

	// Another node removes the empty family of a node that no longer exists.
	create(t, root, "y/y", cgroup.Limits{})
	if err := root.Close(); err != nil {
		t.Error(err)
	}
	other, err := cgroup.Open("test-other-family")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if names, err := root.Names(); err != nil || len(names) > 0 {
		t.Errorf("groups of a node that is no more: %v, %v, want none", names, err)
	}
}

// TestFamilyWeighsAsMuchAsItsReplicas checks that a family of several replicas gets as much of a
// busy processor as these would get without a family.
func TestFamilyWeighsAsMuchAsItsReplicas(t *testing.T) {
	root := open(t)
	const file, weight = "cpu.shares", 1024 // of version 1; no such file is in version 2
	var groups []*cgroup.Group
	check := func() {
		t.Helper()
		files, err := groups[0].Files()
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			for _, f := range files {
				_ = f.Close()
			}
		}()
		for _, f := range files {
			b, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(f.Name())), file))
			if want := fmt.Sprintln(weight * max(1, len(groups)-2)); err == nil && string(b) != want {
				t.Errorf("%s of %d groups: %q, want %q", file, len(groups), b, want)
			}
		}
	}
	for i := range 6 {
		groups = append(groups, create(t, root, fmt.Sprint("z/", i), cgroup.Limits{}))
		check()
	}
	for len(groups) > 1 {
		if err := groups[len(groups)-1].Remove(); err != nil {
			t.Fatal(err)
		}
		groups = groups[:len(groups)-1]
		check()
	}
	if err := groups[0].Remove(); err != nil {
		t.Error(err)
	}
}

package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fake is a cgroup v2 tree of plain files. The tests do what a kernel does by itself, such as
// creating and removing a group's files. None of this has run on a real v2.
type fake struct {
	system
	mount string
}

func newFake(t *testing.T, own, controllers string) fake {
	t.Helper()
	dir := t.TempDir()
	f := fake{system{filepath.Join(dir, "cgroup"), filepath.Join(dir, "mountinfo")}, filepath.Join(dir, "fs")}
	f.write(t, f.cgroup, "0::"+own+"\n")
	f.write(t, f.mountinfo, fmt.Sprintf("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 / %s rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", f.mount))
	home := filepath.Join(f.mount, own)
	f.write(t, filepath.Join(home, "cgroup.controllers"), controllers+"\n")
	f.write(t, filepath.Join(home, "cgroup.subtree_control"), "")
	return f
}

func (f fake) write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	// The tests created this file without permissions, where a kernel would have created it.
	_ = os.Chmod(file, 0o600)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestFolderOfAnotherUser refuses a folder in which this process cannot make groups, because a
// daemon that ran as another user has left it. Else each replica would fail.
func TestFolderOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to act as another user")
	}
	folder := filepath.Join(t.TempDir(), "node")
	if err := mkdirOwn(folder); err != nil {
		t.Fatal(err)
	}
	for parent := filepath.Dir(folder); parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil { //nolint:gosec // the other user looks into it
			t.Fatal(err)
		}
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its user
		_, _ = unix.SetfsuidRetUid(65534)
		done <- mkdirOwn(folder)
	}()
	if err := <-done; !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "another user") {
		t.Errorf("a folder of root, for another user: %v, want an error that says so", err)
	}
}

func TestGroupsInAUnifiedHierarchy(t *testing.T) {
	f := newFake(t, "/system.slice/stagecoach.service", "cpuset cpu io memory pids")
	root, err := open(f.system, "n1")
	if err != nil {
		t.Fatal(err)
	}
	if len(root.Lacks()) > 0 {
		t.Errorf("lacks %v, want nothing", root.Lacks())
	}
	home := filepath.Join(f.mount, "system.slice/stagecoach.service")
	node := filepath.Join(home, "stagecoach/n1")
	for _, dir := range []string{home, filepath.Dir(node), node} {
		if got := read(t, filepath.Join(dir, "cgroup.subtree_control")); got != "+cpu +memory +pids" {
			t.Errorf("%s hands down %q, want cpu, memory and pids", dir, got)
		}
	}
	f.write(t, filepath.Join(node, "memory.swap.max"), "max\n")
	g, err := root.Create("r1", Limits{Memory: 128 << 20, CPUMilli: 500, PIDs: 64})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(node, "r1")
	for file, want := range map[string]string{"memory.max": "134217728", "memory.swap.max": "0", "cpu.max": "50000 100000", "pids.max": "64"} {
		if got := read(t, filepath.Join(dir, file)); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	for milli, want := range map[int]string{1500: "150000 100000", 1: "1000 100000", 0: "max 100000"} {
		if err := g.SetCPU(milli); err != nil {
			t.Error(err)
		} else if got := read(t, filepath.Join(dir, "cpu.max")); got != want {
			t.Errorf("cpu.max of %dm: %q, want %q", milli, got, want)
		}
	}
	f.write(t, filepath.Join(dir, "cgroup.procs"), "")
	files, err := g.Files()
	if err != nil || len(files) != 1 || files[0].Name() != filepath.Join(dir, "cgroup.procs") {
		t.Fatalf("files %v, %v, want cgroup.procs", files, err)
	}
	_ = files[0].Close()
	f.write(t, filepath.Join(dir, "cpu.stat"), "usage_usec 1500000\nuser_usec 1\nsystem_usec 1\nnr_periods 20\nnr_throttled 7\nthrottled_usec 250000\n")
	f.write(t, filepath.Join(dir, "memory.current"), "5000000\n")
	f.write(t, filepath.Join(dir, "memory.stat"), "anon 1\ninactive_file 1000000\nactive_file 3\n")
	f.write(t, filepath.Join(dir, "memory.events"), "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
	f.write(t, filepath.Join(dir, "pids.events"), "max 11\n")
	want := Usage{1500 * time.Millisecond, 4_000_000, 250 * time.Millisecond, 20, 7, 2, 11}
	if u, err := g.Usage(); err != nil || u != want {
		t.Errorf("usage %+v, %v, want %+v", u, err, want)
	}
	adopted, err := root.Adopt("r1")
	if err != nil {
		t.Fatal(err)
	}
	if u, err := adopted.Usage(); err != nil || u != want {
		t.Errorf("adopted: usage %+v, %v, want %+v", u, err, want)
	}
	if names, err := root.Names(); err != nil || !slices.Equal(names, []string{"r1"}) {
		t.Errorf("names %v, %v, want r1", names, err)
	}
	g.kill(dir)
	if got := read(t, filepath.Join(dir, "cgroup.kill")); got != "1" {
		t.Errorf("cgroup.kill: %q, want 1", got)
	}
	f.write(t, filepath.Join(dir, "memory.current"), "much\n")
	if _, err := g.Usage(); err == nil || !strings.Contains(err.Error(), "r1: memory.current") {
		t.Errorf("usage of what is no number: %v, want an error that names group and file", err)
	}
}

func TestMissingControllersAreReported(t *testing.T) {
	f := newFake(t, "/user.slice", "memory pids") // as systemd delegates to users
	root, err := open(f.system, "n1")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(root.Lacks(), []string{"cpu"}) {
		t.Errorf("lacks %v, want cpu", root.Lacks())
	}
	g, err := root.Create("r1", Limits{CPUMilli: 500, Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.SetCPU(200); err != nil {
		t.Errorf("SetCPU without its controller: %v, want no effect", err)
	}
	if _, err := open(newFake(t, "/", "cpuset io").system, "n1"); err == nil || !strings.Contains(err.Error(), "Delegate=yes") {
		t.Errorf("without controllers: %v, want an error that says what to do", err)
	}
}

func TestFindReturnsAPlacePerController(t *testing.T) {
	const v1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw shared:1 master:2 - cgroup cgroup rw,memory\n" +
		"39 31 0:36 / /mnt/a\\040b/pids rw - cgroup cgroup rw,pids\n"
	const hybrid = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	for name, tc := range map[string]struct {
		mounts, own string
		want        map[string]place
		unified     bool
		fault       string
	}{
		"v1, hybrid": {v1 + hybrid, "4:memory:/docker/ab/c\n2:cpu,cpuacct:/x\n1:pids:/\n0::/\n", map[string]place{
			"cpu": {"/sys/fs/cgroup/cpu,cpuacct", "/x"}, "cpuacct": {"/sys/fs/cgroup/cpu,cpuacct", "/x"},
			"memory": {"/sys/fs/cgroup/memory", "/c"}, "pids": {"/mnt/a b/pids", "/"},
		}, false, ""},
		"a group outside of what is mounted": {v1, "4:memory:/elsewhere\n1:pids:/p\n", map[string]place{"pids": {"/mnt/a b/pids", "/p"}}, false, ""},
		"nothing mounted":                    {"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", "0::/\n", nil, false, "no cgroup file system"},
		"lines cut short":                    {"32 31 0:29\n32 31 0:29 / /x rw - cgroup\n", "1:pids:/\n", nil, false, "no cgroup file system"},
		"no group":                           {v1, "nonsense\n", nil, false, "invalid cgroup entry"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := system{filepath.Join(dir, "cgroup"), filepath.Join(dir, "mountinfo")}
			for file, text := range map[string]string{s.cgroup: tc.own, s.mountinfo: tc.mounts} {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, unified, err := s.find()
			if tc.fault != "" {
				if err == nil || !strings.Contains(err.Error(), tc.fault) {
					t.Fatalf("%v, want an error with %q", err, tc.fault)
				}
				return
			}
			if err != nil || unified != tc.unified || fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Errorf("%v, %t, %v, want %v, %t", got, unified, err, tc.want, tc.unified)
			}
		})
	}
}

// TestFindLeavesTheLeafGroup finds the place for groups again after an earlier process has moved
// this one into the leaf group.
func TestFindLeavesTheLeafGroup(t *testing.T) {
	f := newFake(t, "/svc", "cpu memory pids")
	f.write(t, f.cgroup, "0::/svc/"+leaf+"\n")
	places, unified, err := f.find()
	if want := (place{f.mount, "/svc"}); err != nil || !unified || places[cpu] != want {
		t.Errorf("%v, %t, %v, want %v", places, unified, err, want)
	}
}

func TestOnlyOurProcessesAreMoved(t *testing.T) {
	f := newFake(t, "/svc", "cpu memory pids")
	home := filepath.Join(f.mount, "svc")
	f.write(t, filepath.Join(home, "cgroup.procs"), fmt.Sprintln(os.Getpid()))
	f.write(t, filepath.Join(home, leaf, "cgroup.procs"), "")
	if err := moveProcesses(home); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(home, leaf, "cgroup.procs")); got != fmt.Sprint(os.Getpid()) {
		t.Errorf("moved %q, want this process", got)
	}
	f.write(t, filepath.Join(home, "cgroup.procs"), "1\n")
	own, _ := os.ReadFile("/proc/self/cgroup")
	if strings.Contains(string(own), "0::/\n") {
		return // here everything may be moved
	}
	if err := moveProcesses(home); err == nil || !strings.Contains(err.Error(), "not ours") {
		t.Errorf("with a process that is not ours: %v, want an error", err)
	}
}

func TestInvalidGroupNamesAreRefused(t *testing.T) {
	f := newFake(t, "/", "cpu memory pids")
	root, err := open(f.system, "n1")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", ".", "..", "a/", "/a", "a/b/c", "a/..", "../n2/x", "family-a", strings.Repeat("x", 201), "a\nb"} {
		if _, err := root.Create(name, Limits{}); err == nil {
			t.Errorf("a group named %q was made", name)
		}
		if _, err := root.Adopt(name); err == nil || errors.Is(err, os.ErrNotExist) {
			t.Errorf("adopting %q: %v, want that the name is none", name, err)
		}
		if _, err := open(f.system, name); err == nil && name != "family-a" {
			t.Errorf("a node named %q was opened", name)
		}
	}
}

// FuzzMounts checks that parsing does not panic, and that mounts have the required fields.
func FuzzMounts(f *testing.F) {
	f.Add("32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n", "/x")
	f.Add("41 31 0:38 /a /sys/fs/cgroup/unified rw shared:1 - cgroup2 cgroup2 rw\n", "/a/b")
	f.Add("1 2 3 - - - - cgroup - \\040", "..")
	f.Fuzz(func(t *testing.T, text, group string) {
		mounts, err := parseMounts(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, m := range mounts {
			if p, ok := m.place(group); ok && !filepath.IsAbs(p.home) {
				t.Errorf("%+v has group %q at %q, want an absolute path", m, group, p.home)
			}
		}
	})
}

func FuzzNumber(f *testing.F) {
	f.Add("nr_periods 12\nnr_throttled 3\n", "nr_throttled")
	f.Add("77\n", "")
	f.Add("max x\n", "max")
	f.Fuzz(func(t *testing.T, text, field string) {
		if n, err := number(text, field); err != nil && n != 0 && !strings.Contains(err.Error(), "out of range") {
			t.Errorf("%d and %v", n, err)
		}
	})
}

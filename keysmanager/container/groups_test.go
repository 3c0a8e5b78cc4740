package container

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1/stats"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// openGroups opens the cgroups of a node. They must all be gone at the end of the test.
func openGroups(t *testing.T, node string) *cgroup.Root {
	t.Helper()
	root, err := cgroup.Open(node)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if names, err := root.Names(); err != nil || len(names) > 0 {
			t.Errorf("cgroups %v are left, %v, want none", names, err)
		}
		_ = root.Retain(nil)
		_ = root.Close()
	})
	return root
}

func createGroup(t *testing.T, root *cgroup.Root, name string, l cgroup.Limits) (*cgroup.Group, []*os.File) {
	t.Helper()
	g, err := root.Create(name, l)
	if err != nil {
		t.Fatal(err)
	}
	files, err := g.Files()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range files {
			_ = f.Close()
		}
	})
	return g, files
}

// scripted returns sleeper with a shell's or Python's script. The test reads what it prints.
func scripted(t *testing.T, argv ...string) (c sandbox.Command, out *bufio.Scanner) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = r.Close(), w.Close() })
	_ = r.SetReadDeadline(time.Now().Add(time.Minute))
	c = sleeper()
	c.Argv, c.Stdout, c.Stderr = argv, w, w
	return c, bufio.NewScanner(r)
}

// hierarchies returns the path of a process's group by hierarchy.
func hierarchies(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		all[f[1]] = f[2]
	}
	return all
}

// threadsOf returns the number of threads of processes.
func threadsOf(t *testing.T, pids ...int) (n int) {
	t.Helper()
	for _, pid := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			t.Fatal(err)
		}
		n += len(tasks)
	}
	return n
}

// TestGroupOfAFamilyIsItsContainers checks that a zygote and its child are in groups of their own,
// with their own limits, in a folder without limits, and that containerd measures the folder.
func TestGroupOfAFamilyIsItsContainers(t *testing.T) {
	s := containerdtest.Start(t)
	root := openGroups(t, s.Namespace)
	r := open(t, s)
	defer r.Close()
	const mib = 1 << 20
	zygote, files := createGroup(t, root, "z/z", cgroup.Limits{PIDs: 60, Memory: 300 * mib})
	c, out := scripted(t, "sh", "-c", "cat /proc/self/cgroup; sleep 600 & echo $!; wait")
	c.Groups = files
	p := start(t, r, c)
	first := 0
	for out.Scan() && !strings.Contains(out.Text(), "::") {
		if strings.HasSuffix(out.Text(), "/stagecoach/"+s.Namespace+"/family-z/z") {
			first++
		}
	}
	if first != len(files) {
		t.Errorf("its first child is in the zygote's group in %d hierarchies, want %d", first, len(files))
	}
	out.Scan()
	inside, err := strconv.Atoi(out.Text())
	if err != nil {
		t.Fatal(err)
	}
	child, err := sandbox.PIDsOf(p.init).Outside(inside)
	if err != nil {
		t.Fatal(err)
	}
	replica, entries := createGroup(t, root, "z/child", cgroup.Limits{PIDs: 30, Memory: 100 * mib})
	for _, f := range entries {
		if _, err := f.WriteString(strconv.Itoa(child)); err != nil {
			t.Fatal(err)
		}
	}
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		for pid, want := range map[int]string{p.init: "family-z", p.PID(): "family-z/z", child: "family-z/child"} {
			if got := hierarchies(t, pid)[controller]; !strings.HasSuffix(got, "/stagecoach/"+s.Namespace+"/"+want) {
				t.Errorf("%s of process %d: %s, want %s", controller, pid, got, want)
			}
		}
	}
	if got := hierarchies(t, child)["devices"]; got != ownGroup(p.id) {
		t.Errorf("devices of the child: %s, want those of the container", got)
	}
	folder := filepath.Dir(filepath.Dir(files[0].Name()))
	for _, f := range files {
		folder := filepath.Dir(filepath.Dir(f.Name()))
		if b, err := os.ReadFile(filepath.Join(folder, "memory.limit_in_bytes")); err == nil && len(b) < len("1000000000000000") {
			t.Errorf("limit of the family: %s, want none", b)
		}
		if b, err := os.ReadFile(filepath.Join(folder, "pids.max")); err == nil && string(b) != "max\n" {
			t.Errorf("limit on the family's processes: %s, want none", b)
		}
	}
	m, err := p.task.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := typeurl.UnmarshalAny(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	seen, ok := data.(*stats.Metrics)
	if !ok {
		t.Fatalf("metrics of type %T", data)
	}
	if want := threadsOf(t, p.init, p.PID(), child); int(seen.Pids.GetCurrent()) != want {
		t.Errorf("containerd counts %d processes and threads, want %d", seen.Pids.GetCurrent(), want)
	}
	var sum int64
	for _, g := range []*cgroup.Group{zygote, replica} {
		u, err := g.Usage()
		if err != nil {
			t.Fatal(err)
		}
		sum += u.Memory
	}
	if got := int64(seen.Memory.GetUsage().GetUsage()); got < sum/2 || sum == 0 {
		t.Errorf("containerd measures %d bytes of memory, want those of the groups, %d", got, sum)
	}
	if seen.CPU.GetUsage().GetTotal() == 0 {
		t.Error("containerd measures no time of the processor")
	}
	end(t, p)
	p.Forget()
	for _, g := range []*cgroup.Group{zygote, replica} {
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v, want it removed with its last group", folder, err)
	}
	nothingLeft(t, s, p.id)
}

// full is a program that fills the limit on processes, says SIGUSR1, and ends at SIGTERM.
const full = `
import os, signal
waited = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
try:
    while True:
        if os.fork() == 0:
            signal.sigwait({signal.SIGINT})
except OSError:
    os.write(1, b"full\n")
while signal.sigwait(waited) == signal.SIGUSR1:
    os.write(1, b"signal\n")
os._exit(7)
`

// TestContainersOutliveAFullLimitOnProcesses fills the limit of a program's cgroup, and that of its
// user. Signals, also those to the first process, the status and the end must work as ever.
func TestContainersOutliveAFullLimitOnProcesses(t *testing.T) {
	s := containerdtest.Start(t)
	root := openGroups(t, s.Namespace)
	r := open(t, s)
	defer r.Close()
	for name, change := range map[string]func(c *sandbox.Command) *cgroup.Group{
		"of a program": func(c *sandbox.Command) (g *cgroup.Group) {
			g, c.Groups = createGroup(t, root, "web", cgroup.Limits{PIDs: 40})
			return g
		},
		"of a zygote": func(c *sandbox.Command) (g *cgroup.Group) {
			g, c.Groups = createGroup(t, root, "z/z", cgroup.Limits{PIDs: 40})
			return g
		},
		"of a user": func(c *sandbox.Command) *cgroup.Group { c.Processes = 40; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			for range 5 {
				c, out := scripted(t, "python3", "-c", full)
				g := change(&c)
				p := start(t, r, c)
				if !out.Scan() || out.Text() != "full" {
					t.Fatalf("it says %q, %v, want full", out.Text(), out.Err())
				}
				for range 200 {
					for _, pid := range []int{p.init, p.PID()} { // the first process hands it on
						if err := unix.Kill(pid, unix.SIGUSR1); err != nil {
							t.Fatal(err)
						}
						if !out.Scan() || out.Text() != "signal" {
							t.Fatalf("it says %q, %v, want that it has a signal; the container: %v", out.Text(), out.Err(), p.initEnded(t.Context()))
						}
					}
				}
				if err := p.Signal(unix.SIGTERM); err != nil {
					t.Fatal(err)
				}
				if status := p.Wait(); !status.Exited() || status.ExitStatus() != 7 {
					t.Errorf("%#x, want status 7", status)
				}
				p.Forget()
				if g != nil {
					if err := g.Remove(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
}

// TestSweepRemovesGroupsThatRuncHasLeft has the groups and the folder of a container whose runc was
// killed before it knew the container.
func TestSweepRemovesGroupsThatRuncHasLeft(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	id := s.Namespace + "-killed"
	if _, err := newFolder(id, record{Node: s.Namespace, Owner: "1-1-before-x"}); err != nil {
		t.Fatal(err)
	}
	mounts, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil || len(mounts) == 0 {
		r.Close()
		t.Skip("the hierarchies of cgroups are not in folders")
	}
	for _, m := range mounts {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(m), ownGroup(id), "inner"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r.Sweep(t.Context())
	r.Close() // waits for the removal
	if left := slices.DeleteFunc(groupsOf(t), func(g string) bool { return !strings.HasSuffix(g, id) }); len(left) > 0 {
		t.Errorf("%v are left, want none", left)
	}
	if _, err := os.Stat(filepath.Join(Folders, id)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its folder: %v, want none", err)
	}
	proctest.Until(t, "nothing is left", func() bool { return len(left(t, s)) == 0 })
}

// TestEndedStartsLeaveNoGroups closes a Runtime while runc makes a container: its groups exist, and
// containerd does not know its task yet.
func TestEndedStartsLeaveNoGroups(t *testing.T) {
	s := containerdtest.Start(t)
	for i := range 10 {
		r := open(t, s)
		c := sleeper()
		c.Labels = map[string]string{sandbox.LabelFunction: fmt.Sprint(s.Namespace, "-", i)}
		started := make(chan error, 1)
		go func() { // the test waits for it
			_, err := r.Start(t.Context(), c)
			started <- err
		}()
		its := func() []string {
			return slices.DeleteFunc(groupsOf(t), func(g string) bool { return !strings.Contains(g, fmt.Sprint(s.Namespace, "-", i, "-")) })
		}
		proctest.Until(t, "runc makes the groups", func() bool { return len(its()) > 0 })
		r.Close()
		<-started // ended, or just done
		if left := its(); len(left) > 0 {
			t.Errorf("start %d: %v are left, want none", i, left)
		}
	}
	nothingLeft(t, s)
}

// TestGroupsOfAContainerInAUnifiedHierarchy checks that the container's group is the folder of the
// family, so that what runc attaches to it, as the filter of devices, holds for all replicas.
func TestGroupsOfAContainerInAUnifiedHierarchy(t *testing.T) {
	const node = "/sys/fs/cgroup/system.slice/stagecoach.service/stagecoach/n1"
	files := []*os.File{nil}
	g := groupsIn("web-1", []string{node + "/family-z/z"}, files, true)
	if want := strings.TrimPrefix(node, "/sys/fs/cgroup") + "/family-z"; g.path != want || len(g.hook) > 0 || len(g.back) > 0 || len(g.leaf) != 1 {
		t.Errorf("%+v, want %s, which the first process leaves for the zygote's", g, want)
	}
	g = groupsIn("web-1", []string{node + "/replica-x"}, files, true)
	if want := strings.TrimPrefix(node, "/sys/fs/cgroup") + "/replica-x"; g.path != want || len(g.hook)+len(g.back)+len(g.leaf) > 0 {
		t.Errorf("%+v, want %s alone", g, want)
	}
}

// TestFilterOfDevicesHoldsBelowAGroup attaches a filter of devices to a group of version 2, as runc
// does, and checks that it holds for a process in a group below. So it holds for forks, whose
// groups are below their container's.
func TestFilterOfDevicesHoldsBelowAGroup(t *testing.T) {
	mount := ""
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(at, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			mount = at
		}
	}
	if mount == "" || os.Geteuid() != 0 {
		t.Skip("needs root and cgroups of version 2")
	}
	family, err := os.MkdirTemp(mount, "stagecoach-test-") //nolint:usetesting // a group
	if err != nil {
		t.Fatal(err)
	}
	leaf := filepath.Join(family, "child")
	if err := os.Mkdir(leaf, 0o755); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(os.Remove(leaf), os.Remove(family)); err != nil {
			t.Error(err)
		}
	}()
	one, five := int64(1), int64(5) // /dev/zero
	rules, license, err := cgroup2.DeviceFilter([]specs.LinuxDeviceCgroup{{Allow: true, Type: "c", Major: &one, Minor: &five, Access: "rwm"}})
	if err != nil {
		t.Fatal(err)
	}
	folder, err := os.Open(family)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	detach, err := cgroup2.LoadAttachCgroupDeviceFilter(rules, license, int(folder.Fd()))
	if err != nil {
		t.Skip(err)
	}
	script := fmt.Sprintf("echo 0 >%s/cgroup.procs && head -c 1 /dev/zero | wc -c; head -c 1 /dev/full", leaf)
	out, err := exec.CommandContext(t.Context(), "sh", "-c", script).CombinedOutput()
	if text := string(out); err == nil || !strings.HasPrefix(text, "1\n") || !strings.Contains(text, "Operation not permitted") {
		t.Errorf("%q, %v, want a byte of /dev/zero, and nothing of /dev/full", text, err)
	}
	if err := detach(); err != nil {
		t.Error(err)
	}
}

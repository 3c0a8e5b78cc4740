package cgroup_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open returns this machine's groups. If a test must run here, it fails without them.
func open(t *testing.T) *cgroup.Root {
	t.Helper()
	root, err := cgroup.Open("test-" + strings.ToLower(t.Name()))
	if err == nil && len(root.Lacks()) > 0 {
		err = fmt.Errorf("no controllers %v", root.Lacks())
	}
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatalf("CI has to be where cgroups may be made: %v", err)
	}
	if err != nil {
		t.Skipf("no cgroups may be made here (root may, on most machines): %v", err)
	}
	t.Cleanup(func() {
		if err := root.Retain(nil); err != nil {
			t.Error(err)
		}
		_ = root.Close() // a test may have done so
	})
	return root
}

func create(t *testing.T, root *cgroup.Root, name string, l cgroup.Limits) *cgroup.Group {
	t.Helper()
	g, err := root.Create(name, l)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// start runs a shell's script in a group. What it prints can be read line by line.
func start(t *testing.T, s *sandbox.Spawner, g *cgroup.Group, script string) (sandbox.Process, *bufio.Scanner) {
	t.Helper()
	return startAs(t, s, g, script, nil)
}

// startAs is like start, for another user. That user sees the machine's files in a private mount
// namespace.
func startAs(t *testing.T, s *sandbox.Spawner, g *cgroup.Group, script string, as *sandbox.Account) (sandbox.Process, *bufio.Scanner) {
	t.Helper()
	var files []*os.File
	if g != nil {
		var err error
		if files, err = g.Files(); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	defer w.Close()
	cmd, err := s.Start(t.Context(), sandbox.Command{Dir: "/usr", Argv: []string{"/bin/sh", "-c", script}, Groups: files, Stdout: w, Stderr: w, As: as})
	if err != nil {
		t.Fatal(err)
	}
	_ = r.SetReadDeadline(time.Now().Add(time.Minute))
	stuck := time.AfterFunc(time.Minute, func() { _ = cmd.Signal(syscall.SIGKILL) })
	t.Cleanup(func() { stuck.Stop() })
	return cmd, bufio.NewScanner(r)
}

func spawner(t *testing.T) *sandbox.Spawner {
	s := sandbox.NewSpawner()
	t.Cleanup(s.Close)
	return s
}

func usage(t *testing.T, g *cgroup.Group) cgroup.Usage {
	t.Helper()
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// wait polls the group's usage until done returns true.
func wait(t *testing.T, g *cgroup.Group, what string, done func(cgroup.Usage) bool) cgroup.Usage {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		u := usage(t, g)
		if done(u) {
			return u
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waited a minute for %s, have %+v", what, u)
		}
	}
}

// TestEntersBeforeItsFirstInstruction starts a program that prints its groups, and checks that
// neither it nor a later process is in a wrong one.
func TestEntersBeforeItsFirstInstruction(t *testing.T) {
	root, s := open(t), spawner(t)
	g := create(t, root, "r1", cgroup.Limits{PIDs: 100})
	files, err := g.Files()
	if err != nil {
		t.Fatal(err)
	}
	hierarchies := len(files)
	for _, f := range files {
		_ = f.Close()
	}
	count := func(out *bufio.Scanner) (in int) {
		for out.Scan() {
			if strings.HasSuffix(out.Text(), "/stagecoach/test-"+strings.ToLower(t.Name())+"/r1") {
				in++
			}
		}
		return in
	}
	for range 20 {
		cmd, out := start(t, s, g, "exec cat /proc/self/cgroup")
		if in := count(out); in != hierarchies {
			t.Errorf("the process is in the group in %d hierarchies, want %d", in, hierarchies)
		}
		cmd.Wait()
		cmd, out = startAs(t, s, g, "exec cat /proc/self/cgroup", &sandbox.Account{UID: 199998, GID: 199998})
		if in := count(out); in != hierarchies {
			t.Errorf("a process with a user of its own is in the group in %d hierarchies, want %d", in, hierarchies)
		}
		cmd.Wait()
		cmd, out = start(t, s, nil, "exec cat /proc/self/cgroup")
		if in := count(out); in != 0 {
			t.Errorf("a process without a group is in an earlier one's in %d hierarchies, want none", in)
		}
		cmd.Wait()
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

// TestRemoveLeavesTheSpawnerAlone removes groups while the spawner starts a process in them. Remove
// may kill that process, but never the spawner, although a thread of the spawner is in the group
// for a moment.
func TestRemoveLeavesTheSpawnerAlone(t *testing.T) {
	root, s := open(t), spawner(t)
	for i := range 50 {
		g := create(t, root, fmt.Sprint("r", i), cgroup.Limits{})
		files, err := g.Files()
		if err != nil {
			t.Fatal(err)
		}
		removed := make(chan error)
		go func() { removed <- g.Remove() }()
		cmd, err := s.Start(t.Context(), sandbox.Command{Dir: "/", Argv: []string{"/bin/sleep", "1000"}, Groups: files})
		for _, f := range files {
			_ = f.Close()
		}
		if err := <-removed; err != nil {
			t.Error(err)
		}
		if err == nil {
			_ = cmd.Signal(syscall.SIGKILL) // it may have died in the group, or come too late
			cmd.Wait()
		}
	}
}

// TestSetCPUChangesTheQuotaOfARunningProgram changes the quota of a program that spins, and
// compares its work per throttled period.
func TestSetCPUChangesTheQuotaOfARunningProgram(t *testing.T) {
	root, s := open(t), spawner(t)
	g := create(t, root, "spins", cgroup.Limits{CPUMilli: 100}) // which it gets on a busy machine, too
	cmd, _ := start(t, s, g, "while :; do :; done")
	// work returns the program's work in 10 throttled periods. Others do not count, because the
	// machine may be busy.
	work := func() time.Duration {
		from := wait(t, g, "the first period", func(u cgroup.Usage) bool { return u.ThrottledIn > 0 })
		to := wait(t, g, "ten periods", func(u cgroup.Usage) bool { return u.ThrottledIn >= from.ThrottledIn+10 })
		return (to.CPU - from.CPU) / time.Duration(to.ThrottledIn-from.ThrottledIn)
	}
	full := work()
	if err := g.SetCPU(25); err != nil {
		t.Fatal(err)
	}
	quarter := work()
	if r := float64(quarter) / float64(full); r > 0.6 {
		t.Errorf("a quarter of the quota gave %v a period after %v, a ratio of %.2f, want about 0.25", quarter, full, r)
	}
	if u := usage(t, g); u.Throttled == 0 || u.ThrottledIn > u.Periods {
		t.Errorf("usage %+v, want time throttled, and no more periods of it than there were", u)
	}
	if err := g.SetCPU(0); err != nil {
		t.Fatal(err)
	}
	free := usage(t, g)
	after := wait(t, g, "half a second of work", func(u cgroup.Usage) bool { return u.CPU >= free.CPU+500*time.Millisecond })
	if after.ThrottledIn > free.ThrottledIn+1 {
		t.Errorf("%d periods throttled without a quota, want none", after.ThrottledIn-free.ThrottledIn)
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
	if st := cmd.Wait(); !st.Signaled() {
		t.Errorf("the program ended with %v, want it killed with its group", st)
	}
	if u := usage(t, g); u.CPU < after.CPU {
		t.Errorf("%v used after Remove, want what was used before it, %v at least", u.CPU, after.CPU)
	}
	if err := g.SetCPU(100); !errors.Is(err, cgroup.ErrRemoved) {
		t.Errorf("SetCPU of a removed group: %v, want ErrRemoved", err)
	}
}

// TestProgramAboveItsMemoryLimitIsKilled checks a program that exceeds its memory limit.
func TestProgramAboveItsMemoryLimitIsKilled(t *testing.T) {
	root, s := open(t), spawner(t)
	g := create(t, root, "eats", cgroup.Limits{Memory: 32 << 20})
	cmd, _ := start(t, s, g, "exec dd if=/dev/zero of=/dev/null bs=256M count=1")
	if st := cmd.Wait(); !st.Signaled() {
		t.Errorf("it ended with %v, want it killed", st)
	}
	if u := usage(t, g); u.OOMKills != 1 {
		t.Errorf("usage %+v, want one process killed for memory", u)
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

// TestForkBombEndsWithItsGroup lets a program start as many processes as it can. All must end with
// the group. The program gives up after a while, so that only this test fails if it is not
// contained.
func TestForkBombEndsWithItsGroup(t *testing.T) {
	root, s := open(t), spawner(t)
	g := create(t, root, "bomb", cgroup.Limits{PIDs: 50})
	cmd, out := start(t, s, g, `for i in $(seq 10); do (for j in $(seq 20); do sleep 1000 & done; wait) & done; exec sleep 1000`)
	wait(t, g, "refusals", func(u cgroup.Usage) bool { return u.ForksRefused > 0 })
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
	cmd.Wait()
	for out.Scan() { // to the end: nobody holds the pipe any more
	}
	if err := out.Err(); err != nil && !errors.Is(err, io.EOF) {
		t.Errorf("its output: %v, want its end", err)
	}
	if u := usage(t, g); u.ForksRefused == 0 {
		t.Errorf("usage %+v, want refusals", u)
	}
}

// TestThousandGroupsLeaveNothing creates and removes groups, some with processes and nested groups,
// and checks that nothing is left.
func TestThousandGroupsLeaveNothing(t *testing.T) {
	root, s := open(t), spawner(t)
	for i := range 1000 {
		g := create(t, root, fmt.Sprint("g", i), cgroup.Limits{Memory: 64 << 20, CPUMilli: 500, PIDs: 10})
		var cmd sandbox.Process
		if i%50 == 0 {
			cmd, _ = start(t, s, g, "sleep 1000 & sleep 1000")
		}
		if err := g.Remove(); err != nil {
			t.Fatal(err)
		}
		if cmd != nil {
			cmd.Wait()
		}
	}
	names, err := root.Names()
	if err != nil || len(names) > 0 {
		t.Errorf("left: %v, %v, want nothing", names, err)
	}
}

// TestGroupsOfAnEarlierProcessAreAdopted adopts a group of an earlier Root, and removes unwanted
// ones.
func TestGroupsOfAnEarlierProcessAreAdopted(t *testing.T) {
	root, s := open(t), spawner(t)
	create(t, root, "kept", cgroup.Limits{CPUMilli: 300})
	old := create(t, root, "old", cgroup.Limits{})
	cmd, _ := start(t, s, old, "sleep 1000")

	if _, err := cgroup.Open("test-" + strings.ToLower(t.Name())); err == nil {
		t.Error("a node that is open was opened again")
	}
	if err := root.Close(); err != nil { // as its process's end would
		t.Error(err)
	}
	later, err := cgroup.Open("test-" + strings.ToLower(t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	g, err := later.Adopt("kept")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.SetCPU(200); err != nil {
		t.Error(err)
	}
	usage(t, g)
	if _, err := later.Adopt("never"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("adopting what is not there: %v, want ErrNotExist", err)
	}
	if err := later.Retain([]string{"kept"}); err != nil {
		t.Error(err)
	}
	if names, err := later.Names(); err != nil || !slices.Equal(names, []string{"kept"}) {
		t.Errorf("names %v, %v, want kept alone", names, err)
	}
	if st := cmd.Wait(); !st.Signaled() {
		t.Errorf("the old one's process ended with %v, want it killed", st)
	}
	// A new group replaces an old one with the same name.
	if u := usage(t, create(t, later, "kept", cgroup.Limits{})); u.CPU > time.Second {
		t.Errorf("a new group has used %v already", u.CPU)
	}

	// Another node removes an empty group of a node that no longer exists.
	full := create(t, later, "full", cgroup.Limits{})
	cmd, _ = start(t, s, full, "sleep 1000")
	if err := later.Close(); err != nil {
		t.Error(err)
	}
	other, err := cgroup.Open("test-other")
	if err != nil {
		t.Fatal(err)
	}
	if names, err := later.Names(); err != nil || !slices.Equal(names, []string{"full"}) {
		t.Errorf("groups of a node that is no more: %v, %v, want the full one alone", names, err)
	}
	if err := full.Remove(); err != nil {
		t.Error(err)
	}
	cmd.Wait()
	if err := other.Close(); err != nil {
		t.Error(err)
	}
}

// TestManyNodesOpenAndCloseAtOnce opens and closes nodes concurrently. Each node sweeps and removes
// folders that the nodes share.
func TestManyNodesOpenAndCloseAtOnce(t *testing.T) {
	open(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 30 {
				root, err := cgroup.Open(fmt.Sprint("test-many-", i))
				if err != nil {
					t.Error(err)
					return
				}
				g, err := root.Create("g", cgroup.Limits{PIDs: 5})
				if err != nil {
					t.Error(err)
				} else if err := g.Remove(); err != nil {
					t.Error(err)
				}
				if lacks := root.Lacks(); len(lacks) > 0 {
					t.Errorf("lacks %v, want nothing", lacks)
				}
				if err := root.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestRemoveEndsGroupsWithinGroups removes groups that a privileged replica has created in its own
// group.
func TestRemoveEndsGroupsWithinGroups(t *testing.T) {
	root, s := open(t), spawner(t)
	g := create(t, root, "outer", cgroup.Limits{})
	files, err := g.Files()
	if err != nil {
		t.Fatal(err)
	}
	inner := filepath.Join(filepath.Dir(files[0].Name()), "inner")
	cmd, out := start(t, s, g, fmt.Sprintf("mkdir -p %[1]s/more && echo 0 >%[1]s/more/cgroup.procs && echo in; sleep 1000", inner))
	for _, f := range files {
		_ = f.Close()
	}
	if !out.Scan() || out.Text() != "in" {
		t.Fatalf("it says %q, want that it is in the inner group", out.Text())
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
	cmd.Wait()
	if _, err := os.Stat(inner); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the inner group: %v, want it gone", err)
	}
}

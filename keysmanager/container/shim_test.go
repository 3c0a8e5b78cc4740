package container

import (
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// forgotten makes containerd forget the shims of containers, which run on. As after a kill in the
// middle of a start, there is a shim, a bundle and a state of runc, but no task.
func forgotten(t *testing.T, s *containerdtest.Server, r *Runtime, ids ...string) {
	t.Helper()
	s.Kill()
	back := map[string]string{}
	for _, id := range ids {
		bundle, aside := r.shims.left(id).bundle, filepath.Join(filepath.Dir(s.State), id)
		if err := os.Rename(bundle, aside); err != nil {
			t.Fatal(err)
		}
		back[aside] = bundle
	}
	s.Run()
	for aside, bundle := range back {
		if err := os.Rename(aside, bundle); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		c, err := s.Client(s.Namespace).LoadContainer(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Task(t.Context(), nil); err == nil {
			t.Fatalf("containerd has a task of %s, want none", id)
		}
	}
}

// noFolders waits until containerd and runc have no folders of containers.
func noFolders(t *testing.T, s *containerdtest.Server) {
	t.Helper()
	proctest.Until(t, "no folder is left", func() bool { return len(s.Folders()) == 0 })
}

// TestForgottenShimsAreRemoved has containerd forget shims. They end with the removal of their
// containers, whether they live or were killed.
func TestForgottenShimsAreRemoved(t *testing.T) {
	s := containerdtest.Start(t)
	rootFor(t)
	r := open(t, s)
	defer r.Close()
	p, q, other := start(t, r, sleeper()), start(t, r, rooted()), start(t, r, sleeper())
	if _, err := os.Stat(r.shims.socketOf(q.id)); err != nil {
		t.Error(err)
	}
	forgotten(t, s, r, p.id, q.id)
	for _, shim := range r.shims.left(q.id).shims {
		if err := unix.Kill(shim, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		proctest.Gone(t, shim)
	}
	p.Forget()
	q.Forget()
	for _, gone := range []*process{p, q} {
		proctest.Until(t, "nothing is left of container "+gone.id, func() bool {
			_, err := os.Stat(gone.folder.path)
			return errors.Is(err, os.ErrNotExist) && r.shims.left(gone.id).empty()
		})
		proctest.Gone(t, gone.init)
		if _, err := os.Stat(r.shims.socketOf(gone.id)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket of its shim: %v, want none", err)
		}
	}
	if l := r.shims.left(other.id); len(l.shims) != 1 || l.bundle == "" || l.state == "" {
		t.Errorf("of the other container there is %v, want all", l)
	}
	end(t, other)
	other.Forget()
	nothingLeft(t, s, p.id, q.id, other.id)
	noFolders(t, s)
}

// TestForgottenShimsOfAKilledProcessAreRemoved has containerd forget shims whose owner was killed.
func TestForgottenShimsOfAKilledProcessAreRemoved(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	cmd, pids := actor(t, config(t, s))
	var ids []string
	for _, id := range r.shims.all() {
		ids = append(ids, id)
	}
	if len(ids) != 2 {
		t.Fatalf("shims of %v, want two", ids)
	}
	forgotten(t, s, r, ids...)
	kill(t, cmd, pids[:]...)
	r.Sweep(t.Context())
	nothingLeft(t, s, ids...)
	noFolders(t, s)
}

// TestShimsThatNobodyHasAreRemoved sweeps shims without containers. The shim of a start under way
// has a folder, and that of a container of others has another kind of id.
func TestShimsThatNobodyHasAreRemoved(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	lost, starting := start(t, r, sleeper()), start(t, r, sleeper())
	forgotten(t, s, r, lost.id, starting.id)
	for _, p := range []*process{lost, starting} {
		c, err := s.Client(s.Namespace).LoadContainer(t.Context(), p.id)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := lost.folder.remove(); err != nil {
		t.Fatal(err)
	}
	before := r.shims.left(starting.id)
	r.Sweep(t.Context())
	if l := r.shims.left(lost.id); !l.empty() {
		t.Errorf("%v is left of the shim that nobody has", l)
	}
	if l := r.shims.left(starting.id); !slices.Equal(l.shims, before.shims) || len(l.shims) != 1 || l.bundle == "" || l.state == "" {
		t.Errorf("%v is left of the shim with a folder, want %v", l, before)
	}
	for id, want := range map[string]bool{lost.id: true, starting.id: false, "redis": false} {
		if got, err := unowned(t.Context(), r.client, id); err != nil || got != want {
			t.Errorf("%s: nobody has it: %v, %v, want %v", id, got, err, want)
		}
	}
	end(t, starting)
	starting.Forget()
	nothingLeft(t, s, lost.id, starting.id)
	noFolders(t, s)
}

// fakeShim starts a program with the name and arguments of a shim, which has a child.
func fakeShim(t *testing.T, cfg Config, id string, outer ...string) (shim, child int) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "containerd-shim-fake-v1")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nsleep 600 &\necho\nwait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	line := slices.Concat(outer, []string{program, "-namespace", cfg.Namespace, "-id", id, "-address", cfg.Address})
	cmd := exec.CommandContext(t.Context(), line[0], line[1:]...)
	cmd.Cancel = func() error { // kills what a test has left
		for _, pid := range append(childrenOf(shim), child, shim) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return cmd.Process.Kill()
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }() // the cleanup waits for it
	t.Cleanup(func() { <-ended })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	shim = cmd.Process.Pid
	if len(outer) > 0 {
		shim = childrenOf(shim)[0]
	}
	return shim, childrenOf(shim)[0]
}

// TestOnlyTheShimOfAContainerIsKilled removes a container of a runtime other than runc. Shims of
// others stay, and so does a program of a function that looks like a shim.
func TestOnlyTheShimOfAContainerIsKilled(t *testing.T) {
	const id = "ocr-openfaas-fn-abcdefghijkl"
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	cfg := Config{Address: filepath.Join(dir, "c.sock"), Namespace: "of-a-test", Log: slog.New(slog.DiscardHandler)}
	if err := errors.Join(os.WriteFile(cfg.Address, nil, 0o600), os.Symlink(dir, link)); err != nil {
		t.Fatal(err)
	}
	inOther, atOther := cfg, cfg
	inOther.Namespace, atOther.Address = "of-others", filepath.Join(dir, "others.sock")
	others := map[string]int{}
	others["in another namespace"], _ = fakeShim(t, inOther, id)
	others["of another containerd"], _ = fakeShim(t, atOther, id)
	others["of another container"], _ = fakeShim(t, cfg, id[:len(id)-1]+"m")
	others["in a container"], _ = fakeShim(t, cfg, id, "unshare", "--pid", "--fork")
	shim, child := fakeShim(t, cfg, id)
	cfg.Address = filepath.Join(link, "c.sock")
	s, scans := newShims(cfg), 0
	s.scan = func() map[int]string { scans++; return s.all() }
	if err := s.remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	if scans > 3 { // at first, before the kill and after it
		t.Errorf("all processes were read %d times, want 3", scans)
	}
	proctest.Gone(t, shim)
	proctest.Gone(t, child)
	for which, pid := range others {
		if startOf(pid) == "" {
			t.Errorf("the shim %s is killed", which)
		}
	}
}

// TestKilledContainerdLeavesNoShim kills containerd in the middle of a start: while the shim
// starts, and while runc makes the container. runc then fails, as if it was killed, too.
func TestKilledContainerdLeavesNoShim(t *testing.T) {
	for name, slow := range map[string]func(t *testing.T) (gate string){
		"shim": slowShims,
		"runc": func(t *testing.T) string { return slowly(t, "runc", "create", "$PROGRAM \"$@\"; cat $GATE; exit 1") },
	} {
		t.Run(name, func(t *testing.T) {
			gate := slow(t)
			s := containerdtest.Start(t)
			r := open(t, s)
			defer r.Close()
			failed := startLate(t.Context(), r)
			held := openGate(t, gate)
			s.Kill()
			if err := errors.Join(os.Remove(gate), held.Close()); err != nil { // it goes on
				t.Fatal(err)
			}
			if err := within(t, "the end of the start", failed); err == nil {
				t.Error("the start succeeds")
			}
			s.Run()
			nothingLeft(t, s)
			noFolders(t, s)
		})
	}
}

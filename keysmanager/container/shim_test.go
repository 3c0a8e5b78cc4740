package container

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// forgotten makes containerd forget the shim of a container, which runs on with the container: as
// after a kill in the middle of a start, there is a shim, a bundle and a state of runc, but no task.
func forgotten(t *testing.T, s *containerdtest.Server, r *Runtime, ids ...string) {
	t.Helper()
	s.Kill()
	hidden := func(id string) (bundle, aside string) {
		bundle = r.shims.left(id).bundle
		if bundle == "" {
			t.Fatalf("container %s has no bundle", id)
		}
		return bundle, filepath.Join(filepath.Dir(s.State), id)
	}
	back := map[string]string{}
	for _, id := range ids {
		bundle, aside := hidden(id)
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
		if got, err := r.unowned(t.Context(), id); err != nil || got != want {
			t.Errorf("%s: nobody has it: %v, %v, want %v", id, got, err, want)
		}
	}
	end(t, starting)
	starting.Forget()
	nothingLeft(t, s, lost.id, starting.id)
	noFolders(t, s)
}

// TestKilledContainerdLeavesNoShim kills containerd while a shim starts. The shim goes on.
func TestKilledContainerdLeavesNoShim(t *testing.T) {
	gate := slowShims(t)
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	failed := startLate(t.Context(), r)
	shim, err := os.OpenFile(gate, os.O_WRONLY, 0) // returns when the shim begins
	if err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if err := errors.Join(os.Remove(gate), shim.Close()); err != nil { // it goes on, and others do not wait
		t.Fatal(err)
	}
	if err := within(t, "the end of the start", failed); err == nil {
		t.Error("the start succeeds")
	}
	s.Run()
	nothingLeft(t, s)
	noFolders(t, s)
}

package resources

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// fakeGroups records what is done with cgroups. Package keysmanager tests the machine's.
type fakeGroups struct{ calls []string }

func (g *fakeGroups) note(format string, args ...any) {
	g.calls = append(g.calls, fmt.Sprintf(format, args...))
}

// Create implements Groups.
func (g *fakeGroups) Create(name, _ string, _ Limits) (Group, error) {
	g.note("create %s", name)
	return &fakeGroup{g, name}, nil
}

// Adopt implements Groups.
func (g *fakeGroups) Adopt(name string) (Group, error) {
	g.note("adopt %s", name)
	return &fakeGroup{g, name}, nil
}

// Retain implements Groups.
func (g *fakeGroups) Retain(names []string) error { g.note("retain %v", names); return nil }

type fakeGroup struct {
	all  *fakeGroups
	name string
}

func (g *fakeGroup) Files() ([]*os.File, error) { return nil, nil }
func (g *fakeGroup) Enforce(int) error          { return nil }
func (g *fakeGroup) SetCPU(int) error           { return nil }
func (g *fakeGroup) Usage() (GroupUsage, error) { return GroupUsage{CPU: time.Second}, nil }
func (g *fakeGroup) Remove() error              { g.all.note("remove %s", g.name); return nil }

func newPool(t *testing.T) (*Pool, *fakeGroups) {
	t.Helper()
	g := &fakeGroups{}
	return NewPool(Config{
		Groups: g, Devices: func() []Device { return []Device{{ID: "GPU-a", Memory: 10 * gib}} },
		Log: slog.New(slog.DiscardHandler), Output: func(string, string, string, string) {},
	}), g
}

// TestReleaseFreesEverythingOnce calls Release twice. The device memory is freed, the cgroup that
// the replica took over from a child is removed once, and the replica's usage is counted once.
func TestReleaseFreesEverythingOnce(t *testing.T) {
	t.Parallel()
	p, g := newPool(t)
	r, err := p.Reserve("r", "f", "GPU-a", 8*gib, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Reserve("s", "f", "GPU-a", 8*gib, nil); !errors.Is(err, ErrDevice) {
		t.Errorf("a second reservation of 8 of 10 GiB: %v, want %v", err, ErrDevice)
	}
	child := p.New()
	if _, err := child.Enter("child", "f", Limits{}); err != nil {
		t.Fatal(err)
	}
	r.Take(child, 0)
	child.Release()
	if r.Group() == nil || r.Group().ID() != "child" || len(g.calls) != 1 {
		t.Errorf("group %+v after %q, want the child's, which is not removed", r.Group(), g.calls)
	}
	for range 2 {
		r.Release()
	}
	if want := []string{"create child", "remove child"}; !slices.Equal(g.calls, want) {
		t.Errorf("cgroups: %q, want %q", g.calls, want)
	}
	if d := p.Devices(nil)[0]; d.Reserved != 0 || d.Free != 10*gib || len(d.Replicas) != 0 {
		t.Errorf("device %+v, want all of it free", d)
	}
	if got := p.Used(nil, nil)["f"]; got.CPU != time.Second {
		t.Errorf("used %+v, want one second, once", got)
	}
	if p.Forget("f"); len(p.Used(nil, nil)) != 0 {
		t.Errorf("used %v, want nothing: no replica of the function is left", p.Used(nil, nil))
	}
}

// TestAnotherCgroupReplacesTheFirst checks that the first cgroup is removed, so that a repeated
// start leaves no cgroup behind.
func TestAnotherCgroupReplacesTheFirst(t *testing.T) {
	t.Parallel()
	p, g := newPool(t)
	r, err := p.Reserve("r", "f", "", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"one", "two"} {
		child := p.New()
		if _, err := child.Enter(id, "f", Limits{}); err != nil {
			t.Fatal(err)
		}
		r.Take(child, 0)
	}
	if _, err := r.Enter("three", "f", Limits{}); err != nil {
		t.Fatal(err)
	}
	r.Release()
	if want := []string{"create one", "create two", "remove one", "remove two", "create three", "remove three"}; !slices.Equal(g.calls, want) {
		t.Errorf("cgroups: %q, want %q", g.calls, want)
	}
}

// TestEndsReachTheGoroutineThatAwaitsThem also has ends that came before, during an adoption.
func TestEndsReachTheGoroutineThatAwaitsThem(t *testing.T) {
	t.Parallel()
	var e Ends
	e.BeginAdoption()
	e.Left([]warden.Kept{{Name: "a", Ended: true, PID: 1}, {Name: "b", PID: 2}})
	e.Tell(warden.Exit{Name: "c", PID: 3})
	for name, pid := range map[string]int{"a": 1, "c": 3} {
		if got := <-e.Await(name); got.PID != pid {
			t.Errorf("%s: process %d, want %d", name, got.PID, pid)
		}
	}
	b := e.Await("b")
	e.EndAdoption()
	e.Tell(warden.Exit{Name: "d", PID: 4}) // nobody awaits it
	d := e.Await("d")
	e.Tell(warden.Exit{Name: "b", PID: 2})
	if got := <-b; got.PID != 2 || len(d) > 0 {
		t.Errorf("b: process %d, and %d ends of d, want 2 and none: d ended before it was awaited", got.PID, len(d))
	}
	e.Cancel("d")
	e.Tell(warden.Exit{Name: "d", PID: 4})
	if len(d) > 0 {
		t.Error("the end of d was told after it was cancelled")
	}
}

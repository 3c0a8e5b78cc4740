package resources

import (
	"testing"
	"time"
)

// TestMemoryThatForksHaveChangedCounts has replicas whose resident memory looks as if they had
// changed all pages of their zygote. Later they really change all pages.
func TestMemoryThatForksHaveChangedCounts(t *testing.T) {
	f := &faker{own: map[int]int64{1: 900, 2: 900, 3: 900, 5: 600}, all: map[int]int64{1: 300, 2: 300, 3: 320}}
	s := NewScale(f, 2000)
	z, idle := Parent{Entry: "z", PID: 1, Bytes: 1000}, Parent{Entry: "idle", PID: 5, Bytes: 700}
	both, one := []Copied{{2, -1}, {3, -1}}, []Copied{{2, -1}}
	check := func(what string, forks []Copied, want int64, beside ...Family) {
		t.Helper()
		all := append(beside, Family{Of: z, Replicas: forks}, Family{Replicas: []Copied{{4, 50}}})
		got := int64(0)
		for i := range all {
			all[i].weigh(f)
			got += all[i].seems
		}
		if got += s.beyond(all); got != want {
			t.Errorf("%s: %d bytes, want %d", what, got, want)
		}
	}
	check("nothing changed", both, 1050)
	if s.exact.next.IsZero() {
		t.Error("the next exact look may be at once")
	}
	s.exact.next = time.Now().Add(time.Hour)
	f.all = map[int]int64{1: 900, 2: 900, 3: 900, 5: 700}
	check("a moment later", both, 1050)
	s.exact.next = time.Time{}
	check("all changed", both, 3450, Family{Of: idle})
	s.exact.next = time.Now().Add(time.Hour)
	check("another one was evicted a moment ago", both, 2750)
	check("and a replica has ended", one, 1950)
	check("and the other one", nil, 1050)
}

// TestLibrariesAreNotParameters checks which of a zygote's mapped files count as memory that must
// stay: its parameters, but not its libraries.
func TestLibrariesAreNotParameters(t *testing.T) {
	f := &faker{own: map[int]int64{1: 100}, files: map[int]int64{1: 500}}
	for bytes, want := range map[int64]int64{90: 0, 430: 330, 900: 500} {
		if got := (&Family{Of: Parent{Entry: "z", PID: 1, Bytes: bytes}}).weigh(f); got != want {
			t.Errorf("of %d bytes %d are mapped, want %d", bytes, got, want)
		}
	}
}

// faker is a Meter of processes that do not exist.
type faker struct {
	Meter
	own, files, all map[int]int64
}

func (f *faker) Resident(pid int) (anonymous, files int64) { return f.own[pid], f.files[pid] }

func (f *faker) Exact(pid int) (int64, error) { return f.all[pid], nil }

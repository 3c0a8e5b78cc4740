package keysmanager

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/sandbox"
)

func TestEvict(t *testing.T) {
	k := func(s string) zygoteKey { return zygoteKey{digest: s} }
	all := []cached{
		{k("old key"), 40, false, true}, {k("busy"), 40, true, false}, {k("older"), 10, false, false}, {k("newer"), 30, false, false},
	}
	for limit, want := range map[int64][]string{
		120: nil,
		119: {"older"},
		110: {"older"},
		109: {"older", "newer"},
		79:  {"older", "newer", "old key"},
		0:   {"older", "newer", "old key"}, // what is busy stays
	} {
		var got []string
		for _, e := range evict(all, limit) {
			got = append(got, e.digest)
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: evicted %q, want %q", limit, got, want)
		}
	}
}

func TestRoom(t *testing.T) {
	all := []cached{{bytes: 10}, {bytes: 20, busy: true}, {bytes: 30, keep: true}}
	for name, tc := range map[string]struct {
		bytes int64
		keep  bool
		limit int64
		want  bool
	}{
		"free memory":                   {40, false, 100, true},
		"one byte short":                {41, false, 100, false},
		"a key stage takes idle ones'":  {50, true, 100, true},
		"but no busy or key one's":      {51, true, 100, false},
		"of unknown size, and room":     {0, false, 60, true},
		"of unknown size, and no room":  {0, false, 59, false},
		"nothing is there, and too big": {101, true, 100, false},
	} {
		given := all
		if strings.HasPrefix(name, "nothing") {
			given = nil
		}
		if got := room(given, tc.bytes, tc.keep, tc.limit); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestBackoff(t *testing.T) {
	for n, want := range map[int]time.Duration{0: 0, 1: 500 * time.Millisecond, 3: 2 * time.Second, 100: 30 * time.Second} {
		if got := backoff(n); got != want {
			t.Errorf("backoff(%d) = %v, want %v", n, got, want)
		}
	}
}

// TestALongLifeIsNoFailureInARow has zygotes that end after their fifth failure in a row.
func TestALongLifeIsNoFailureInARow(t *testing.T) {
	m := &Manager{cfg: Config{Log: slog.New(slog.DiscardHandler)}}
	for name, tc := range map[string]struct {
		life time.Duration
		want int
	}{
		"soon after it was loaded": {time.Second, 6},
		"after a long life":        {time.Hour, 1},
	} {
		s := &slot{fails: 5, zygote: &zygote{loaded: time.Now().Add(-tc.life), died: "killed"}}
		m.mourn(zygoteKey{}, s)
		if s.fails != tc.want || s.zygote != nil {
			t.Errorf("%s: %d failures in a row, want %d", name, s.fails, tc.want)
		}
	}
}

func TestIdleZygotesGoWhenMemoryIsShort(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Memory = 1 }) // everything is too much
	n.start("a", withModel)
	if z := n.Inventory().Zygotes; len(z) != 1 {
		t.Fatalf("a zygote with a replica was evicted: %+v", z)
	}
	if err := n.Stop(t.Context(), "a", time.Second); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, 10*time.Second, "the idle zygote to be evicted", func() bool { return len(n.Inventory().Zygotes) == 0 })
}

func TestWarmLoadsAhead(t *testing.T) {
	n := newNode(t, nil)
	broken, gone := withModel, withModel
	broken.Function, broken.Namespace, broken.Env = "broken.b", "b", map[string]string{"STAGECOACH_MODEL": "nosuch.onnx"}
	gone.Function, gone.Image = "gone.ns", "test/nosuch:1"
	wanted := []Wanted{{Spec: gone}, {Spec: broken}, {Spec: Spec{Function: "none.ns", Image: "test/wait:1"}}, {Spec: withModel, Key: true}}
	for range 3 {
		err := n.Warm(t.Context(), wanted)
		for _, want := range []string{`warm "gone.ns"`, `warm "broken.b"`} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want an error with %q", err, want)
			}
		}
	}
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Function != "f.ns" || inv.Hits+inv.Misses != 0 {
		t.Errorf("inventory %+v, want f.ns's zygote and neither hits nor misses", inv)
	}
	if len(inv.Failures) != 1 || inv.Failures[0].Function != "broken.b" || inv.Failures[0].Count < 1 || !strings.Contains(inv.Failures[0].Cause, "nosuch.onnx") {
		t.Errorf("failures %+v, want broken.b's", inv.Failures)
	}
	if r := n.start("a", withModel); r.Path != PathHeap {
		t.Errorf("path %s, want fork", r.Path)
	}
}

// countingImages counts how often each image is looked at.
type countingImages struct {
	Images
	looks map[string]int
}

func (c countingImages) Resolve(image string) (sandbox.Image, error) {
	c.looks[image]++
	return c.Images.Resolve(image)
}

// TestWarmLooksSeldom: what is told every second is not read from the disk as often, unless it could not be read.
func TestWarmLooksSeldom(t *testing.T) {
	looks := map[string]int{}
	n := newNode(t, func(c *Config) { c.Images = countingImages{c.Images, looks} })
	twin, gone := withModel, withModel
	twin.Function, gone.Function, gone.Image = "twin.ns", "gone.ns", "test/nosuch:1"
	for range 3 {
		_ = n.Warm(t.Context(), []Wanted{{Spec: withModel}, {Spec: twin}, {Spec: gone}}) // gone's error
	}
	if looks[withModel.Image] != 1 || looks[gone.Image] != 3 {
		t.Errorf("looked %v, want once at what is there and each time at what is not", looks)
	}
	if _ = n.Warm(t.Context(), nil); len(n.looked) != 0 {
		t.Errorf("%v are remembered, want none that nobody wants", n.looked)
	}
}

func TestWarmIsNoUse(t *testing.T) {
	n := newNode(t, nil)
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	both := []Wanted{{Spec: withModel}, {Spec: other}}
	if err := n.Warm(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	n.start("a", withModel) // the last to be used
	if err := n.Warm(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	if oldest, _, _ := n.slots.GetOldest(); oldest.namespace != "other" {
		t.Errorf("least recently used is %q's, want other's", oldest.namespace)
	}
}

// TestWarmEndsInPeace has memory for one zygote and two that are wanted.
func TestWarmEndsInPeace(t *testing.T) {
	n := newNode(t, nil)
	if err := n.Warm(t.Context(), []Wanted{{Spec: withModel}}); err != nil {
		t.Fatal(err)
	}
	bytes := n.Inventory().Zygotes[0].Bytes
	n.Close()

	n = newNode(t, func(c *Config) { c.Memory = int64(1.2 * float64(bytes) / Threshold) })
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	warm := func(key bool) Inventory {
		t.Helper()
		if err := n.Warm(t.Context(), []Wanted{{Spec: withModel, Key: key}, {Spec: other}}); err != nil {
			t.Fatal(err)
		}
		return n.Inventory()
	}
	first := warm(false)
	if len(first.Zygotes) != 1 || first.Evictions != 1 {
		t.Fatalf("%+v, want one zygote and one eviction", first)
	}
	for range 3 {
		if inv := warm(false); inv.Evictions != 1 || inv.Zygotes[0].PID != first.Zygotes[0].PID {
			t.Fatalf("%+v, want the zygote that was there", inv)
		}
	}
	for range 3 {
		if inv := warm(true); inv.Evictions != 2 || inv.Zygotes[0].Function != "f.ns" {
			t.Fatalf("%+v, want the key stage's zygote", inv)
		}
	}
	if r := n.start("a", other); r.Path != PathHeap || phase(r, "load") == 0 { // who needs one gets it
		t.Errorf("path %s with phases %v, want one that was loaded", r.Path, r.Phases)
	}
}

func TestForgottenZygotesGoWithTheirReplicas(t *testing.T) {
	n := newNode(t, nil)
	n.answers(n.start("a", withModel))
	z := n.zygote()
	n.Forget("f.ns")
	if len(n.Inventory().Zygotes) != 1 {
		t.Error("a zygote with a replica has gone")
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, z)
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || inv.Evictions != 0 {
		t.Errorf("%+v, want nothing, and no eviction", inv)
	}
}

package study

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// open opens a store whose file is closed at the end of the test.
func open(t *testing.T, path, version string) *Store {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s, err := NewStore(f, version)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// countedStudy returns the small study, with more, and counts the cells that are simulated in n.
func countedStudy(n *atomic.Int64) *Study {
	s, more := small(), small()
	more.Contenders = more.Contenders[:2]
	for i := range more.Settings {
		more.Settings[i].Name, more.Settings[i].Group = "more "+more.Settings[i].Name, "more "+more.Settings[i].Group
	}
	more.Test.N, s.More = 2, more
	for _, x := range []*Study{s, more} {
		x.Candidates = 2
		for i := range x.Contenders {
			apply := x.Contenders[i].Apply
			x.Contenders[i].Apply = func(sc sim.Scenario, k []float64) sim.Scenario {
				n.Add(1) // once per cell
				return apply(sc, k)
			}
		}
	}
	return s
}

// TestStoppedStudyGoesOn stops a study after some runs, and goes on with the runs of the file. The
// result must be that of a study that was never stopped. A third time, nothing is simulated.
func TestStoppedStudyGoesOn(t *testing.T) {
	var n atomic.Int64
	whole := run2(t, countedStudy(&n))
	path := filepath.Join(t.TempDir(), "runs.jsonl")
	with := func(s *Study, store *Store) *Study {
		s.Store, s.More.Store = store, store
		return s
	}
	ctx, stop := context.WithCancel(t.Context())
	store := open(t, path, "v1")
	_, err := with(countedStudy(&n), store).Tune(ctx, nil, func(p Progress) {
		if p.Done == 7 {
			stop()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("stopped: %v", err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(`{"key":"torn","run":{"requ`)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	store = open(t, path, "v1")
	if got := run2(t, with(countedStudy(&n), store)); !reflect.DeepEqual(got, whole) {
		t.Error("a study that went on has another result than one that was not stopped")
	}
	if store.Found() < 7 {
		t.Errorf("%d runs were found, want the 7 made before", store.Found())
	}
	n.Store(0)
	if got := run2(t, with(countedStudy(&n), open(t, path, "v1"))); !reflect.DeepEqual(got, whole) || n.Load() > 0 {
		t.Errorf("with all runs stored, %d cells were simulated, want none, and the same result", n.Load())
	}
	store = open(t, path, "v2")
	if run2(t, with(countedStudy(&n), store)); n.Load() == 0 || store.Found() > 0 {
		t.Errorf("another program: %d runs were found, %d cells simulated; want none found", store.Found(), n.Load())
	}
}

// TestKeysAreOfAllThatMatters checks that a run has another key if anything differs on which its
// figures depend.
func TestKeysAreOfAllThatMatters(t *testing.T) {
	s := small()
	s.Store = &Store{version: "v"}
	key := func(change func(s *Study, c *cell), seed uint64) string {
		x := *s
		set, con := s.Settings[0], s.Contenders[0]
		c := &cell{setting: &set, contender: &con, knobs: []float64{1, 0}}
		change(&x, c)
		k, err := x.key(c, seed)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	same := func(*Study, *cell) {}
	want := key(same, 1)
	if key(same, 1) != want {
		t.Error("equal runs have different keys")
	}
	for name, got := range map[string]string{
		"seed":      key(same, 2),
		"version":   key(func(s *Study, _ *cell) { s.Store = &Store{version: "w"} }, 1),
		"study":     key(func(s *Study, _ *cell) { s.Name = "x" }, 1),
		"multiples": key(func(s *Study, _ *cell) { s.Multiples = []float64{2} }, 1),
		"setting":   key(func(_ *Study, c *cell) { c.setting.Name = "x" }, 1),
		"duration": key(func(_ *Study, c *cell) {
			of := c.setting.Scenario
			c.setting.Scenario = func(train bool) sim.Scenario { x := of(train); x.Duration *= 2; return x }
		}, 1),
		"contender": key(func(_ *Study, c *cell) { c.contender.Name = "x" }, 1),
		"knobs":     key(func(_ *Study, c *cell) { c.knobs = []float64{1, 1} }, 1),
		"train":     key(func(_ *Study, c *cell) { c.train = true }, 1),
	} {
		if got == want {
			t.Errorf("another %s, and the same key", name)
		}
	}
}

// TestStoreRefusesWhatItDidNotWrite checks that a complete line that is no run is an error, and
// that the file stays as it is.
func TestStoreRefusesWhatItDidNotWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runs.jsonl")
	text := []byte("{\"key\":\"a\"}\n")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := NewStore(f, "v"); err == nil || !strings.Contains(err.Error(), "line 1") {
		t.Errorf("got %v, want an error that names the line", err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(after, text) {
		t.Errorf("the file became %q", after)
	}
}

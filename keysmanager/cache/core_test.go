package cache

import (
	"slices"
	"testing"
	"time"
)

// held is an entry for a test's cache. Its Key is its name.
type held struct {
	name     string
	bytes    int64
	busy     bool
	keyStage bool
}

// cacheOf returns a cache that holds entries, the first the least recently used.
func cacheOf(all ...held) *Core[string] {
	c := New[string]()
	var keyStages []string
	for _, e := range all {
		c.Step(epoch, Loaded[string]{e.name, e.bytes})
		u := Using[string]{Key: e.name, Wanted: true}
		if e.busy {
			u.Replicas = 1
		}
		c.Step(epoch, u)
		if e.keyStage {
			keyStages = append(keyStages, e.name)
		}
	}
	c.Step(epoch, Mark[string]{keyStages})
	return c
}

// evicted returns the entries that effects evict, in order, and those effects that are no Evict.
func evicted(fx []Effect, why Reason) (names []string, others []Effect) {
	for _, e := range fx {
		if v, ok := e.(Evict[string]); ok && v.Why == why {
			names = append(names, v.Key)
		} else {
			others = append(others, e)
		}
	}
	return names, others
}

// limit is one bound, with a threshold of the given bytes.
func limit(threshold, used int64) []Bound { return []Bound{{"own", threshold * 100 / 85, used}} }

func TestPressureEvictsDownToTheCalm(t *testing.T) {
	t.Parallel()
	all := []held{{"old key", 400, false, true}, {"busy", 400, true, false}, {"older", 100, false, false}, {"newer", 300, false, false}}
	for name, tc := range map[string]struct {
		bounds  []Bound
		pressed bool
		want    []string
		still   bool
	}{
		"below the threshold":             {[]Bound{{"a", 1000, 850}}, false, nil, false},
		"one byte above it":               {[]Bound{{"a", 1000, 851}}, false, []string{"older"}, false},
		"down to the calm":                {[]Bound{{"a", 1000, 901}}, false, []string{"older", "newer"}, false},
		"key stages last":                 {[]Bound{{"a", 1000, 1201}}, false, []string{"older", "newer", "old key"}, false},
		"busy entries stay":               {[]Bound{{"a", 1000, 2000}}, false, []string{"older", "newer", "old key"}, true},
		"the tightest bound counts":       {[]Bound{{"a", 9000, 851}, {"b", 1000, 851}, {"c", 2000, 1}}, false, []string{"older"}, false},
		"each bound comes to its calm":    {[]Bound{{"a", 1000, 851}, {"b", 1000, 840}}, false, []string{"older"}, false},
		"once begun, it ends at the calm": {[]Bound{{"a", 1000, 801}}, true, []string{"older"}, false},
		"and not below":                   {[]Bound{{"a", 1000, 800}}, true, nil, false},
		"without bounds there is no end":  {nil, true, nil, false},
		"a bound of nothing takes all":    {[]Bound{{"a", 0, 1}}, false, []string{"older"}, false},
	} {
		c := cacheOf(all...)
		c.pressed = tc.pressed
		got, others := evicted(c.Step(epoch, Weighed{tc.bounds}), Pressure)
		if !slices.Equal(got, tc.want) || c.pressed != tc.still || len(others) > 0 {
			t.Errorf("%s: evicted %q, still short %v, and %+v; want %q, %v and nothing", name, got, c.pressed, others, tc.want, tc.still)
		}
	}
}

func TestPressureNamesTheBound(t *testing.T) {
	t.Parallel()
	c := cacheOf(held{name: "a", bytes: 100})
	want := []Effect{Evict[string]{Key: "a", Why: Pressure, Bound: "machine"}}
	if got := c.Step(epoch, Weighed{[]Bound{{"own", 1000, 800}, {"machine", 1000, 851}}}); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestALoadTakesThePlaceOfIdleEntries(t *testing.T) {
	t.Parallel()
	all := []held{{"key", 30, false, true}, {"busy", 40, true, false}, {"idle", 20, false, false}}
	for name, tc := range map[string]struct {
		bounds  []Bound
		coming  int64
		bytes   int64
		want    []string
		missing int64
	}{
		"it fits":                      {limit(850, 90), 0, 760, nil, 0},
		"an idle entry gives way":      {limit(850, 90), 0, 761, []string{"idle"}, 0},
		"then that of a key stage":     {limit(850, 90), 0, 781, []string{"idle", "key"}, 0},
		"none, if all are not enough":  {limit(850, 90), 0, 811, nil, 1},
		"loads under way count":        {limit(850, 90), 760, 1, []string{"idle"}, 0},
		"other processes have it all":  {limit(850, 1000), 0, 10, nil, 110},
		"without bounds anything fits": {nil, 0, 1 << 50, nil, 0},
	} {
		c := cacheOf(all...)
		if tc.coming > 0 {
			c.Step(epoch, Hold[string]{"other"})
			c.Step(epoch, Want[string]{Key: "other", Bytes: tc.coming, Bounds: tc.bounds})
		}
		c.Step(epoch, Hold[string]{"new"})
		got, others := evicted(c.Step(epoch, Want[string]{Key: "new", Bytes: tc.bytes, Bounds: tc.bounds}), Room)
		want := Effect(Load[string]{"new"})
		if tc.missing > 0 {
			want = Refuse[string]{"new", tc.missing}
		}
		if !slices.Equal(got, tc.want) || !slices.Equal(others, []Effect{want}) {
			t.Errorf("%s: evicted %q and %+v, want %q and %+v", name, got, others, tc.want, want)
		}
	}
}

func TestParkedChildrenGoBeforeEntries(t *testing.T) {
	t.Parallel()
	parked := Using[string]{Key: "a", Parked: 2, Wanted: true}
	c := cacheOf(held{name: "a", bytes: 50})
	c.Step(epoch, parked)
	c.Step(epoch, Hold[string]{"b"})
	w := Want[string]{Key: "b", Bytes: 30, Bounds: limit(100, 79)}
	if got := c.Step(epoch, w); !slices.Equal(got, []Effect{Unpark{}}) {
		t.Errorf("for a load: %+v, want that children go first", got)
	}
	w.Freed = 10
	if got := c.Step(epoch, w); !slices.Equal(got, []Effect{Load[string]{"b"}}) {
		t.Errorf("with what they gave back: %+v, want the load and no eviction", got)
	}
	c.Step(epoch, parked)
	over := Weighed{limit(100, 101)}
	if got := c.Step(epoch, over); !slices.Equal(got, []Effect{Unpark{}}) {
		t.Errorf("under pressure: %+v, want that children go first", got)
	}
	if got, _ := evicted(c.Step(epoch, over), Pressure); !slices.Equal(got, []string{"a"}) {
		t.Errorf("still under pressure: %q, want a", got)
	}
}

func TestRoomAheadOfNeedSparesBusyAndKeyStageEntries(t *testing.T) {
	t.Parallel()
	all := []held{{"idle", 10, false, false}, {"busy", 20, true, false}, {"key", 30, false, true}}
	for name, tc := range map[string]struct {
		bounds   []Bound
		pressed  bool
		calm     time.Duration
		bytes    int64
		keyStage bool
		want     bool
	}{
		"free memory":                     {limit(850, 60), false, 0, 790, false, true},
		"one byte short":                  {limit(850, 60), false, 0, 791, false, false},
		"a key stage takes idle ones'":    {limit(850, 60), false, 0, 800, true, true},
		"but no busy or key one's":        {limit(850, 60), false, 0, 801, true, false},
		"of unknown size, and room":       {limit(850, 850), false, 0, 0, false, true},
		"of unknown size, and no room":    {limit(850, 851), false, 0, 0, false, false},
		"memory is short":                 {limit(850, 0), true, 0, 1, true, false},
		"it was short a moment ago":       {limit(850, 0), false, 1, 1, true, false},
		"it was short ten seconds before": {limit(850, 0), false, -1, 1, true, true},
	} {
		c := cacheOf(all...)
		c.pressed, c.calm = tc.pressed, epoch.Add(tc.calm)
		if got := c.Room(epoch, tc.bounds, tc.bytes, tc.keyStage); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestBackoffDoublesUpToThirtySeconds(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]time.Duration{0: 0, 1: 500 * time.Millisecond, 3: 2 * time.Second, 100: 30 * time.Second} {
		if got := Backoff(n); got != want {
			t.Errorf("Backoff(%d) = %v, want %v", n, got, want)
		}
	}
}

// TestEarlyEndsBackOffWithoutCountingAsFailedLoads ends an entry that has already ended early five
// times.
func TestEarlyEndsBackOffWithoutCountingAsFailedLoads(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		lived, wait time.Duration
		ends        int
	}{
		"soon":              {time.Second, lastBackoffOfEnds, 6},
		"after a long life": {time.Hour, 0, 1},
	} {
		c := cacheOf(held{name: "a", bytes: 1})
		c.entries["a"].ends = 5
		c.Step(epoch, Ended[string]{"a", tc.lived})
		e, _ := c.Get("a")
		if want := (Entry{Ends: tc.ends, Retry: epoch.Add(tc.wait)}); e != want {
			t.Errorf("%s: %+v, want %+v", name, e, want)
		}
		fx := c.Step(epoch, Want[string]{Key: "a", Bytes: 1})
		want := Effect(Load[string]{"a"})
		if tc.wait > 0 {
			want = Wait[string]{"a", epoch.Add(tc.wait)}
		}
		if !slices.Equal(fx, []Effect{want}) {
			t.Errorf("%s: %+v, want %+v", name, fx, want)
		}
	}
}

// TestInvalidateCancelsTheLoad invalidates an entry during its load. The core cancels the load, and
// reports Settled once, when the last order releases the entry. If the load succeeds all the same,
// the core discards its result. A new entry can then load.
func TestInvalidateCancelsTheLoad(t *testing.T) {
	t.Parallel()
	c := New[string]()
	step := func(ev Event, want ...Effect) {
		t.Helper()
		if got := c.Step(epoch, ev); !slices.Equal(got, want) {
			t.Errorf("%T%+v: %+v, want %+v", ev, ev, got, want)
		}
	}
	step(Hold[string]{"v1"})
	step(Hold[string]{"v1"})
	step(Want[string]{Key: "v1", Bytes: 5}, Load[string]{"v1"})
	step(Invalidate[string]{"v1"}, Cancel[string]{"v1"})
	step(Release[string]{"v1"})
	step(Release[string]{"v1"}, Settled[string]{"v1"})
	step(Invalidate[string]{"v1"})
	step(Hold[string]{"v1"})
	step(Release[string]{"v1"}) // it has settled before
	step(Weighed{})
	step(Loaded[string]{"v1", 5}, Discard[string]{"v1"})
	step(Want[string]{Key: "v1", Bytes: 5})
	step(Weighed{}, Forget[string]{"v1"})
	step(Hold[string]{"v2"})
	step(Want[string]{Key: "v2", Bytes: 5}, Load[string]{"v2"})
}

// TestTimeDoesNotGoBack checks that a step whose time is before that of an earlier step happens at
// the later time.
func TestTimeDoesNotGoBack(t *testing.T) {
	t.Parallel()
	c := cacheOf(held{name: "a", bytes: 100})
	c.Step(epoch, Weighed{limit(100, 101)})
	if c.Room(epoch, nil, 1, false) {
		t.Error("loaded ahead of need although memory was short just before")
	}
	c.Step(epoch.Add(calmFor), Weighed{})
	c.Step(epoch, Weighed{})
	if !c.Room(epoch, nil, 1, false) {
		t.Error("not loaded ahead of need, want it ten seconds later")
	}
}

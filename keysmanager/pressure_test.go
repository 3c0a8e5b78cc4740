package keysmanager

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// plain is memory with one bound, of which 85 % are limit.
func plain(limit, used int64) memory {
	return memory{bounds: []resources.Bound{{resources.BoundOwn, limit * 100 / 85, used}}}
}

func keysOf(digests ...string) (out []zygote.Key) {
	for _, d := range digests {
		out = append(out, zygote.Key{Digest: d})
	}
	return out
}

func TestEvict(t *testing.T) {
	k := func(s string) zygote.Key { return zygote.Key{Digest: s} }
	all := []cached{
		{k("old key"), 400, false, true}, {k("busy"), 400, true, false}, {k("older"), 100, false, false}, {k("newer"), 300, false, false},
	}
	for name, tc := range map[string]struct {
		bounds  []resources.Bound
		pressed bool
		want    []string
		still   bool
	}{
		"below the threshold":             {[]resources.Bound{{"a", 1000, 850}}, false, nil, false},
		"a byte above it":                 {[]resources.Bound{{"a", 1000, 851}}, false, []string{"older"}, false},
		"down to the calm":                {[]resources.Bound{{"a", 1000, 901}}, false, []string{"older", "newer"}, false},
		"key stages last":                 {[]resources.Bound{{"a", 1000, 1201}}, false, []string{"older", "newer", "old key"}, false},
		"what is busy stays":              {[]resources.Bound{{"a", 1000, 2000}}, false, []string{"older", "newer", "old key"}, true},
		"the tightest bound counts":       {[]resources.Bound{{"a", 9000, 851}, {"b", 1000, 851}, {"c", 2000, 1}}, false, []string{"older"}, false},
		"each bound comes to its calm":    {[]resources.Bound{{"a", 1000, 851}, {"b", 1000, 840}}, false, []string{"older"}, false},
		"once begun it ends at the calm":  {[]resources.Bound{{"a", 1000, 801}}, true, []string{"older"}, false},
		"and not below":                   {[]resources.Bound{{"a", 1000, 800}}, true, nil, false},
		"without bounds there is no end":  {nil, true, nil, false},
		"a bound of nothing takes it all": {[]resources.Bound{{"a", 0, 1}}, false, []string{"older"}, false},
	} {
		out, still := evict(all, memory{bounds: tc.bounds, pressed: tc.pressed})
		if !slices.Equal(out, keysOf(tc.want...)) || still != tc.still {
			t.Errorf("%s: evicted %v, pressed %v, want %v, %v", name, out, still, tc.want, tc.still)
		}
	}
}

func TestFit(t *testing.T) {
	k := func(s string) zygote.Key { return zygote.Key{Digest: s} }
	all := []cached{{k("key"), 30, false, true}, {k("busy"), 40, true, false}, {k("idle"), 20, false, false}}
	for name, tc := range map[string]struct {
		m       memory
		bytes   int64
		want    []string
		missing int64
	}{
		"it fits":                     {plain(850, 90), 760, nil, 0},
		"an idle one gives way":       {plain(850, 90), 761, []string{"idle"}, 0},
		"then a key stage's":          {plain(850, 90), 781, []string{"idle", "key"}, 0},
		"if that is not enough, none": {plain(850, 90), 811, nil, 1},
		"loads under way count":       {memory{bounds: plain(850, 90).bounds, coming: 760}, 1, []string{"idle"}, 0},
		"when others have taken all":  {plain(850, 1000), 10, nil, 110},
	} {
		out, missing := fit(all, tc.m, tc.bytes)
		if !slices.Equal(out, keysOf(tc.want...)) || missing != tc.missing {
			t.Errorf("%s: %v, missing %d, want %v, %d", name, out, missing, tc.want, tc.missing)
		}
	}
}

func TestRoom(t *testing.T) {
	all := []cached{{bytes: 10}, {bytes: 20, busy: true}, {bytes: 30, keep: true}}
	for name, tc := range map[string]struct {
		m     memory
		bytes int64
		keep  bool
		want  bool
	}{
		"free memory":                  {plain(850, 60), 790, false, true},
		"one byte short":               {plain(850, 60), 791, false, false},
		"a key stage takes idle ones'": {plain(850, 60), 800, true, true},
		"but no busy or key one's":     {plain(850, 60), 801, true, false},
		"of unknown size, and room":    {plain(850, 850), 0, false, true},
		"of unknown size, and no room": {plain(850, 851), 0, false, false},
		"memory is short":              {memory{bounds: plain(850, 0).bounds, pressed: true}, 1, true, false},
		"it was short a moment ago":    {memory{bounds: plain(850, 0).bounds, short: true}, 1, true, false},
	} {
		if got := room(all, tc.m, tc.bytes, tc.keep); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// TestEvictChurn plays many variants that come, get busy, idle and key stages, against what may never happen.
func TestEvictChurn(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var all []cached
		pressed := false
		for step := range 60 {
			for i := range all {
				if rng.IntN(3) == 0 {
					all[i].busy, all[i].keep = rng.IntN(2) == 0, rng.IntN(4) == 0
				}
			}
			m := memory{pressed: pressed, bounds: []resources.Bound{{"a", 1000, sizeOf(all)}, {"b", 2000, sizeOf(all) + rng.Int64N(1500)}}}
			bytes := 1 + rng.Int64N(400)
			before := slices.Clone(all)
			where := fmt.Sprintf("seed %d, step %d", seed, step)
			out, missing := fit(all, m, bytes)
			checkVictims(t, where, all, out, max(0, bytes-m.free()), missing == 0)
			if missing == 0 {
				all = without(all, out)
				all = append(all, cached{key: zygote.Key{Digest: fmt.Sprint(step)}, bytes: bytes})
			}
			m.bounds[0].Used = sizeOf(all)
			var victims []zygote.Key
			again, _ := evict(all, m)
			victims, pressed = evict(all, m)
			if !slices.Equal(again, victims) {
				t.Fatalf("%s: %v and then %v", where, again, victims)
			}
			if _, room := m.tightest(Threshold); room >= 0 && !m.pressed && len(victims) > 0 {
				t.Fatalf("%s: %v evicted below the threshold", where, victims)
			}
			_, calm := m.tightest(resources.CalmBelow)
			checkVictims(t, where, all, victims, -calm, !pressed)
			all = without(all, victims)
			if len(before) > 0 && before[0].bytes == 0 {
				t.Fatal("the list was changed")
			}
		}
	}
}

func sizeOf(all []cached) (sum int64) {
	for _, c := range all {
		sum += c.bytes
	}
	return sum
}

func without(all []cached, gone []zygote.Key) []cached {
	return slices.DeleteFunc(slices.Clone(all), func(c cached) bool { return slices.Contains(gone, c.key) })
}

// checkVictims: none is busy; without the last they do not suffice; each is the first idle one of its rank, key stages after all others; if
// they suffice, so it is said.
func checkVictims(t *testing.T, where string, all []cached, out []zygote.Key, bytes int64, enough bool) {
	t.Helper()
	idle := slices.DeleteFunc(slices.Clone(all), func(c cached) bool { return c.busy })
	slices.SortStableFunc(idle, func(a, b cached) int {
		switch {
		case a.keep == b.keep:
			return 0
		case a.keep:
			return 1
		}
		return -1
	})
	sum := int64(0)
	for i, k := range out {
		if i >= len(idle) || idle[i].key != k {
			t.Fatalf("%s: victim %d is %v, want them in the order of %v", where, i, k, idle)
		}
		if sum >= bytes {
			t.Fatalf("%s: %v for %d bytes, want no more than it takes", where, out, bytes)
		}
		sum += idle[i].bytes
	}
	if len(out) > 0 && enough != (sum >= bytes) {
		t.Fatalf("%s: %d bytes for %d, said to be enough: %v", where, sum, bytes, enough)
	}
}

func TestRefusalSaysWhatIsWhere(t *testing.T) {
	const gb = 1 << 30
	n := need{5<<30 + gb*2/5, "model file 5.2 GiB"}
	own := memory{bounds: []resources.Bound{{resources.BoundMachine, 64 * gb, 20 * gb}, {resources.BoundOwn, 24 * gb, 173 * gb / 10}}, coming: gb}
	for name, tc := range map[string]struct {
		m    memory
		own  int64
		want []string
	}{
		"our own share": {own, 173 * gb / 10, []string{
			`zygote of "f.ns" needs about 5.4 GiB (model file 5.2 GiB)`, "2.1 GiB are free of 20.4 GiB (85 % of 24 GiB, --memory)",
			"12 GiB are held by zygotes with replicas: g.ns 8 GiB, h.ns 4 GiB", "1 GiB are kept for loads under way: x.ns 1 GiB", "raise --memory",
		}},
		"others' memory": {memory{bounds: []resources.Bound{{resources.BoundMachine, 24 * gb, 20 * gb}}}, 12 * gb, []string{
			"(85 % of 24 GiB, machine)", "8 GiB are used by other processes", "use a node with more memory",
		}},
		"never": {memory{bounds: []resources.Bound{{resources.BoundCgroup, 4 * gb, 0}}}, 0, []string{"3.4 GiB are free of 3.4 GiB (85 % of 4 GiB, cgroup)", "it can never fit here"}},
	} {
		err := refusal("f.ns", n, tc.m, tc.own, []keeper{{"h.ns", 4 * gb}, {"g.ns", 8 * gb}}, []keeper{{"x.ns", gb}})
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", name, err, want)
			}
		}
	}
}

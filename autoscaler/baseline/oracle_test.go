package baseline

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

// sec returns times given in seconds.
func sec(v ...float64) (out []time.Duration) {
	for _, s := range v {
		out = append(out, time.Duration(s*float64(time.Second)))
	}
	return out
}

// foresee returns an oracle of stages with these service times in seconds.
func foresee(t testing.TB, cfg OracleConfig, start float64, services ...float64) Oracle {
	t.Helper()
	for i, s := range services {
		cfg.Stages = append(cfg.Stages, OracleStage{Function: string(rune('a' + i)), Service: sec(s)[0], Start: sec(start)[0]})
	}
	o, err := NewOracle(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestOracleIsAnAllocator(t *testing.T) {
	cfg := OracleConfig{Wait: 0.2}
	for i := range 200 {
		cfg.Arrivals = append(cfg.Arrivals, time.Duration(i*i)*time.Millisecond)
	}
	for i := range 6 {
		cfg.Stages = append(cfg.Stages, OracleStage{Function: fmt.Sprintf("f%02d.ns", i), Service: time.Second, Start: 2 * time.Second, Slots: 1 + i%2, Batch: 1 + i%3, BatchCost: 0.3})
	}
	o, err := NewOracle(cfg)
	if err != nil {
		t.Fatal(err)
	}
	plantest.Run(t, o)
}

// TestOraclePlansCountsPerSecond checks plans that were made by hand: how many replicas are wanted
// in each second.
func TestOraclePlansCountsPerSecond(t *testing.T) {
	for name, tc := range map[string]struct {
		arrivals []time.Duration
		wait     float64
		floor    float64
		start    float64
		services []float64
		want     []string // a stage's counts, one per second; one replica always exists
	}{
		"one at a time": {sec(0, 2, 4, 6), 0, 0, 3, []float64{1}, []string{"11111111"}},
		// Three requests at 10 s, for a second. Two more replicas are ordered a start and a tick before.
		"three at once":            {sec(10, 10, 10), 0, 0, 3, []float64{1}, []string{"1111113333311"}},
		"three at once, one waits": {sec(10, 10, 10), 1, 0, 3, []float64{1}, []string{"1111112222211"}},
		"three at once, both wait": {sec(10, 10, 10), 2, 0, 3, []float64{1}, []string{"1111111111111"}},
		"a floor of two":           {sec(10, 10, 10), 0, 2, 3, []float64{1}, []string{"2222223333322"}},
		// 11 to 14
		"a gap of a start is kept": {sec(10, 10, 14, 14), 0, 0, 3, []float64{1}, []string{"11111122222222211"}},
		"a longer gap is not":      {sec(10, 10, 17, 17), 0, 0, 3, []float64{1}, []string{"11111122222112222211"}},
		"from the beginning":       {sec(1, 1), 0, 0, 3, []float64{1}, []string{"221"}},
		"it travels":               {sec(10, 10), 0, 0, 2, []float64{1, 3}, []string{"111111122221111", "11111111222222111"}},
		"the first smooths":        {sec(10, 10, 10, 10), 3.0 / 2, 0, 2, []float64{1, 1}, []string{"11111111111111", "11111111111111"}},
		// the second request came a second late, and may not wait again
		"what is left of the wait": {sec(10, 10), 1.0 / 3, 0, 2, []float64{1, 2}, []string{"1111111111111", "111111111222221111"}},
		"a slow second needs more": {sec(10, 11, 12), 0, 0, 2, []float64{1, 3}, []string{"111111111111111", "111111111233333211"}},
		// the third, at 13 s
		"slack for the slow second": {sec(10, 11, 12), 0.5, 0, 2, []float64{1, 3}, []string{"111111111111111", "11111111112222221"}},
		"nobody comes":              {nil, 0, 1.5, 2, []float64{1, 1}, []string{"222", "111"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := foresee(t, OracleConfig{Arrivals: tc.arrivals, Wait: tc.wait, Floor: tc.floor}, tc.start, tc.services...)
			for i, want := range tc.want {
				got := ""
				for second := range len(want) {
					got += fmt.Sprint(o.stages[string(rune('a'+i))].at(time.Duration(second) * time.Second))
				}
				if got != want {
					t.Errorf("stage %d: %s, want %s", i, got, want)
				}
			}
		})
	}
}

// TestOraclePlansKeepRequestsInTime checks that no request waits longer than it may in the queues
// of the plan.
func TestOraclePlansKeepRequestsInTime(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 0))
		wait := time.Duration(rng.IntN(4)) * 300 * time.Millisecond
		var requests []visit
		for at := time.Duration(0); len(requests) < 400; {
			for range 1 + rng.IntN(12)*rng.IntN(2) {
				requests = append(requests, visit{at, at + wait})
			}
			at += time.Duration(rng.ExpFloat64() * 2e9)
		}
		for stage := range 4 {
			st := OracleStage{Service: time.Duration(100+rng.IntN(900)) * time.Millisecond, Start: time.Duration(rng.IntN(8000)) * time.Millisecond, Batch: 1, Slots: 1 + rng.IntN(2)}
			st.pass(requests, st.pack(requests, 1+rng.IntN(2), time.Second), time.Second)
			for i, r := range requests {
				if r.at > r.due { // due is that of the next stage: it should have ended by then
					t.Fatalf("seed %d, stage %d, request %d: ended at %v, want %v at the latest", seed, stage, i, r.at, r.due)
				}
			}
		}
	}
}

// TestOraclePacksNearlyOptimally checks servers that exist all the time. First fit may need at most
// two servers more than the fewest that keep all requests in time.
func TestOraclePacksNearlyOptimally(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var requests []visit
		for at := time.Duration(0); len(requests) < 300; at += time.Duration(rng.ExpFloat64() * 3e8) {
			requests = append(requests, visit{at, at + time.Second})
		}
		st := OracleStage{Service: time.Second, Batch: 1, Slots: 1, Start: time.Hour} // no replica ends
		got := st.pack(requests, 1, time.Second).at(0)
		fewest := 1
		for late := true; late; {
			free := make(times, fewest)
			late = false
			for _, r := range requests {
				begin := max(r.at, free.pop())
				free.push(begin + st.Service)
				late = late || begin > r.due
			}
			if late {
				fewest++
			}
		}
		if got < fewest || got > fewest+2 {
			t.Errorf("seed %d: %d servers, %d are the fewest", seed, got, fewest)
		}
	}
}

// TestOracleFillsBatchesToSaveServers checks that a request that may wait joins a batch if that
// needs fewer servers.
func TestOracleFillsBatchesToSaveServers(t *testing.T) {
	st := OracleStage{Function: "a", Service: time.Second, Batch: 4, BatchCost: 0.1}
	// nine at once: each alone; on two servers, one and then four; on one server, one, four, four
	for wait, want := range map[float64]int{0: 9, 1: 2, 2.5: 1} {
		o, err := NewOracle(OracleConfig{Arrivals: sec(0, 0, 0, 0, 0, 0, 0, 0, 0), Wait: wait, Stages: []OracleStage{st}})
		if err != nil {
			t.Fatal(err)
		}
		if got := o.stages["a"].at(0); got != want {
			t.Errorf("wait %g: %d replicas, want %d", wait, got, want)
		}
	}
	// A queue with one replica begins the first at once, because no other request is there.
	requests := []visit{{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 5}}
	st.Slots = 1
	st.pass(requests, stretches{}, time.Second)
	var ends []time.Duration
	for _, r := range requests {
		ends = append(ends, r.at)
	}
	if want := sec(1, 2.3, 2.3, 2.3, 2.3, 3.3); !slices.Equal(ends, want) {
		t.Errorf("ended at %v, want %v", ends, want)
	}
}

// TestOracleKeepsToTheMostReplicas checks a stage with a largest number of replicas. Requests
// beyond their capacity wait for the server that is free first.
func TestOracleKeepsToTheMostReplicas(t *testing.T) {
	st := OracleStage{Function: "a", Service: time.Second, Most: 3}
	o, err := NewOracle(OracleConfig{Arrivals: slices.Repeat(sec(1), 10), Stages: []OracleStage{st}})
	if err != nil {
		t.Fatal(err)
	}
	for second, want := range []int{3, 3, 3, 3, 1, 1} {
		if got := o.stages["a"].at(time.Duration(second) * time.Second); got != want {
			t.Errorf("%d s: %d, want %d", second, got, want)
		}
	}
}

func TestNewOracleRefusesInvalidConfigs(t *testing.T) {
	for name, cfg := range map[string]OracleConfig{
		"unsorted":   {Arrivals: sec(2, 1)},
		"before":     {Arrivals: sec(-1, 1)},
		"wait":       {Wait: -1},
		"tick":       {Tick: -1},
		"no service": {Stages: []OracleStage{{Function: "a"}}},
		"start":      {Stages: []OracleStage{{Function: "a", Service: 1, Start: -1}}},
	} {
		if _, err := NewOracle(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestTimesPopsTheEarliestFirst checks that the earliest time comes out first.
func TestTimesPopsTheEarliestFirst(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	var h times
	var all []time.Duration
	for range 2000 {
		if rng.IntN(3) > 0 || len(h) == 0 {
			v := time.Duration(rng.IntN(50))
			h.push(v)
			all = append(all, v)
			continue
		}
		slices.Sort(all)
		if got := h.pop(); got != all[0] {
			t.Fatalf("%d, want %d of %d", got, all[0], all)
		}
		all = all[1:]
	}
}

// BenchmarkOracle plans four minutes of 20,000 requests for eight stages. The goal is 50 ms.
func BenchmarkOracle(b *testing.B) {
	cfg := OracleConfig{Wait: 0.5}
	rng := rand.New(rand.NewPCG(1, 0))
	for at := time.Duration(0); len(cfg.Arrivals) < 20_000; {
		for range 1 + rng.IntN(64)*rng.IntN(2)*rng.IntN(2) {
			cfg.Arrivals = append(cfg.Arrivals, at)
		}
		at += time.Duration(rng.ExpFloat64() * 0.1e9)
	}
	for i := range 8 {
		cfg.Stages = append(cfg.Stages, OracleStage{Function: string(rune('a' + i)), Service: 200 * time.Millisecond, Start: 4 * time.Second})
	}
	for b.Loop() {
		if _, err := NewOracle(cfg); err != nil {
			b.Fatal(err)
		}
	}
}

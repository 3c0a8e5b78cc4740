package accuracy

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"syscall"
	"testing"
)

// TestRoutesServeWhatPlansDo compares MostAccurateFirst with the shares of plans. The method is a
// heuristic, so a few requests may find no capacity.
func TestRoutesServeWhatPlansDo(t *testing.T) {
	worst, loss := 1.0, 0.0
	for _, of := range []struct {
		replicas int
		loads    []float64
		make     func(int, float64) *Problem
	}{{20, []float64{0.2, 0.6, 1.6}, traffic}, {20, []float64{0.2, 0.9, 1.6, 2.4}, social}, {60, []float64{0.6, 1.6, 2.4}, social}} {
		for _, load := range of.loads {
			p := of.make(of.replicas, load*float64(of.replicas)*35)
			s, err := p.Solve()
			if err != nil {
				t.Fatal(err)
			}
			r := MostAccurateFirst(p, s.Counts)
			served, accuracy := r.Result(p, 0)
			worst, loss = min(worst, served/s.Served), max(loss, s.Accuracy-accuracy)
			for _, x := range r.Routes {
				sum := x.Overflow
				for _, share := range x.Shares {
					sum += share.Part
				}
				if math.Abs(sum-1) > 1e-9 {
					t.Errorf("route %+v: parts sum to %v", x, sum)
				}
			}
		}
	}
	t.Logf("at least %.4f of the requests, at most %.4f less accurate", worst, loss)
	if worst < 0.95 || loss > 0.01 {
		t.Errorf("at least %v of the requests of plans are routed, and at most %v less accurately, want 0.95 and 0.01", worst, loss)
	}
}

// TestRoutesOfTooMuchDemand checks the overflow and the backups.
func TestRoutesOfTooMuchDemand(t *testing.T) {
	p := social(20, 500)
	s, err := p.Solve()
	if err != nil {
		t.Fatal(err)
	}
	if r := MostAccurateFirst(p, s.Counts); r.Overflow[0]+r.Overflow[1] > 1e-6 || len(r.Backups[0]) != 1 || len(r.Backups[1]) != 1 {
		t.Errorf("overflow %v, backups %v, want none and the most accurate variants", r.Overflow, r.Backups)
	}
	p.Pipelines[0].Demand = 5000
	r := MostAccurateFirst(p, s.Counts)
	x := r.Routes[0]
	if x.From != -1 || x.Overflow < 0.5 || math.Abs(r.Overflow[0]-5000*x.Overflow) > 1e-6 || len(r.Backups[0]) != 0 {
		t.Errorf("route %+v with overflow %v and backups %v, want most requests in the overflow", x, r.Overflow, r.Backups)
	}
}

// TestRoutesAreInTime has two stages of which only one may have its slow variant.
func TestRoutesAreInTime(t *testing.T) {
	vs := []Variant{
		{Name: "fast", Accuracy: 0.5, Batches: []Batch{{Size: 1, Time: 0.1}}},
		{Name: "slow", Accuracy: 0.9, Batches: []Batch{{Size: 1, Time: 0.4}}},
	}
	p := &Problem{
		Replicas: 20, Stages: []Stage{{Name: "a", Variants: vs}, {Name: "b", Variants: vs}},
		Pipelines: []Pipeline{{Name: "p", Steps: []Step{{From: 0, To: 1}}, Objective: 1, Queueing: HalfForQueueing, Demand: 5}},
	}
	r := MostAccurateFirst(p, [][]Count{{{Replicas: 1}, {Replicas: 1}}, {{Replicas: 5}, {Replicas: 5}}})
	for _, x := range r.Routes {
		for _, s := range x.Shares {
			if x.From == 0 && x.FromVariant == 1 && s.Variant == 1 {
				t.Errorf("%v of the requests behind the slow variant go to a slow one", s.Part)
			}
		}
	}
	if len(r.Routes) != 3 || r.Routes[2].Shares[0].Variant != 1 {
		t.Errorf("routes %+v, want a slow variant behind the fast one", r.Routes)
	}
}

// BenchmarkMostAccurateFirst measures the routes of the paper's larger pipeline. The goal is 20 µs.
func BenchmarkMostAccurateFirst(b *testing.B) {
	p := traffic(20, 1200)
	s, err := p.Solve()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		MostAccurateFirst(p, s.Counts)
	}
}

// BenchmarkSolve plans for loads from a twentieth to four times what full accuracy carries. It
// reports the processor time of a plan: its median, its 99th percentile, and how many plans were
// not proved to be the best. The goals are a p99 of 50 ms with 20 replicas, and 200 ms with 100.
func BenchmarkSolve(b *testing.B) {
	for _, of := range []struct {
		name string
		make func(int, float64) *Problem
	}{{"traffic", traffic}, {"social", social}} {
		for _, n := range []int{20, 100} {
			b.Run(fmt.Sprintf("%s/replicas=%d", of.name, n), func(b *testing.B) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				var took []float64
				open := 0.0
				for b.Loop() {
					for load := 0.05; load < 4; load += 0.04 {
						at := processorTime(b)
						s, err := of.make(n, load*float64(n)*30).Solve()
						if err != nil {
							b.Fatal(err)
						}
						took = append(took, processorTime(b)-at)
						if !s.Proved() {
							open++
						}
					}
				}
				slices.Sort(took)
				b.ReportMetric(took[len(took)/2], "p50-ms")
				b.ReportMetric(took[len(took)*99/100], "p99-ms")
				b.ReportMetric(open, "open")
			})
		}
	}
}

// processorTime returns the milliseconds that this thread has used.
func processorTime(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(1, &u); err != nil { // RUSAGE_THREAD
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e6
}

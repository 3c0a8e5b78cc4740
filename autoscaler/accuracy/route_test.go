package accuracy

import (
	"math"
	"testing"
)

// TestRoutesServeWhatPlansDo compares MostAccurateFirst with the shares of plans. The method is a
// heuristic, so a few requests may find no capacity.
func TestRoutesServeWhatPlansDo(t *testing.T) {
	worst, loss := 1.0, 0.0
	for _, n := range []int{20, 60} {
		for part := 0.2; part < 3; part += 0.4 {
			for _, make := range []func(int, float64) *Problem{traffic, social} {
				p := make(n, part*float64(n)*35)
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

// BenchmarkSolve measures one plan at loads from a fifth to three times what full accuracy carries.
func BenchmarkSolve(b *testing.B) {
	for name, of := range map[string]func(int, float64) *Problem{"traffic": traffic, "social": social} {
		for _, n := range []int{20, 100} {
			b.Run(name+"/replicas="+string(rune('0'+n/100))+string(rune('0'+n/10%10))+"0", func(b *testing.B) {
				b.ReportAllocs()
				at := 0
				for b.Loop() {
					if _, err := of(n, (0.2+0.1*float64(at%29))*float64(n)*35).Solve(); err != nil {
						b.Fatal(err)
					}
					at++
				}
			})
		}
	}
}

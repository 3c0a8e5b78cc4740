package autoscaler

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

// sizing is a domain under a load that changes each second.
type sizing struct {
	about     string
	functions []plan.Function
	pipelines []plan.Pipeline
	start     int                          // seconds until a replica is ready
	load      func(second int) (r float64) // requests per second, at every entry
	seconds   int
}

// TestSizerMatchesGoldenSeries compares the Sizer's decisions, second by second, with golden files.
func TestSizerMatchesGoldenSeries(t *testing.T) {
	step := func(at, until int, low, high float64) func(int) float64 {
		return func(second int) float64 {
			if at <= second && second < until {
				return high
			}
			return low
		}
	}
	row := []plan.Edge{{From: 0, To: 1}, {From: 1, To: 2}}
	for name, x := range map[string]sizing{
		"flash": {
			about:     "A flash crowd on one function of 100 ms, eight replicas at most, ready after 2 s: 5, then 40, then 5 requests a second.",
			functions: []plan.Function{timed("ocr.ns", 100*time.Millisecond)}, start: 2, load: step(3, 9, 5, 40), seconds: 90,
		},
		"pipeline": {
			about:     "A pipeline of 74, 137 and 278 ms within 1.2 s, from a fifth to one and a half times what one replica of the slowest serves.",
			functions: []plan.Function{timed("a.ns", 74*time.Millisecond), timed("b.ns", 137*time.Millisecond), timed("c.ns", 278*time.Millisecond)},
			pipelines: []plan.Pipeline{{Name: "p.ns", Stages: []string{"a.ns", "b.ns", "c.ns"}, Edges: row, SLO: 1200 * time.Millisecond}},
			start:     1, load: step(3, 30, 0.72, 5.4), seconds: 100,
		},
		"unmet": {
			about:     "An objective of 700 ms that cannot be met from the third second on: b has two replicas at most.",
			functions: []plan.Function{timed("a.ns", 100*time.Millisecond), timed("b.ns", 200*time.Millisecond), timed("c.ns", 100*time.Millisecond)},
			pipelines: []plan.Pipeline{{Name: "p.ns", Stages: []string{"a.ns", "b.ns", "c.ns"}, Edges: row, SLO: 700 * time.Millisecond}},
			start:     1, load: step(3, 8, 4, 16), seconds: 25,
		},
		"shared": {
			about:     "b is of two pipelines; p's is tight, and has c beside b; q's is not.",
			functions: []plan.Function{timed("a.ns", 50*time.Millisecond), timed("b.ns", 150*time.Millisecond), timed("c.ns", 100*time.Millisecond), timed("d.ns", 400*time.Millisecond)},
			pipelines: []plan.Pipeline{
				{Name: "p.ns", Stages: []string{"a.ns", "b.ns", "c.ns"}, Edges: []plan.Edge{{From: 0, To: 1}, {From: 0, To: 2}}, SLO: 300 * time.Millisecond},
				{Name: "q.ns", Stages: []string{"b.ns", "d.ns"}, Edges: row[:1], SLO: 4 * time.Second},
			},
			start: 1, load: step(2, 6, 3, 12), seconds: 25,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "unmet" {
				x.functions[1].Max = 2
			}
			if name == "flash" {
				x.functions[0].Max = 8
			}
			golden.Compare(t, "sizer-"+name+".txt", x.run(t))
		})
	}
}

// run decides once per second and applies the decision. Lines are fluid: arrivals that the replicas
// cannot serve within the second wait. It returns each line whose count changed.
func (x sizing) run(t *testing.T) string {
	t.Helper()
	s := plan.Snapshot{Rev: 1, Functions: x.functions, Pipelines: x.pipelines}
	z, d := NewSizer(Config{}), plan.Domains(s)[0]
	var m Memory
	var out strings.Builder
	fmt.Fprintf(&out, "# %s\n", x.about)
	last := map[string]int{}
	for second := range x.seconds {
		s.At = t0.Add(time.Duration(second) * time.Second)
		rate := x.load(second)
		for i := range s.Functions {
			f := &s.Functions[i]
			f.Demand.Rate, f.Demand.Last, f.Starts = rate, s.At, []plan.Start{{Path: "fork", Mean: time.Duration(x.start) * time.Second, N: 1}}
			for r := range f.Replicas {
				if s.At.Sub(f.Replicas[r].Since) >= time.Duration(x.start)*time.Second {
					f.Replicas[r].State = plan.Ready
				}
			}
			ready, _ := f.Current()
			f.Waiting = max(f.Waiting+int(math.Round(rate-float64(ready)/f.Service.Mean.Seconds())), 0)
		}
		a, next, err := z.Allocate(s, d, m)
		if err != nil {
			t.Fatal(err)
		}
		m = next
		for i, l := range a {
			f := &s.Functions[i]
			f.Replicas = f.Replicas[:min(len(f.Replicas), l.Count)]
			for len(f.Replicas) < l.Count {
				f.Replicas = append(f.Replicas, plan.Replica{Name: fmt.Sprint(len(f.Replicas)), Revision: 1, State: plan.Starting, Since: s.At})
			}
			if last[l.Function] != l.Count {
				fmt.Fprintf(&out, "t=%ds %s %d -> %d (%s)\n", second, l.Function, last[l.Function], l.Count, l.Why)
				last[l.Function] = l.Count
			}
		}
	}
	return out.String()
}

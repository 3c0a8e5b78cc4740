package policy

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// BenchmarkDecide measures one decision of all levels, as the control loop makes it every second.
// Each pipeline has five busy stages, and each node holds the replicas of twenty stages. The goal
// is 5 ms for 1,000 stages.
func BenchmarkDecide(b *testing.B) {
	for _, names := range []Names{{Corrector: none, Sharer: none}, {Corrector: "quart", Sharer: "gain"}} {
		set, err := names.Choose()
		if err != nil {
			b.Fatal(err)
		}
		for _, stages := range []int{10, 100, 1000} {
			b.Run(fmt.Sprintf("corrector=%s/sharer=%s/stages=%d", set.names.Corrector, set.names.Sharer, stages), func(b *testing.B) {
				s := busy(stages)
				_, m, _, err := set.Decide(s, nil)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				for b.Loop() {
					if _, _, _, err := set.Decide(s, m); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(stages)*float64(b.N)/b.Elapsed().Seconds(), "stages/s")
			})
		}
	}
}

// busy returns a cluster with this many stages in pipelines of five, which have the replicas that
// they need.
func busy(stages int) plan.Snapshot {
	s := plan.Snapshot{Rev: 1, Epoch: 1, At: time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)}
	for i := range max(stages/20, 1) {
		s.Nodes = append(s.Nodes, plan.Node{Name: fmt.Sprintf("node-%04d", i), Memory: 64 << 30, CPUMilli: 32000})
	}
	for i := range stages {
		f := plan.Function{
			Name: fmt.Sprintf("f%04d.ns", i), Revision: 1, Min: 1, Max: 20, Batch: 1, Slots: 1, Memory: 64 << 20, Waiting: i % 3, Running: 2,
			Demand:  plan.Demand{Known: true, Rate: 10 + float64(i%7), CV: 1 + float64(i%4), Last: s.At},
			Service: plan.Service{Known: true, Mean: time.Duration(100+i%50) * time.Millisecond, CV: 0.5},
			Wait:    plan.Wait{Known: true, Mean: 20 * time.Millisecond, P50: 10 * time.Millisecond, P95: 50 * time.Millisecond, P99: 80 * time.Millisecond},
			Busy:    plan.Busy{Known: true, Share: 0.6},
			Starts:  []plan.Start{{Path: "fork", Mean: 200 * time.Millisecond, N: 3}},
		}
		for k := range 4 {
			f.Replicas = append(f.Replicas, plan.Replica{
				Name: fmt.Sprintf("%s-%d", f.Name, k), Revision: 1, Node: s.Nodes[(i+k)%len(s.Nodes)].Name, State: plan.Ready, Since: s.At.Add(-time.Hour),
			})
		}
		s.Functions = append(s.Functions, f)
	}
	for i := 0; i+5 <= stages; i += 5 {
		p := plan.Pipeline{Name: fmt.Sprintf("p%04d.ns", i), SLO: 2 * time.Second}
		for k := range 5 {
			p.Stages = append(p.Stages, s.Functions[i+k].Name)
			if k > 0 {
				p.Edges = append(p.Edges, plan.Edge{From: k - 1, To: k})
			}
		}
		s.Pipelines = append(s.Pipelines, p)
	}
	return s
}

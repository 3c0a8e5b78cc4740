package cli

import (
	"bytes"
	"encoding/json"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
)

// film is a pipeline whose stage grade waits, beside mix, which does not; print is not known.
func film() (pipeline.Pipeline, plan.Snapshot, plan.Plan) {
	stage := func(name string, next ...string) pipeline.Stage {
		st := pipeline.Stage{Function: pipeline.Function{Name: name, Namespace: "ns"}}
		for _, n := range next {
			st.Next = append(st.Next, pipeline.Edge{To: n})
		}
		return st
	}
	at := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	ready := plan.Replica{Name: "r", Revision: 1, State: plan.Ready}
	function := func(name string, service, wait time.Duration) plan.Function {
		return plan.Function{
			Name: name + ".ns", Revision: 1, Min: 1, Max: 4, Replicas: []plan.Replica{ready},
			Demand: plan.Demand{Known: true, Rate: 12, CV: 2.5}, Service: plan.Service{Known: true, Mean: service}, Wait: plan.Wait{Known: true, Mean: wait},
		}
	}
	p := pipeline.Pipeline{
		Name: "film", Namespace: "ns", Entry: "cut", SLO: 400 * time.Millisecond,
		Stages: []pipeline.Stage{stage("cut", "grade", "mix"), stage("grade", "print"), stage("mix", "print"), stage("print")},
	}
	s := plan.Snapshot{At: at, Functions: []plan.Function{
		function("cut", 20*time.Millisecond, 0), function("grade", 100*time.Millisecond, 310*time.Millisecond),
		function("mix", 200*time.Millisecond, 0), function("print", 40*time.Millisecond, time.Millisecond),
	}}
	s.Functions[1].Busy = plan.Busy{Known: true, Share: 0.93}
	s.Functions[1].Waiting = 7
	s.Functions[1].Replicas = append(s.Functions[1].Replicas, plan.Replica{Name: "s", Revision: 1, State: plan.Starting})
	last := plan.Plan{At: at}
	for _, name := range []string{"cut.ns", "grade.ns", "mix.ns", "print.ns"} {
		last.Wants = append(last.Wants, plan.Want{Function: name, Revision: 1, Slots: make([]plan.Slot, 1), Why: "1 for stability; was 1; max 4"})
	}
	last.Wants[1] = plan.Want{Function: "grade.ns", Slots: make([]plan.Slot, 3), CPUMilli: 500, Key: true, Why: "2 for stability, pid +1; was 1; max 4"}
	return p, s, last
}

// TestExplain compares what is printed with golden files. If it fails, look at the difference, and
// run with -rewrite if you can say why each line moved.
func TestExplain(t *testing.T) {
	names := policy.Names{Allocator: "sizer", Corrector: "quart", Sharer: "gain", Placer: "dispersed", Warmer: "key-stages"}
	for name, change := range map[string]func(*pipeline.Pipeline, *plan.Snapshot, *plan.Plan) (trouble string){
		"not-met": func(*pipeline.Pipeline, *plan.Snapshot, *plan.Plan) string { return "" },
		"met": func(p *pipeline.Pipeline, _ *plan.Snapshot, _ *plan.Plan) string {
			p.SLO = time.Second
			return ""
		},
		"out-of-reach": func(p *pipeline.Pipeline, _ *plan.Snapshot, _ *plan.Plan) string {
			p.SLO = 200 * time.Millisecond
			return ""
		},
		"batches-out-of-reach": func(p *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string {
			p.SLO = time.Second
			f := &s.Functions[2]
			f.Batch, f.Demand.Rate, f.Service.Batches = 8, 4, []plan.Batched{{Size: 8, Mean: 1600 * time.Millisecond, N: 20}}
			return ""
		},
		"absurd": func(_ *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string {
			s.Functions[0].Demand.Rate, s.Functions[0].Demand.CV, s.Functions[0].Busy = math.NaN(), math.Inf(1), plan.Busy{Known: true, Share: math.NaN()}
			return ""
		},
		"unknown": func(_ *pipeline.Pipeline, s *plan.Snapshot, l *plan.Plan) string {
			s.Functions, l.Wants = s.Functions[:3], l.Wants[:3]
			s.Functions[2].Service, s.Functions[2].Demand, s.Functions[2].Wait = plan.Service{}, plan.Demand{}, plan.Wait{}
			return ""
		},
		"nothing-yet": func(p *pipeline.Pipeline, s *plan.Snapshot, l *plan.Plan) string {
			*s, *l = plan.Snapshot{}, plan.Plan{}
			p.Faults = []pipeline.Fault{{Function: "cut"}}
			return "observe: context deadline exceeded"
		},
		"failing": func(_ *pipeline.Pipeline, s *plan.Snapshot, l *plan.Plan) string {
			s.Functions[0].Failing = plan.Failure{Count: 3, Until: s.At.Add(8 * time.Second), Cause: "exit status 1"}
			s.Functions[1].Bars = []plan.Bar{{Node: "n", Device: "0", Until: s.At.Add(time.Minute), Cause: "want 80 GiB"}}
			s.Functions[3].Failing = plan.Failure{Count: 1, Until: s.At, Cause: "Traceback:\n\tno module\n"}
			l.Wants[1].Short = "3 of 4 placed: one more needs 2 GiB"
			return ""
		},
		"model-off": func(_ *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string {
			f := &s.Functions[0]
			f.Batch, f.Service.CV, f.Demand.CV, f.Demand.Rate = 8, 0.5, 12.5, 30
			f.Profile = []plan.Point{{CPUMilli: 1000, Batch: 1, Mean: 20 * time.Millisecond, N: 9}, {CPUMilli: 1000, Batch: 8, Mean: 10 * time.Millisecond, N: 9}}
			s.Functions[3].Demand.Since = s.At.Add(-65 * time.Second)
			s.Functions[2].Demand.Rate, s.Functions[3].Demand.CV = 3, 1
			return ""
		},
		"burst": func(_ *pipeline.Pipeline, s *plan.Snapshot, l *plan.Plan) string {
			f := &s.Functions[1]
			f.Max, f.Waiting, f.Wait.Oldest = 2, 121, 4069503*time.Microsecond
			l.Wants[1].Why = "λ=69.1/s μ=45.5/s Ca²=4.2: 2 for stability, 5 for film.ns's 400ms; held at 6, as asked for 400ms ago; " +
				"film.ns's 400ms is at risk: 5.2s expected on average, at most 215ms wanted; was 6; max 6; pid +1 (takes 68.3ms, target 37.7ms), 6 at most; key stage"
			return ""
		},
		"priced": func(_ *pipeline.Pipeline, _ *plan.Snapshot, l *plan.Plan) string {
			l.Wants[1].Why = "2 for stability, 3 with 1 for the price; was 1; max 4"
			return ""
		},
		"budget-spent":       func(_ *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string { s.Budget = 6; return "" },
		"budget-of-minimums": func(_ *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string { s.Budget = 4; return "" },
		"variants": func(p *pipeline.Pipeline, s *plan.Snapshot, l *plan.Plan) string {
			p.Stages[1].Variants = []pipeline.Function{{Name: "tint", Namespace: "ns", Variant: pipeline.Variant{VariantOf: "grade", Accuracy: 0.87, MaxLength: 128}}}
			tint := s.Functions[1]
			tint.Name, tint.VariantOf, tint.Accuracy = "tint.ns", "grade.ns", 0.87
			s.Functions = append(s.Functions, tint)
			s.Pipelines = []plan.Pipeline{{Name: "film.ns", Stages: []string{"cut.ns", "grade.ns", "mix.ns", "print.ns"}}}
			l.Wants = append(l.Wants, plan.Want{Function: "tint.ns", Rank: "fair", Slots: make([]plan.Slot, 1), Why: "8/s of 12/s"})
			l.Wants[1].Rank = "fair"
			both := plan.Level{Shares: []plan.Share{{Lane: "grade.ns", Part: 0.25}, {Lane: "tint.ns", Part: 0.75}}, MaxLength: 128, Backups: []string{"grade.ns", "tint.ns"}}
			rest := plan.Level{Shares: []plan.Share{{Lane: "grade.ns", Part: 1}}}
			quick := plan.Level{Shares: []plan.Share{{Lane: "tint.ns", Part: 1}}, Overflow: "grade.ns", MaxLength: 128}
			l.Tables = []plan.Table{plan.NewTable("grade.ns", 41, map[string]plan.Row{plan.FromClient: {Levels: []plan.Level{both, rest}}, "cut.ns": {Levels: []plan.Level{quick, rest}}})}
			l.Excluded = []plan.Chain{{"cut.ns", "tint.ns"}}
			l.Ruled = []plan.Ruled{{Domain: "cut.ns", Chosen: plan.Chosen{Allocator: "accuracy", Rank: "fair", Route: "best"}, Conflicts: []plan.Conflict{{Level: "rank", Asked: []string{"fair", "fifo"}, Kept: "fair"}}}}
			return ""
		},
		"budget-below-minimums": func(_ *pipeline.Pipeline, s *plan.Snapshot, _ *plan.Plan) string {
			s.Budget = 3
			return ""
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, s, last := film()
			trouble := change(&p, &s, &last)
			var out bytes.Buffer
			d := admin.Decided{Snapshot: s, Plan: last, Policies: names, Trouble: trouble}
			if name == "model-off" {
				d.Errors = map[string]autoscaler.ModelError{
					"mix.ns":   {Function: "mix.ns", Tasks: 180, Predicted: 500 * time.Millisecond, Stayed: 1501 * time.Millisecond, Off: true},
					"print.ns": {Function: "print.ns", Tasks: 720, Predicted: 60 * time.Millisecond, Stayed: 66 * time.Millisecond},
				}
			}
			if name == "priced" || name == "variants" { // the allocator of variants knows no price
				d.Policies.Price = 0.5
			}
			x := admin.Explain(p, d)
			if _, err := json.Marshal(x); err != nil {
				t.Fatal(err)
			}
			if err := showExplanation(x, &out); err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("explain", name+".txt"), out.String())
			for line := range strings.Lines(out.String()) {
				if strings.Contains(line, "NaN") || strings.Contains(line, "%!") {
					t.Errorf("%q", line)
				}
			}
		})
	}
}

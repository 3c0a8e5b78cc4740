package admin

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// draft is an explanation that is being written.
type draft struct {
	schema.Explanation
	stages []draftStage // they become the explanation's
}

// draftStage is a stage of a draft.
type draftStage struct {
	schema.ExplainedStage
	function *plan.Function // nil: no plan knows it
	terms    autoscaler.Terms
}

// Decided is a decision, and what is known about it.
type Decided struct {
	Snapshot plan.Snapshot
	Plan     plan.Plan // made from Snapshot; the latest that was applied
	Policies policy.Names
	Trouble  string // why the autoscaler has made no plan since; empty: there is no trouble
	Errors   map[string]autoscaler.ModelError
}

// Explain returns the reasons for the numbers of replicas of a pipeline's stages.
func Explain(p pipeline.Pipeline, d Decided) schema.Explanation {
	s, last := &d.Snapshot, &d.Plan
	x := draft{Explanation: schema.Explanation{
		Pipeline: p.Key().String(), At: last.At, Policies: d.Policies, Budget: s.Budget,
		Notes: []string{}, Stages: []schema.ExplainedStage{},
	}}
	wants := map[string]plan.Want{}
	for _, w := range last.Wants {
		wants[w.Function] = w
		x.Wanted += len(w.Slots)
	}
	for _, st := range p.Stages {
		key := st.Key().String()
		f, _ := s.Function(key)
		stage := explainStage(st.Name, f, wants[key])
		stage.Why += whyBatch(s, key)
		stage.LastMinute = lastMinute(d.Errors[key])
		var lengths []plan.LengthShare
		if f != nil {
			lengths = f.Lengths
		}
		stage.Table = explainTable(last.Tables, key, lengths)
		if st.Retained {
			stage.Why = "its own function was removed, so its variants serve it"
		}
		for _, v := range st.Variants {
			key := v.Key().String()
			f, _ := s.Function(key)
			variant := explainStage(v.Name, f, wants[key])
			variant.Why += whyBatch(s, key)
			variant.LastMinute = lastMinute(d.Errors[key])
			if variant.Accuracy, variant.MaxLength = v.Accuracy, v.MaxLength; f != nil {
				variant.Accuracy = f.Accurate() // that may be measured
			}
			x.failing(variant, s.At)
			x.off(variant)
			stage.Variants = append(stage.Variants, variant.ExplainedStage)
		}
		x.stages = append(x.stages, stage)
	}
	if p.SLO > 0 {
		x.SLO = p.SLO.String()
	}
	if spent, known := slowest(p, x.stages, draftStage.spends); known && len(p.Faults) == 0 {
		x.Measured = rounded(spent)
		if p.SLO > 0 {
			met := spent <= p.SLO
			x.Met = &met
		}
	}
	x.note(p, s, d.Trouble)
	x.rule(p, s, last)
	for _, st := range x.stages {
		x.Stages = append(x.Stages, st.ExplainedStage)
	}
	return x.Explanation
}

// explainStage describes one stage. f is nil if no plan knows it yet.
func explainStage(name string, f *plan.Function, w plan.Want) draftStage {
	st := draftStage{ExplainedStage: schema.ExplainedStage{Name: name, Wanted: len(w.Slots), Why: w.Why, Short: w.Short, CPUMilli: w.CPUMilli}, function: f}
	st.Rank = w.Rank
	if f == nil {
		st.Why = "no decision yet"
		return st
	}
	st.Ready, st.Starting = f.Current()
	st.Min, st.Max = f.Bounds()
	st.Key = placement.Key(f, w)
	st.Waiting, st.Running = f.Waiting, f.Running
	if f.Demand.Known {
		st.Rate = finite(f.Demand.Rate)
		if since := f.Demand.Since; !since.IsZero() {
			st.RateSince = &since
		}
		if f.Demand.CV > 0 {
			st.CV = finite(f.Demand.CV)
		}
	}
	if f.Stage.Known {
		st.Arriving = finite(f.Stage.Rate)
	}
	if f.Service.Known {
		st.Service = rounded(f.Service.Mean)
	}
	if f.Wait.Known {
		st.Wait = rounded(f.Wait.Mean)
	}
	if f.Wait.Oldest > 0 {
		st.Oldest = rounded(f.Wait.Oldest)
	}
	if f.Busy.Known {
		st.Busy = finite(f.Busy.Share)
	}
	if f.Failing.Count > 0 {
		st.Failing = &schema.FailingStarts{Count: f.Failing.Count, Until: f.Failing.Until, Cause: f.Failing.Cause}
	}
	st.Barred = Barred(f.Bars)
	st.terms = autoscaler.NewTerms(f)
	st.ExplainedModel = explainModel(&st.terms, f.Batch)
	return st
}

// whyBatch returns why a function has its batch, as further terms of its reasons; empty: it is
// declared.
func whyBatch(s *plan.Snapshot, function string) (terms string) {
	at := slices.IndexFunc(s.Functions, func(f plan.Function) bool { return f.Name == function })
	if at < 0 {
		return ""
	}
	if s.Functions[at].AutoBatch > 0 {
		_, why := s.AutoBatch(at)
		terms = "; " + why
	}
	if why := Survived(s.Functions[at].Survived); why != "" {
		terms += "; " + why
	}
	return terms
}

// slowest returns the mean time on the slowest path through a pipeline. It is unknown if the time
// of a stage is unknown.
func slowest(p pipeline.Pipeline, stages []draftStage, spends func(draftStage) time.Duration) (time.Duration, bool) {
	before := make([]time.Duration, len(stages)) // when a stage begins
	index := map[string]int{}
	for i, st := range p.Stages {
		index[st.Name] = i
	}
	var end time.Duration
	for i, st := range stages { // in topological order
		if st.Service == "" {
			return 0, false
		}
		done := before[i] + spends(st)
		end = max(end, done)
		for _, e := range p.Stages[i].Next {
			if to, ok := index[e.To]; ok {
				before[to] = max(before[to], done)
			}
		}
	}
	return end, len(stages) > 0
}

func (x *draft) add(format string, args ...any) {
	x.Notes = append(x.Notes, fmt.Sprintf(format, args...))
}

// failing adds a note if replicas of a stage or variant do not start.
func (x *draft) failing(st draftStage, now time.Time) {
	if st.Failing == nil {
		return
	}
	next := "now"
	if st.Failing.Until.After(now) {
		next = "at " + st.Failing.Until.UTC().Format(time.TimeOnly)
	}
	x.add("%s: %s failed, the next is tried %s: %s", st.Name, Counted(st.Failing.Count, "start", "starts in a row"), next, oneLine(st.Failing.Cause))
}

// note adds the notes: what the operator should know first.
func (x *draft) note(p pipeline.Pipeline, s *plan.Snapshot, trouble string) {
	add := x.add
	if len(p.Faults) > 0 {
		add("the pipeline's graph has a fault, so that it cannot be invoked: `stagecoach pipeline describe %s`", p.Name)
	}
	if trouble != "" {
		add("the autoscaler goes on with what it has: %s", trouble)
	}
	slow := -1 // the stage that takes the longest, of those that wait
	for i, st := range x.stages {
		x.failing(st, s.At)
		x.off(st)
		if st.Short != "" {
			add("%s: %s", st.Name, st.Short)
		}
		if st.function != nil && (slow < 0 || st.waited() > x.stages[slow].waited()) {
			slow = i
		}
	}
	if x.Met != nil && !*x.Met {
		add("the objective of %s is not met: %s on the slowest path", x.SLO, x.Measured)
		if st := x.stages[slow]; st.waited() > 0 {
			add("%s holds it up: %s", st.Name, st.queue())
		}
	}
	if work, known := slowest(p, x.stages, draftStage.works); known && p.SLO > 0 && work > p.SLO {
		add("no number of replicas meets the objective of %s: the stages work for %s on the slowest path, without any waiting; "+
			"faster stages do, or a longer slo", p.SLO, rounded(work))
	}
	least := 0
	for i := range s.Functions {
		few, _ := s.Functions[i].Bounds()
		least += few
	}
	switch {
	case x.Budget > 0 && least > x.Budget:
		add("the functions' minimums are %d replicas together, the budget is %d: it is not kept; raise control.budget, or lower a com.openfaas.scale.min", least, x.Budget)
	case x.Budget > 0 && least == x.Budget:
		add("the functions' minimums are all of the budget of %d replicas: no stage gets more, and one that sleeps does not wake; "+
			"raise control.budget, or lower a com.openfaas.scale.min", x.Budget)
	case x.Budget > 0 && x.Wanted >= x.Budget:
		add("the budget of %d replicas is spent: a stage gets more only when another gives some back", x.Budget)
	}
}

// works returns how long a task is in its batch at a stage, on average.
func (st draftStage) works() time.Duration { return max(st.terms.Batch, st.function.Service.Mean) }

// spends returns how long a task is at a stage, on average.
func (st draftStage) spends() time.Duration { return st.waited() + st.works() }

// waited returns how long a stage's tasks wait, on average or now, whichever is longer.
func (st draftStage) waited() time.Duration {
	if st.function == nil {
		return 0
	}
	return max(st.function.Wait.Mean, st.function.Wait.Oldest)
}

// queue describes how long a stage's tasks wait, and for how many replicas.
func (st draftStage) queue() string {
	text := "its tasks wait for " + rounded(st.function.Wait.Mean) + " on average"
	if oldest := st.function.Wait.Oldest; oldest > st.function.Wait.Mean {
		text += fmt.Sprintf(", the first of %d that wait now has for %s", st.Waiting, rounded(oldest))
	}
	text += fmt.Sprintf("; %s ready", Counted(st.Ready, "replica is", "replicas are"))
	if st.Ready+st.Starting >= st.Max {
		text += fmt.Sprintf(", and its com.openfaas.scale.max is %d", st.Max)
	}
	return text
}

// serveExplain serves GET /system/pipelines/{name}/explain. The name may also be a function's.
func serveExplain(reg *provider.Registry, loop Loop, replicas Replicas) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
		p, ok := findPipeline(reg, key)
		if !ok {
			http.Error(w, reg.NotFound("pipeline or function", key).Error(), http.StatusNotFound)
			return
		}
		s, last := loop.Last()
		x := Explain(p, Decided{s, last, loop.Policies(), loop.Trouble(), loop.ModelErrors()})
		for _, st := range p.Stages {
			if until, ok := replicas.PinnedUntil(st.Key()); ok {
				x.Notes = append(x.Notes, st.Name+": "+MeasuredUntil(until))
			}
		}
		answerJSON(w, x)
	})
}

// findPipeline returns the pipeline with a key. If there is none, it returns the function with this
// key as a pipeline of one stage.
func findPipeline(reg *provider.Registry, key pipeline.Key) (pipeline.Pipeline, bool) {
	all := reg.Pipelines()
	if i := slices.IndexFunc(all, func(p pipeline.Pipeline) bool { return p.Key() == key }); i >= 0 {
		return all[i], true
	}
	return reg.Graph(key)
}

package main

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// explanation is why the stages of a pipeline are as large as they are, as GET /system/pipelines/NAME/explain answers.
type explanation struct {
	Pipeline string           `json:"pipeline"`           // its key, or that of a function alone
	At       time.Time        `json:"at"`                 // of the decision; zero: there is none yet
	SLO      string           `json:"slo,omitempty"`      // a Go duration, as those below
	Measured string           `json:"measured,omitempty"` // mean time on the slowest path; empty: a stage has no data
	Met      *bool            `json:"met,omitempty"`      // Measured is within SLO; none while one of them is empty
	Policies policy.Names     `json:"policies"`
	Budget   int              `json:"budget,omitempty"` // replicas that all functions together may have
	Wanted   int              `json:"wanted"`           // replicas that all functions together should have
	Notes    []string         `json:"notes"`            // what the operator should know first
	Stages   []explainedStage `json:"stages"`
}

// explainedStage is a stage of an [explanation]. What is not known is left out: it is not zero.
type explainedStage struct {
	Name     string         `json:"name"`
	Ready    int            `json:"ready"`
	Starting int            `json:"starting"`
	Wanted   int            `json:"wanted"` // replicas that have a place
	Min      int            `json:"min"`
	Max      int            `json:"max"`
	Key      bool           `json:"key"` // a key stage
	CPUMilli int            `json:"cpuMilli,omitempty"`
	Rate     *float64       `json:"rate,omitempty"` // requests a second
	CV       *float64       `json:"cv,omitempty"`   // of the times between them
	Wait     string         `json:"wait,omitempty"` // mean
	Oldest   string         `json:"oldest,omitempty"`
	Service  string         `json:"service,omitempty"` // mean
	Busy     *float64       `json:"busy,omitempty"`    // share of the time
	Waiting  int            `json:"waiting"`
	Running  int            `json:"running"`
	Why      string         `json:"why"`             // the decision: which term, from what to what, why not more
	Short    string         `json:"short,omitempty"` // why fewer have a place
	Failing  *failingStarts `json:"failing,omitempty"`
	Barred   string         `json:"barred,omitempty"` // devices that it is kept from
	function *plan.Function // nil: no plan knows it
}

// failingStarts says that replicas do not start.
type failingStarts struct {
	Count int       `json:"count"` // in a row
	Until time.Time `json:"until"` // no other is tried before
	Cause string    `json:"cause"` // of the latest
}

// explain puts together what the plan that was applied last says of a pipeline, and the Snapshot that it was made from.
func explain(p pipeline.Pipeline, s plan.Snapshot, last plan.Plan, policies policy.Names, trouble string) explanation {
	x := explanation{
		Pipeline: p.Key().String(), At: last.At, Policies: policies, Budget: s.Budget,
		Notes: []string{}, Stages: []explainedStage{},
	}
	wants := map[string]plan.Want{}
	for _, w := range last.Wants {
		wants[w.Function] = w
		x.Wanted += len(w.Slots)
	}
	for _, st := range p.Stages {
		key := st.Key().String()
		f, _ := s.Function(key)
		x.Stages = append(x.Stages, explainStage(st.Name, f, wants[key]))
	}
	if p.SLO > 0 {
		x.SLO = p.SLO.String()
	}
	if spent, known := slowest(p, x.Stages, explainedStage.spends); known && len(p.Faults) == 0 {
		x.Measured = rounded(spent)
		if p.SLO > 0 {
			met := spent <= p.SLO
			x.Met = &met
		}
	}
	x.note(p, s, trouble)
	return x
}

// explainStage tells of one stage; f is nil when no plan knows it yet.
func explainStage(name string, f *plan.Function, w plan.Want) explainedStage {
	st := explainedStage{Name: name, Wanted: len(w.Slots), Why: w.Why, Short: w.Short, CPUMilli: w.CPUMilli, function: f}
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
		if f.Demand.CV > 0 {
			st.CV = finite(f.Demand.CV)
		}
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
		st.Failing = &failingStarts{f.Failing.Count, f.Failing.Until, f.Failing.Cause}
	}
	st.Barred = barred(f.Bars)
	return st
}

// slowest is the mean time on the slowest path through a pipeline; not known while that of a stage is not.
func slowest(p pipeline.Pipeline, stages []explainedStage, spends func(explainedStage) time.Duration) (time.Duration, bool) {
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

// note says what the operator should know first.
func (x *explanation) note(p pipeline.Pipeline, s plan.Snapshot, trouble string) {
	add := func(format string, args ...any) { x.Notes = append(x.Notes, fmt.Sprintf(format, args...)) }
	if len(p.Faults) > 0 {
		add("the pipeline's graph has a fault, so that it cannot be invoked: `stagecoach pipeline describe %s`", p.Name)
	}
	if trouble != "" {
		add("the autoscaler goes on with what it has: %s", trouble)
	}
	slow := -1 // the stage that takes the longest, of those that wait
	for i, st := range x.Stages {
		if st.Failing != nil {
			next := "now"
			if st.Failing.Until.After(s.At) {
				next = "at " + st.Failing.Until.UTC().Format(time.TimeOnly)
			}
			add("%s: %s failed, the next is tried %s: %s", st.Name, counted(st.Failing.Count, "start", "starts in a row"), next, oneLine(st.Failing.Cause))
		}
		if st.Short != "" {
			add("%s: %s", st.Name, st.Short)
		}
		if st.function != nil && (slow < 0 || st.waited() > x.Stages[slow].waited()) {
			slow = i
		}
	}
	if x.Met != nil && !*x.Met {
		add("the objective of %s is not met: %s on the slowest path", x.SLO, x.Measured)
		if st := x.Stages[slow]; st.waited() > 0 {
			add("%s holds it up: %s", st.Name, st.queue())
		}
		if work, _ := slowest(p, x.Stages, explainedStage.works); work > p.SLO {
			add("no number of replicas meets it: the stages work for %s on the slowest path, without any waiting; faster stages do, or a longer slo", rounded(work))
		}
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

// works is how long a stage serves a task, on average.
func (st explainedStage) works() time.Duration { return st.function.Service.Mean }

// spends is how long a task is at a stage, on average.
func (st explainedStage) spends() time.Duration { return st.waited() + st.works() }

// waited is how long a stage's tasks wait, on average or now.
func (st explainedStage) waited() time.Duration {
	if st.function == nil {
		return 0
	}
	return max(st.function.Wait.Mean, st.function.Wait.Oldest)
}

// queue says how long a stage's tasks wait, and what for.
func (st explainedStage) queue() string {
	text := "its tasks wait for " + rounded(st.function.Wait.Mean) + " on average"
	if oldest := st.function.Wait.Oldest; oldest > st.function.Wait.Mean {
		text += fmt.Sprintf(", the first of %d that wait now has for %s", st.Waiting, rounded(oldest))
	}
	text += fmt.Sprintf("; %s ready", counted(st.Ready, "replica is", "replicas are"))
	if st.Ready+st.Starting >= st.Max {
		text += fmt.Sprintf(", and its com.openfaas.scale.max is %d", st.Max)
	}
	return text
}

// counted is a number of something.
func counted(n int, one, more string) string {
	if n == 1 {
		more = one
	}
	return fmt.Sprint(n, " ", more)
}

// oneLine is text, such as a program's last words, as a line.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// finite is a number that JSON can hold; nil: it cannot.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// rounded writes a duration to a tenth of a millisecond, or in three digits.
func rounded(d time.Duration) string {
	unit := 100 * time.Microsecond
	for d.Abs() >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}

// serveExplain answers GET /system/pipelines/{name}/explain, also for a function that is named.
func serveExplain(reg *provider.Registry, loop *control.Loop, status *status) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
		p, ok := findPipeline(reg, key)
		if !ok {
			http.Error(w, reg.NotFound("pipeline or function", key).Error(), http.StatusNotFound)
			return
		}
		s, last := loop.Last()
		x := explain(p, s, last, loop.Policies(), loop.Trouble())
		for _, st := range p.Stages {
			if until, ok := status.local.PinnedUntil(st.Key()); ok {
				x.Notes = append(x.Notes, st.Name+": "+measuredUntil(until))
			}
		}
		answerJSON(w, x)
	})
}

// findPipeline finds the pipeline of a key, or else the function as a pipeline of one stage.
func findPipeline(reg *provider.Registry, key pipeline.Key) (pipeline.Pipeline, bool) {
	all := reg.Pipelines()
	if i := slices.IndexFunc(all, func(p pipeline.Pipeline) bool { return p.Key() == key }); i >= 0 {
		return all[i], true
	}
	return reg.Graph(key)
}

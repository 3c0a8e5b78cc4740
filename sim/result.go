package sim

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// Schema is the version of the JSON of a Result.
const Schema = "stagecoach-sim/1"

// Result is the result of a scenario.
type Result struct {
	Schema    string         `json:"schema"`
	Scenario  string         `json:"scenario"`
	Duration  float64        `json:"duration_s"` // of the arrivals
	Warmup    float64        `json:"warmup_s"`   // part of it that is not counted
	Seed      uint64         `json:"seed"`       // the first one
	Seeds     int            `json:"seeds"`
	Pipelines []Offer        `json:"pipelines"`
	Stages    []string       `json:"stages"`          // sorted
	Notes     []string       `json:"notes,omitempty"` // what to know about the scenario
	Policies  []PolicyResult `json:"policies"`
}

// Offer is the load of a pipeline.
type Offer struct {
	Name     string  `json:"name"`
	SLO      float64 `json:"slo_s,omitempty"`
	Arrivals string  `json:"arrivals"`
}

// PolicyResult is the result of a scenario under one policy.
type PolicyResult struct {
	Name      string           `json:"name"`
	Policies  policy.Names     `json:"policies"`
	Pipelines []PipelineResult `json:"pipelines"`
	Stages    []StageResult    `json:"stages"` // in the order of Result.Stages

	ReplicaSeconds Estimate `json:"replica_s"` // of all stages, from order to end
	Replicas       Estimate `json:"replicas"`  // on average over time
	Ticks          Estimate `json:"ticks"`
	// domains that kept their replicas because a policy failed
	Held      Estimate `json:"held"`
	Refused   Estimate `json:"refused"` // refused plans
	Complaint string   `json:"complaint,omitempty"`
	Events    Estimate `json:"events"` // per run
	// mean of |predicted − measured| / measured CV over stages that are not entries
	QNAError Estimate `json:"qna_cv_error"`
	// the same error for the guess that each stage has the CV of its entry
	SameError Estimate `json:"same_cv_error"`

	Versus []Versus `json:"versus_first,omitempty"` // one per pipeline; absent for the first policy
	Series Series   `json:"series"`                 // of the first seed
}

// PipelineResult is the result of a pipeline's requests.
type PipelineResult struct {
	Name    string   `json:"name"`
	Offered Estimate `json:"offered"`
	// share of the offered requests that were answered in time
	Attainment Estimate       `json:"slo_attainment"`
	Goodput    Estimate       `json:"goodput_per_s"`
	Mean       Estimate       `json:"mean_s"`
	P50        Estimate       `json:"p50_s"`
	P95        Estimate       `json:"p95_s"`
	P99        Estimate       `json:"p99_s"`
	Failed     Estimate       `json:"failed"`             // share of the offered requests
	Failures   map[string]int `json:"failures,omitempty"` // by HTTP status, over all seeds
	// failures because a policy dropped a task, by reason
	Drops map[string]int `json:"drops,omitempty"`
	// mean over the answers; absent if no function declares an accuracy
	Accuracy Estimate `json:"accuracy,omitzero"`
}

// StageResult is the result of a function's calls. The rate, the CV and the prediction of a stage
// with variants are those of all its calls.
type StageResult struct {
	Name string   `json:"name"`
	Lane *Lane    `json:"lane,omitempty"` // absent if it alone serves its stage
	Rate Estimate `json:"rate_per_s"`
	CV   Estimate `json:"arrival_cv"`
	// by Whitt's QNA from the entering requests; of an entry stage: as measured
	Predicted Estimate `json:"predicted_cv"`
	Wait      Estimate `json:"wait_mean_s"`
	WaitP99   Estimate `json:"wait_p99_s"`
	Service   Estimate `json:"service_mean_s"`
	ServiceCV Estimate `json:"service_cv"`
	// share of time that the slots of ready replicas were taken
	Utilisation Estimate       `json:"utilisation"`
	Replicas    Estimate       `json:"replicas"`
	Most        int            `json:"most_replicas"`
	Starts      map[string]int `json:"starts,omitempty"` // by path, over all seeds
	Deaths      int            `json:"deaths"`
	Evictions   int            `json:"evictions"`           // of its parameters
	Short       Estimate       `json:"short"`               // plans in which a replica had no place
	ShortWhy    string         `json:"short_why,omitempty"` // reason in the first such plan
}

// Lane is what a function does as one of several that can serve a stage.
type Lane struct {
	Stage     string   `json:"stage"`
	Accuracy  float64  `json:"accuracy"`             // as declared
	MaxLength int      `json:"max_length,omitempty"` // as declared; absent: any
	Tasks     Estimate `json:"tasks"`                // calls that it answered
	Share     Estimate `json:"share"`                // of the stage's answered calls
}

// Versus is the change from the first policy as a part of its value, seed by seed.
type Versus struct {
	Pipeline       string   `json:"pipeline"`
	Mean           Estimate `json:"mean"`
	P99            Estimate `json:"p99"`
	Attainment     Estimate `json:"slo_attainment"` // a difference
	ReplicaSeconds Estimate `json:"replica_s"`
}

// of returns the estimate of a figure over runs.
func of(runs []Figures, figure func(*Figures) float64) Estimate {
	values := make([]float64, len(runs))
	for i := range runs {
		values[i] = figure(&runs[i])
	}
	return NewEstimate(values)
}

// Result summarizes the runs of all policies on all seeds, as [Model.Runs] returns them.
func (m *Model) Result(runs [][]Figures) Result {
	s := &m.scenario
	out := Result{
		Schema: Schema, Scenario: s.Name, Duration: m.duration.Seconds(), Warmup: s.Warmup.Seconds(), Seed: s.Seed, Seeds: s.Seeds,
	}
	out.Notes = m.notes()
	for i := range m.pipelines {
		p := &m.pipelines[i]
		out.Pipelines = append(out.Pipelines, Offer{Name: p.spec.Name, SLO: p.spec.SLO.Seconds(), Arrivals: p.about})
	}
	for i := range m.stages {
		out.Stages = append(out.Stages, m.stages[i].spec.Name)
	}
	for p, of := range runs {
		is := m.summary(of)
		if p > 0 {
			is.Versus = m.versus(runs[0], of)
		}
		out.Policies = append(out.Policies, is)
	}
	return out
}

// summary summarizes the runs of one policy.
func (m *Model) summary(runs []Figures) PolicyResult {
	out := PolicyResult{
		Name: runs[0].Policy, Policies: runs[0].Policies,
		ReplicaSeconds: of(runs, func(f *Figures) float64 { return f.ReplicaSeconds }),
		Replicas:       of(runs, func(f *Figures) float64 { return f.ReplicaSeconds / f.Seconds }),
		Ticks:          of(runs, func(f *Figures) float64 { return f.Ticks }),
		Held:           of(runs, func(f *Figures) float64 { return f.Held }),
		Refused:        of(runs, func(f *Figures) float64 { return f.Refused }),
		Events:         of(runs, func(f *Figures) float64 { return f.Events }),
		QNAError:       of(runs, func(f *Figures) float64 { return f.QNAError }),
		SameError:      of(runs, func(f *Figures) float64 { return f.SameError }),
		Series:         runs[0].Series,
	}
	if i := slices.IndexFunc(runs, func(f Figures) bool { return f.Complaint != "" }); i >= 0 {
		out.Complaint = runs[i].Complaint
	}
	for i := range m.pipelines {
		one := pipelineResult(i, runs)
		if m.inaccurate {
			one.Accuracy = of(runs, func(f *Figures) float64 { return f.Pipelines[i].Accuracy })
		}
		out.Pipelines = append(out.Pipelines, one)
	}
	for i := range m.stages {
		one, spec := stageResult(i, runs), &m.stages[i].spec
		if stage := runs[0].Stages[i].Stage; stage != "" {
			one.Lane = &Lane{
				Stage: stage, Accuracy: spec.Accuracy, MaxLength: spec.MaxLength,
				Tasks: of(runs, func(f *Figures) float64 { return f.Stages[i].Tasks }),
				Share: of(runs, func(f *Figures) float64 { return f.Stages[i].Share }),
			}
		}
		out.Stages = append(out.Stages, one)
	}
	return out
}

func pipelineResult(i int, runs []Figures) PipelineResult {
	from := func(figure func(p *PipelineFigures) float64) Estimate {
		return of(runs, func(f *Figures) float64 { return figure(&f.Pipelines[i]) })
	}
	out := PipelineResult{
		Name:       runs[0].Pipelines[i].Name,
		Offered:    from(func(p *PipelineFigures) float64 { return p.Offered }),
		Attainment: from(func(p *PipelineFigures) float64 { return p.Attainment }),
		Goodput:    from(func(p *PipelineFigures) float64 { return p.Goodput }),
		Mean:       from(func(p *PipelineFigures) float64 { return p.Mean }),
		P50:        from(func(p *PipelineFigures) float64 { return p.P50 }),
		P95:        from(func(p *PipelineFigures) float64 { return p.P95 }),
		P99:        from(func(p *PipelineFigures) float64 { return p.P99 }),
		Failed:     from(func(p *PipelineFigures) float64 { return ratio(p.Failed, p.Offered) }),
		Failures:   map[string]int{},
		Drops:      map[string]int{},
	}
	for _, f := range runs {
		for status, n := range f.Pipelines[i].Failures {
			out.Failures[strconv.Itoa(status)] += n
		}
		for reason, n := range f.Pipelines[i].Drops {
			out.Drops[string(reason)] += n
		}
	}
	return out
}

func stageResult(i int, runs []Figures) StageResult {
	from := func(figure func(s *StageFigures) float64) Estimate {
		return of(runs, func(f *Figures) float64 { return figure(&f.Stages[i]) })
	}
	out := StageResult{
		Name:        runs[0].Stages[i].Name,
		Rate:        from(func(s *StageFigures) float64 { return s.Rate }),
		CV:          from(func(s *StageFigures) float64 { return s.CV }),
		Predicted:   from(func(s *StageFigures) float64 { return s.Predicted }),
		Wait:        from(func(s *StageFigures) float64 { return s.Wait }),
		WaitP99:     from(func(s *StageFigures) float64 { return s.WaitP99 }),
		Service:     from(func(s *StageFigures) float64 { return s.Service }),
		ServiceCV:   from(func(s *StageFigures) float64 { return s.ServiceCV }),
		Utilisation: from(func(s *StageFigures) float64 { return s.Utilisation }),
		Replicas:    of(runs, func(f *Figures) float64 { return f.Stages[i].ReplicaSeconds / f.Seconds }),
		Starts:      map[string]int{},
		Short:       from(func(s *StageFigures) float64 { return float64(s.Short) }),
	}
	for k := range runs {
		s := &runs[k].Stages[i]
		out.Most = max(out.Most, s.Most)
		out.ShortWhy = cmp.Or(out.ShortWhy, s.ShortWhy)
		out.Deaths += s.Deaths
		out.Evictions += s.Evictions
		for _, x := range s.Starts {
			out.Starts[x.Path] += x.N
		}
	}
	return out
}

// versus compares runs of a policy with those of the first policy on the same seeds.
func (m *Model) versus(first, runs []Figures) []Versus {
	pair := func(change func(a, b *Figures) float64) Estimate {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = change(&first[i], &runs[i])
		}
		return NewEstimate(values)
	}
	change := func(figure func(f *Figures) float64) Estimate {
		return pair(func(a, b *Figures) float64 { return ratio(figure(b)-figure(a), figure(a)) })
	}
	var out []Versus
	for i := range m.pipelines {
		out = append(out, Versus{
			Pipeline:       m.pipelines[i].spec.Name,
			Mean:           change(func(f *Figures) float64 { return f.Pipelines[i].Mean }),
			P99:            change(func(f *Figures) float64 { return f.Pipelines[i].P99 }),
			Attainment:     pair(func(a, b *Figures) float64 { return b.Pipelines[i].Attainment - a.Pipelines[i].Attainment }),
			ReplicaSeconds: change(func(f *Figures) float64 { return f.ReplicaSeconds }),
		})
	}
	return out
}

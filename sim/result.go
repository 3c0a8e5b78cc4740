package sim

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/policy"
)

// Schema is the version of the JSON of a Result.
const Schema = "stagecoach-sim/1"

// Result is what came of a scenario.
type Result struct {
	Schema    string         `json:"schema"`
	Scenario  string         `json:"scenario"`
	Duration  float64        `json:"duration_s"` // of the arrivals
	Warmup    float64        `json:"warmup_s"`   // of it, not counted
	Seed      uint64         `json:"seed"`       // the first one
	Seeds     int            `json:"seeds"`
	Pipelines []Offer        `json:"pipelines"`
	Stages    []string       `json:"stages"` // sorted
	Policies  []PolicyResult `json:"policies"`
}

// Offer is what a pipeline was asked.
type Offer struct {
	Name     string  `json:"name"`
	SLO      float64 `json:"slo_s,omitempty"`
	Arrivals string  `json:"arrivals"`
}

// PolicyResult is what came of a scenario under one policy.
type PolicyResult struct {
	Name      string           `json:"name"`
	Policies  policy.Names     `json:"policies"`
	Pipelines []PipelineResult `json:"pipelines"`
	Stages    []StageResult    `json:"stages"` // in the order of Result.Stages

	ReplicaSeconds Estimate `json:"replica_s"` // of all stages, from order to end
	Replicas       Estimate `json:"replicas"`  // on average over time
	Ticks          Estimate `json:"ticks"`
	Held           Estimate `json:"held"`    // domains that stayed as they were because a policy had no answer
	Refused        Estimate `json:"refused"` // plans that were none
	Complaint      string   `json:"complaint,omitempty"`
	Events         Estimate `json:"events"`        // of a run
	QNAError       Estimate `json:"qna_cv_error"`  // mean of |predicted − measured| / measured CV, of stages that are no entries
	SameError      Estimate `json:"same_cv_error"` // the same, had each stage the CV of its entry

	Versus []Versus `json:"versus_first,omitempty"` // a pipeline each; absent of the first policy
	Series Series   `json:"series"`                 // of the first seed
}

// PipelineResult is what requests of a pipeline went through.
type PipelineResult struct {
	Name       string         `json:"name"`
	Offered    Estimate       `json:"offered"`
	Attainment Estimate       `json:"slo_attainment"` // answered in time, of those that were offered
	Goodput    Estimate       `json:"goodput_per_s"`
	Mean       Estimate       `json:"mean_s"`
	P50        Estimate       `json:"p50_s"`
	P95        Estimate       `json:"p95_s"`
	P99        Estimate       `json:"p99_s"`
	Failed     Estimate       `json:"failed"`             // of those that were offered
	Failures   map[string]int `json:"failures,omitempty"` // by HTTP status, of all seeds
}

// StageResult is what calls of a stage went through.
type StageResult struct {
	Name        string         `json:"name"`
	Rate        Estimate       `json:"rate_per_s"`
	CV          Estimate       `json:"arrival_cv"`
	Predicted   Estimate       `json:"predicted_cv"` // by Whitt's QNA from what enters; of an entry: as measured
	Wait        Estimate       `json:"wait_mean_s"`
	WaitP99     Estimate       `json:"wait_p99_s"`
	Service     Estimate       `json:"service_mean_s"`
	ServiceCV   Estimate       `json:"service_cv"`
	Utilisation Estimate       `json:"utilisation"` // of the slots of ready replicas
	Replicas    Estimate       `json:"replicas"`
	Most        int            `json:"most_replicas"`
	Starts      map[string]int `json:"starts,omitempty"` // by path, of all seeds
	Deaths      int            `json:"deaths"`
	Evictions   int            `json:"evictions"`           // of its parameters
	Short       Estimate       `json:"short"`               // plans in which not all of its replicas had a place
	ShortWhy    string         `json:"short_why,omitempty"` // the first time
}

// Versus is the change to the first policy in parts of its value, seed by seed.
type Versus struct {
	Pipeline       string   `json:"pipeline"`
	Mean           Estimate `json:"mean"`
	P99            Estimate `json:"p99"`
	Attainment     Estimate `json:"slo_attainment"` // a difference
	ReplicaSeconds Estimate `json:"replica_s"`
}

// of estimates a figure of each run.
func of[R any](runs []R, figure func(R) float64) Estimate {
	values := make([]float64, len(runs))
	for i, r := range runs {
		values[i] = figure(r)
	}
	return NewEstimate(values)
}

// figures are the raw figures of one run.
type figures struct {
	rec    *recorder
	qna    []float64 // predicted CV, by stage
	errors [2]float64
	ticks, held, refused,
	events float64
	complaint string
}

func (f *figures) seconds() float64 { return float64(f.rec.to-f.rec.from) / 1e9 }

func (f *figures) replicaSeconds() float64 {
	sum := 0.0
	for _, s := range f.rec.stages {
		sum += s.replicaNs / 1e9
	}
	return sum
}

// summary puts the runs of a policy together.
func (m *Model) summary(p int, runs []*figures) PolicyResult {
	out := PolicyResult{
		Name: m.scenario.Policies[p].Name, Policies: m.policies[p].Names(),
		ReplicaSeconds: of(runs, (*figures).replicaSeconds),
		Replicas:       of(runs, func(f *figures) float64 { return f.replicaSeconds() / f.seconds() }),
		Ticks:          of(runs, func(f *figures) float64 { return f.ticks }),
		Held:           of(runs, func(f *figures) float64 { return f.held }),
		Refused:        of(runs, func(f *figures) float64 { return f.refused }),
		Events:         of(runs, func(f *figures) float64 { return f.events }),
		QNAError:       of(runs, func(f *figures) float64 { return f.errors[0] }),
		SameError:      of(runs, func(f *figures) float64 { return f.errors[1] }),
		Series:         runs[0].rec.series,
	}
	if i := slices.IndexFunc(runs, func(f *figures) bool { return f.complaint != "" }); i >= 0 {
		out.Complaint = runs[i].complaint
	}
	for i := range m.pipelines {
		out.Pipelines = append(out.Pipelines, m.pipelineResult(i, runs))
	}
	for i := range m.stages {
		out.Stages = append(out.Stages, m.stageResult(i, runs))
	}
	return out
}

func (m *Model) pipelineResult(i int, runs []*figures) PipelineResult {
	from := func(figure func(p *pipeRecorder) float64) Estimate {
		return of(runs, func(f *figures) float64 { return figure(f.rec.pipelines[i]) })
	}
	out := PipelineResult{
		Name:       m.pipelines[i].spec.Name,
		Offered:    from(func(p *pipeRecorder) float64 { return float64(p.offered) }),
		Attainment: from((*pipeRecorder).attainment),
		Goodput:    of(runs, func(f *figures) float64 { return float64(f.rec.pipelines[i].good) / f.seconds() }),
		Mean:       from(func(p *pipeRecorder) float64 { return p.sum.mean() }),
		P50:        from(func(p *pipeRecorder) float64 { return p.quantile(50) }),
		P95:        from(func(p *pipeRecorder) float64 { return p.quantile(95) }),
		P99:        from(func(p *pipeRecorder) float64 { return p.quantile(99) }),
		Failed:     from(func(p *pipeRecorder) float64 { return ratio(float64(p.offered)-p.sum.n, float64(p.offered)) }),
		Failures:   map[string]int{},
	}
	for _, f := range runs {
		for status, n := range f.rec.pipelines[i].failed {
			out.Failures[strconv.Itoa(status)] += int(n)
		}
	}
	return out
}

func (p *pipeRecorder) attainment() float64 { return ratio(float64(p.good), float64(p.offered)) }

// quantile is in seconds.
func (p *pipeRecorder) quantile(q float64) float64 {
	return float64(p.latency.ValueAtQuantile(q)) / 1e6
}

func (m *Model) stageResult(i int, runs []*figures) StageResult {
	from := func(figure func(s *stageRecorder) float64) Estimate {
		return of(runs, func(f *figures) float64 { return figure(f.rec.stages[i]) })
	}
	slots := float64(m.stages[i].spec.Slots)
	out := StageResult{
		Name:        m.stages[i].spec.Name,
		Rate:        of(runs, func(f *figures) float64 { return f.rec.stages[i].calls() / f.seconds() }),
		CV:          from(func(s *stageRecorder) float64 { return s.gaps.cv() }),
		Predicted:   of(runs, func(f *figures) float64 { return f.qna[i] }),
		Wait:        from(func(s *stageRecorder) float64 { return s.waits.mean() }),
		WaitP99:     from(func(s *stageRecorder) float64 { return float64(s.wait.ValueAtQuantile(99)) / 1e6 }),
		Service:     from(func(s *stageRecorder) float64 { return s.service.mean() }),
		ServiceCV:   from(func(s *stageRecorder) float64 { return s.service.cv() }),
		Utilisation: from(func(s *stageRecorder) float64 { return s.utilisation(slots) }),
		Replicas:    of(runs, func(f *figures) float64 { return f.rec.stages[i].replicaNs / 1e9 / f.seconds() }),
		Starts:      map[string]int{},
		Short:       from(func(s *stageRecorder) float64 { return float64(s.shorts) }),
	}
	for _, f := range runs {
		s := f.rec.stages[i]
		out.Most = max(out.Most, s.most)
		out.ShortWhy = cmp.Or(out.ShortWhy, s.why)
		out.Deaths += int(s.deaths)
		out.Evictions += int(s.evictions)
		for path, n := range s.starts {
			out.Starts[path] += int(n)
		}
	}
	return out
}

func (s *stageRecorder) utilisation(slots float64) float64 {
	return ratio(float64(s.worked), s.readyNs*slots)
}

// versus compares runs of a policy with those of the first one on the same seeds.
func (m *Model) versus(first, runs []*figures) []Versus {
	pair := func(change func(a, b *figures) float64) Estimate {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = change(first[i], runs[i])
		}
		return NewEstimate(values)
	}
	change := func(figure func(f *figures) float64) Estimate {
		return pair(func(a, b *figures) float64 { return ratio(figure(b)-figure(a), figure(a)) })
	}
	var out []Versus
	for i := range m.pipelines {
		p := func(f *figures) *pipeRecorder { return f.rec.pipelines[i] }
		out = append(out, Versus{
			Pipeline:       m.pipelines[i].spec.Name,
			Mean:           change(func(f *figures) float64 { return p(f).sum.mean() }),
			P99:            change(func(f *figures) float64 { return p(f).quantile(99) }),
			Attainment:     pair(func(a, b *figures) float64 { return p(b).attainment() - p(a).attainment() }),
			ReplicaSeconds: change((*figures).replicaSeconds),
		})
	}
	return out
}

package quart

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// The settings of the study.
const (
	budget     = 2 * work // GPUs that a chosen configuration may use on average
	candidates = 16       // configurations to try per contender
)

// multiples are the multiples of a model's time within which section 8.2 counts requests. The
// objective is one of them.
var multiples = []float64{1, 1.5, objective, 2.5, 3}

// Full returns the whole evaluation: all CVs, traces and contenders, the observations of the paper,
// and the sweeps. It opens traces by their paths in $STAGECOACH_DATA. If a trace is missing, its
// settings are listed in LeftOut. If a trace exists but cannot be read, Full returns an error.
func Full(open sim.Opener) (study.Study, error) {
	s, err := under(cvs, traces(), open)
	if err != nil {
		return s, err
	}
	s.LeftOut = append(s.LeftOut, study.LeftOut{Setting: "azure-functions", Why: noFunctions})
	s.Settings = append(s.Settings, observations()...)
	s.Contenders = contenders()
	s.More = sweeps()
	return s, nil
}

// Headline returns the part of [Full] whose results are reported first: all models at CV 1, 4 and
// 8, and three traces. Its contenders are ours, those with equal means, the oracle, and on one
// model the ablations. Those with fewer cores, which the paper's claims are about, are in [Full].
func Headline(open sim.Opener) (study.Study, error) {
	s, err := under([]float64{1, 4, 8}, slices.DeleteFunc(traces(), func(t trace) bool { return t.Name == "mooncake" }), open)
	s.Contenders = slices.DeleteFunc(contenders(), func(c study.Contender) bool {
		return c.Cores != mostCores && c.Name != noCPU
	})
	for i := range s.Contenders {
		if c := &s.Contenders[i]; c.Like != "" {
			in := c.In
			c.In = func(x study.Setting) bool { return x.Model == bert && in(x) }
		}
	}
	return s, err
}

// under returns the study with all models under gamma gaps and under traces, without contenders.
func under(cvs []float64, traces []trace, open sim.Opener) (study.Study, error) {
	s := base()
	s.Title = "QUART (ICDCS'24) against tuned opponents"
	for _, cv := range cvs {
		for _, m := range Models() {
			s.Settings = append(s.Settings, gammaSetting(m, cv))
		}
	}
	for _, t := range traces {
		models := slices.DeleteFunc(Models(), func(m Model) bool { return !slices.Contains(t.models, m.Name) })
		all, err := t.read(open)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			s.LeftOut = append(s.LeftOut, study.LeftOut{Setting: t.Name, Why: err.Error()})
		case err != nil:
			return s, fmt.Errorf("quart: %w", err)
		default:
			s.Settings = append(s.Settings, t.settings(all, models)...)
		}
	}
	return s, nil
}

// Quick returns a small part of [Full] for a look, and for tests: BERT-21B under even and under
// bursty arrivals, one minute each, on two seeds.
func Quick() study.Study {
	s := base()
	s.Title = "QUART (ICDCS'24) against tuned opponents, a quick look"
	s.About = fmt.Sprintf("A quick look at one model under even and under bursty arrivals, %v each after %v that do not count, against few contenders: too little to conclude from. Everything is simulated with the code of production.",
		quickCounted, quickWarmup)
	for _, cv := range []float64{1, 8} {
		x := gammaSetting(Models()[0], cv)
		whole := x.Scenario
		x.Scenario = func(train bool) sim.Scenario {
			s := whole(train)
			s.Warmup, s.Duration = quickWarmup, quickWarmup+quickCounted
			return s
		}
		s.Settings = append(s.Settings, x)
	}
	s.Contenders = slices.DeleteFunc(contenders(), func(c study.Contender) bool { return !slices.Contains(quick, c.Name) })
	s.Test.N = 2
	s.Train.N = 1
	return s
}

// The sizes of [Quick].
const (
	quickWarmup  = 20 * time.Second
	quickCounted = 40 * time.Second
)

// quick has the contenders of [Quick]. static8 has eight cores per stage: it shows how much of
// ours' advantage comes from more cores instead of better sizing.
var quick = []string{"static", "static8", "kpa", "oracle", oursName}

// base returns what both studies share.
func base() study.Study {
	return study.Study{
		Name: "quart", Ours: oursName, Budget: budget, Cores: mostCores, Candidates: candidates, Train: trainSeeds, Test: testSeeds, Multiples: multiples, Objective: objective,
		Judge: judge, Draw: draw, About: about,
		Goals: study.Goals{Latency: 0.85, LatencyIn: changing, Steady: 1.03, SteadyIn: steady, Attained: 0.85}, Expected: expectations(),
	}
}

// The groups in which load changes within minutes, and those with steady load: see [study.Goals].
var (
	changing = []string{"azure-code", sweepShape + "minute", sweepShape + "diurnal"}
	steady   = []string{"cv=1", sweepShape + "steady"}
)

// about says what the study asks, and about what. docs/adr/0044-quart-physics.md has the rest.
var about = fmt.Sprintf(`Does a pipeline of model stages that is sized, placed and kept warm stage by stage answer faster than with other autoscalers, for no more GPUs?
Everything is simulated with the code of production; nothing was measured on GPUs.

- Cluster: %d servers with %d GPUs, 108 cores and 1 TiB each. A replica of a stage has a GPU to itself. One model at a time has the cluster.
- Models: the paper's five in %d stages each, with the times of its Table 1. A stage declares %d cores and was measured with up to %d. Each begins with one replica.
- Load: on average the work of %d GPUs; gaps between requests are gamma with a CV of 0.1 to 8, or a public trace's. %v are simulated, of which the first is not counted; a request fails after %v.
- Cost: GPU-seconds from the order of a replica to its end. Idle cores cost nothing; core-seconds are shown.
- Contenders: fixed counts, Kubernetes' and Knative's autoscalers, INFless, InferLine, Cocktail, whole pipelines by our own sizing; and an oracle, which knows when requests will come and is a mark, not a bound. All were tuned alike.
- Equal means: ours may use eight cores per stage. So each contender is there twice: as published, with the cores that stages declare, and with eight.
- Verdicts: a claim "holds" if its 95 %% interval reaches the paper's figure, or better, and not "no difference"; "partly", if only the latter. GPU-seconds are in no claim's verdict, but among its circumstances, and in the goals.`,
	servers, perServer, stages, cores, mostCores, work, window, timeout)

package quart

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
	"github.com/stagecoach-serving/stagecoach/sim/study/cv"
)

// parts are what ours is made of; an ablation changes one.
type parts struct {
	names policy.Names // all defaults
	quart autoscaler.QuartConfig
	start func(sim.Bytes) sim.Start
	cv    cv.Predictor // of burstiness; nil: as measured
}

// put puts ours with a configuration into a scenario: the one place that knows what is tuned. Knobs are in the order of sizing.
func (p parts) put(s sim.Scenario, name string, k []float64) sim.Scenario {
	s = starts(s, p.start)
	s.Policies = []sim.Policy{{Name: name, Make: func(sim.Run) (policy.Set, error) {
		set, err := p.names.Choose()
		if err != nil {
			return set, err
		}
		set = policy.WithAllocator(set, "sizer", autoscaler.NewSizer(sized(k)))
		if p.names.Corrector == "" {
			corrector := p.quart
			corrector.Attainment = k[3]
			if p.cv != nil {
				return policy.WithCorrector(set, "quart", cv.NewCorrector(corrector, p.cv)), nil
			}
			set = policy.WithCorrector(set, "quart", autoscaler.NewQuart(corrector))
		}
		return set, nil
	}}}
	return s
}

// ours is what Stagecoach does when nothing is configured.
func ours() study.Contender {
	return compared(study.Contender{
		Name: oursName, Title: "Stagecoach", Source: "this repository's defaults, with the KeysManager", Space: sizing, Defaults: sizingDefaults, Ours: true,
		Apply: func(s sim.Scenario, k []float64) sim.Scenario { return parts{start: keptStart}.put(s, oursName, k) },
	})
}

// dissected are the loads that ablations are on, with the models that are tuned on: where parts have something to do. That of CPU is on all loads.
var dissected = []string{"cv=4", "cv=8", "azure-code"}

// noCPU is ours with the cores that stages declare and no more.
const noCPU = "no-cpu"

// ablations are ours without a part, with what ours was tuned to.
func ablations() []study.Contender {
	var out []study.Contender
	for _, a := range []struct {
		name, title string
		parts
	}{
		{"no-corrector", "no corrector, smoother or compensator", parts{start: keptStart, names: policy.Names{Corrector: "none"}}},
		{"no-pid", "no PID", parts{start: keptStart, quart: autoscaler.QuartConfig{NoPID: true}}},
		{"no-smooth", "no smoother", parts{start: keptStart, quart: autoscaler.QuartConfig{NoSmooth: true}}},
		{noCPU, "no more cores than declared", parts{start: keptStart, quart: autoscaler.QuartConfig{NoCPU: true}}},
		{"no-keysmanager", "no KeysManager: baselines' starts", parts{start: plainStart, names: policy.Names{Warmer: "none"}}},
		{"no-key-list", "no list of key stages: nothing is warmed", parts{start: keptStart, names: policy.Names{Warmer: "none"}}},
		{"no-qna", "the smoother takes burstiness to stay as it is", parts{start: keptStart, cv: cv.Persistence}},
	} {
		c := compared(study.Contender{
			Name: a.name, Title: a.title, Source: "ours without a part", Space: sizing, Defaults: sizingDefaults, Like: oursName, Ours: true,
			Apply: func(s sim.Scenario, k []float64) sim.Scenario { return a.put(s, a.name, k) },
		})
		c.In = func(s study.Setting) bool { // without CPU on all loads, so that sizing is seen apart from cores everywhere
			return s.Train && (a.name == noCPU || slices.Contains(dissected, s.Group))
		}
		out = append(out, c)
	}
	return out
}

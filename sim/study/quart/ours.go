package quart

import (
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// parts are the parts of ours. An ablation changes one.
type parts struct {
	names policy.Names // all defaults
	quart autoscaler.QuartConfig
	start func(sim.Bytes) sim.Start
	// switches of the sizer; its other fields are knobs
	sizer  autoscaler.Config
	warmer plan.Warmer // nil: by names
}

// put adds ours, with a configuration, to a scenario. k has the knobs in the order of sizing. All
// other settings are those of p.
func (p parts) put(s sim.Scenario, name string, k []float64) sim.Scenario {
	s = starts(s, p.start)
	s.Policies = []sim.Policy{{Name: name, Make: func(sim.Run) (policy.Set, error) {
		set, err := p.names.Choose()
		if err != nil {
			return set, err
		}
		cfg := sized(k)
		cfg.NoBurst, cfg.NoFollow = p.sizer.NoBurst, p.sizer.NoFollow
		set = policy.WithAllocator(set, "sizer", autoscaler.NewSizer(cfg))
		if p.warmer != nil {
			set = policy.WithWarmer(set, name, p.warmer)
		}
		if p.names.Corrector == "" {
			corrector := p.quart
			corrector.Attainment = k[3]
			set = policy.WithCorrector(set, "quart", autoscaler.NewQuart(corrector))
		}
		return set, nil
	}}}
	return s
}

// ours returns Stagecoach with its defaults.
func ours() study.Contender {
	return compared(study.Contender{
		Name: oursName, Title: "Stagecoach", Source: "this repository's defaults, with the KeysManager", Space: sizing, Defaults: sizingDefaults, Ours: true, Cores: mostCores,
		Apply: func(s sim.Scenario, k []float64) sim.Scenario { return parts{start: keptStart}.put(s, oursName, k) },
	})
}

// dissected has the loads of ablations: those on which the parts of ours make a difference.
// Ablations run only with the models on which contenders are tuned. The ablation no-cpu runs on all
// loads.
var dissected = []string{"cv=4", "cv=8", "azure-code"}

// The names of ablations that some settings ask for.
const (
	noCPU         = "no-cpu" // ours with only the cores that stages declare
	noKeysManager = "no-keysmanager"
)

// ablations returns ours without each part, with the configuration that ours was tuned to. No
// ablation is about predictions of burstiness. Only the smoother uses them, and it takes a replica
// only from a surplus that the sizer does not leave, so none could change a decision.
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
		{noKeysManager, "no KeysManager: baselines' starts", parts{start: plainStart, names: policy.Names{Warmer: "none"}}},
		{"no-key-list", "no list of key stages: all are kept alike", parts{start: keptStart, warmer: alike{}}},
		{"no-ahead", "no parameters loaded ahead of need", parts{start: keptStart, warmer: onlyNeeded{}}},
		{"no-follow", "no replicas started ahead of calls", parts{start: keptStart, sizer: autoscaler.Config{NoFollow: true}}},
		{"no-burst", "bursts waited for at each stage, not once", parts{start: keptStart, sizer: autoscaler.Config{NoBurst: true}}},
	} {
		c := compared(study.Contender{
			Name: a.name, Title: a.title, Source: "ours without a part", Space: sizing, Defaults: sizingDefaults, Like: oursName, Ours: true, Cores: mostCores,
			Apply: func(s sim.Scenario, k []float64) sim.Scenario { return a.put(s, a.name, k) },
		})
		if a.name == noCPU {
			c.Cores = cores
		}
		// without CPU on all loads, to separate the effect of sizing from that of cores
		c.In = func(s study.Setting) bool {
			short := strings.HasPrefix(s.Group, sweepMemory) && slices.Contains(keeping, a.name)
			return s.Train && (a.name == noCPU || slices.Contains(dissected, s.Group)) || short
		}
		out = append(out, c)
	}
	return out
}

package quart

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// The sweeps vary one condition at a time around a setting of the headline: BERT-21B at CV 4. Each
// point is a group of its own, so that contenders may be tuned on it.
const (
	sweptCV    = 4
	sweptGroup = "cv=4" // its configurations are used where a point was not tuned on
	sweepSeeds = 5
)

// The beginnings of the names of points' groups.
const (
	sweepStarts = "starts "
	sweepCores  = "cores "
	sweepGaps   = "gaps cv="
	sweepLoad   = "load "
	sweepShape  = "shape "
	sweepMemory = "memory "
)

// sweeps returns the study of all sweeps. Its contenders are ours and those with equal means. The
// ablations of the KeysManager's list run where memory is short.
func sweeps() *study.Study {
	s := base()
	s.Title, s.Judge, s.Draw = "One condition at a time", nil, drawSweeps
	s.About = fmt.Sprintf(`%s at CV %d and a load of %d GPUs, with one condition changed. A group is a point of a sweep.
Points without configurations of their own have those of another group, which is named.`, bert, sweptCV, work)
	s.Test.N = sweepSeeds
	for _, of := range []func(Model) []study.Setting{startPoints, corePoints, gapPoints, loadPoints, shapePoints, memoryPoints} {
		s.Settings = append(s.Settings, of(Models()[0])...)
	}
	s.Contenders = slices.DeleteFunc(contenders(), func(c study.Contender) bool {
		return c.Cores != mostCores || c.Oracle || c.Like != "" && !slices.Contains(keeping, c.Name)
	})
	return &s
}

// point returns the setting of a point. change changes the scenario of the usual load.
func point(m Model, group string, change func(*sim.Scenario)) study.Setting {
	name := m.Name + " " + group
	return study.Setting{
		Name: name, Model: m.Name, Group: group, Service: m.Time, Train: true, TunedAs: sweptGroup,
		Scenario: func(bool) sim.Scenario {
			s := m.scenario(name, renewal(m.Rate(), sweptCV))
			change(&s)
			return s
		},
	}
}

// startPoints vary the time of a start, which is equal for all contenders on all paths.
func startPoints(m Model) []study.Setting {
	var out []study.Setting
	for _, d := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second} {
		x := point(m, fmt.Sprintf("%s%g s", sweepStarts, d.Seconds()), func(s *sim.Scenario) {
			s.Warmup, s.Duration = s.Warmup+4*d, s.Duration+4*d // a run begins with one replica per stage
		})
		x.Then = func(s sim.Scenario) sim.Scenario {
			return starts(s, func(sim.Bytes) sim.Start { return sim.Start{Cold: d, Fork: d} })
		}
		out = append(out, x)
	}
	return out
}

// corePoints vary how much faster a stage is with more cores than it declares.
func corePoints(m Model) []study.Setting {
	var out []study.Setting
	for _, c := range []struct {
		name     string
		parallel float64 // Amdahl's parallel part
	}{{"linear", 1}, {"Amdahl 0.9", 0.9}, {"Amdahl 0.5", 0.5}, {"none", 0}} {
		out = append(out, point(m, sweepCores+c.name, func(s *sim.Scenario) { scaled(s, c.parallel) }))
	}
	return out
}

// scaled makes stages speed up with cores as by Amdahl's law. Times with the declared cores stay.
func scaled(s *sim.Scenario, parallel float64) {
	share := func(q float64) float64 { return 1 - parallel + parallel/q }
	for i := range s.Stages {
		profile := s.Stages[i].Service.Profile
		for k := range profile {
			q := int(profile[k].CPU) / 1000
			profile[k].Mean = scaledBy(profile[k].Mean, share(float64(q))/share(cores)/quota(q))
		}
	}
}

// gapPoints vary the CV of the gaps. Those of the headline have configurations there.
func gapPoints(m Model) []study.Setting {
	var out []study.Setting
	for _, cv := range []float64{1, 2, 3, 4, 6, 8} {
		text := strconv.FormatFloat(cv, 'g', -1, 64)
		x := point(m, sweepGaps+text, func(s *sim.Scenario) { s.Pipelines[0].Arrivals = renewal(m.Rate(), cv) })
		if slices.Contains(cvs, cv) {
			x.Train, x.TunedAs = false, "cv="+text
		}
		out = append(out, x)
	}
	return out
}

// loadPoints vary the work, with a budget in proportion. The cluster stays.
func loadPoints(m Model) []study.Setting {
	var out []study.Setting
	for _, gpus := range []float64{4, 8, 12, 18, 24} {
		x := point(m, fmt.Sprintf("%s%g GPUs", sweepLoad, gpus), func(s *sim.Scenario) {
			s.Pipelines[0].Arrivals = renewal(gpus/m.Time.Seconds(), sweptCV)
		})
		x.Train, x.Budget = gpus != work, budget/work*gpus
		out = append(out, x)
	}
	return out
}

// shapePoints vary how the rate changes over time. Gaps are by chance (CV 1).
func shapePoints(m Model) []study.Setting {
	var out []study.Setting
	for _, h := range shapes() {
		out = append(out, point(m, sweepShape+h.name, func(s *sim.Scenario) { h.put(s, m.Rate()) }))
	}
	return out
}

// keeping has the ablations that run where memory is short: what is kept matters only there.
var keeping = []string{"no-key-list", "no-ahead", noKeysManager}

// memoryPoints have servers that hold the parameters of three to five stages of eight, and a stage
// that takes three times as long as the others, so that stages need unequal counts. Elsewhere one
// model leaves most of a server's memory free, and nothing is ever evicted.
func memoryPoints(m Model) []study.Setting {
	minute := shapes()[2]
	var out []study.Setting
	for _, size := range []sim.Bytes{24, 32} {
		out = append(out, point(m, fmt.Sprintf("%s%d GiB", sweepMemory, size), func(s *sim.Scenario) {
			minute.put(s, m.Rate())
			s.Nodes[0].Memory = size * gib
			slow(s, len(s.Stages)/2, 3)
		}))
	}
	return out
}

// slow makes a stage take a multiple of its time, and all stages less, so that their sum stays.
func slow(s *sim.Scenario, stage int, most float64) {
	sum := 0.0
	for i := range s.Stages {
		sum += float64(s.Stages[i].Service.Profile[0].Mean)
	}
	less := sum / (sum + (most-1)*float64(s.Stages[stage].Service.Profile[0].Mean))
	for i := range s.Stages {
		by := less
		if i == stage {
			by *= most
		}
		profile := s.Stages[i].Service.Profile
		for k := range profile {
			profile[k].Mean = scaledBy(profile[k].Mean, by)
		}
	}
}

func scaledBy(d time.Duration, by float64) time.Duration { return time.Duration(float64(d) * by) }

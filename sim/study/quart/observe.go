package quart

import (
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// observed is the group of settings that repeat the observations of sections 2.1 and 3, with fixed
// replicas. Contenders are not compared on them.
const observed = "observed"

// The contenders of those settings.
const (
	oneEach   = "one-each"
	fourWhole = "four-whole"
)

const (
	fiveStages = bert + " in 5 stages, cv="
	fourOfIt   = bert + " in one piece, 4 replicas"
	// observedLoad is the share of time that the slowest of five stages computes. Section 3 does not
	// give the rate of requests.
	observedLoad = 0.8
	observedFor  = 10 * time.Minute // section 3.1
	// four replicas should keep up with this part of four times one's throughput
	stable = 0.95
)

// observations returns the settings that repeat sections 3 and 2.1. In section 3, BERT-21B runs in
// five stages on five GPUs, with arrivals of several CVs. In section 2.1, there are four replicas
// of the whole model, and nearly as many requests as they can serve.
func observations() []study.Setting {
	m := bert5()
	slowest := slices.Max(m.GiB) / m.Size() * m.Time.Seconds()
	var out []study.Setting
	for _, cv := range []float64{0.1, 1, 4} {
		out = append(out, observation(m, fiveStages+strconv.FormatFloat(cv, 'g', -1, 64), observedLoad/slowest, cv))
	}
	return append(out, observation(m, fourOfIt, stable*4/m.Time.Seconds(), 0.1))
}

func observation(m Model, name string, rate, cv float64) study.Setting {
	return study.Setting{
		Name: name, Model: m.Name, Group: observed, Service: m.Time,
		Scenario: func(bool) sim.Scenario {
			s := m.scenario(name, renewal(rate, cv))
			s.Duration = warmup + observedFor
			return s
		},
	}
}

// observers returns the contenders of the observations.
func observers() []study.Contender {
	is := func(c study.Contender, four bool) study.Contender {
		c.Source = "as many as the paper has"
		c.In = func(s study.Setting) bool { return s.Group == observed && (s.Name == fourOfIt) == four }
		return c
	}
	return []study.Contender{
		is(study.Contender{Name: oneEach, Title: "one replica a stage", Apply: func(s sim.Scenario, _ []float64) sim.Scenario {
			return rival(s, oneEach, always[struct{}](baseline.Static{Level: 1}))
		}}, false),
		is(study.Contender{Name: fourWhole, Title: "four replicas of the whole", Apply: func(s sim.Scenario, _ []float64) sim.Scenario {
			return rival(whole(s), fourWhole, always[struct{}](baseline.Static{Level: 4}))
		}}, true),
	}
}

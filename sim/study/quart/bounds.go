package quart

import (
	"fmt"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// Bounds returns the study of when it pays to scale each stage by itself. Its settings are the
// cells of four maps. A map varies two properties of a load. In each cell, ours is compared with
// contenders that do not scale stages by themselves. All contenders have the KeysManager's start
// costs, equal budgets, and equally many candidates. [WriteBounds] and the figures show the maps.
func Bounds() study.Study { return boundsOf(boundsMaps()) }

// QuickBounds returns a small part of [Bounds], for a quick look and for tests: four cells of each
// of two maps, with two runs of less than a minute per cell.
func QuickBounds() study.Study {
	maps := boundsMaps()[:2]
	for i := range maps {
		m := &maps[i]
		m.rows, m.columns = []axis{m.rows[1], m.rows[3]}, []axis{m.columns[0], m.columns[2]}
		m.base.warmup, m.base.counted = quickWarmup, quickCounted
	}
	s := boundsOf(maps)
	s.Title += ", a quick look"
	s.Candidates, s.Test.N = 3, 2
	return s
}

func boundsOf(maps []boundsMap) study.Study {
	s := study.Study{
		Name: "bounds", Title: "When scaling stage by stage pays", Ours: byStages, Budget: budget, Candidates: 8,
		Train: study.Seeds{First: trainSeeds.First, N: 1}, Test: study.Seeds{First: 1, N: 3},
		Multiples: multiples, Objective: objective, Draw: drawBounds,
	}
	under := map[string]condition{}
	for _, m := range maps {
		for _, row := range m.rows {
			for _, column := range m.columns {
				c, name := m.base, m.at(row, column)
				row.set(&c)
				column.set(&c)
				c.warmup += part(startWarmup, c.start)
				under[name] = c
				s.Settings = append(s.Settings, c.setting(name))
			}
		}
	}
	s.Contenders = boundsContenders(under)
	return s
}

// setting returns the setting of a cell of a map. Contenders are tuned on each.
func (c condition) setting(name string) study.Setting {
	return study.Setting{
		Name: name, Model: resnet, Group: name, Service: c.model().Time, Train: true, Budget: draining * c.budget(),
		Scenario: func(bool) sim.Scenario { return c.scenario(name) },
	}
}

// condition is the condition of a map's cell: [resnet] in equal parts, one of which may be slower.
type condition struct {
	work            float64       // GPUs that are busy on average
	cv              float64       // of gaps, which are gamma; not used for bursts
	burst           time.Duration // mean length of bursts; 0: no bursts
	start           float64       // start costs, in multiples of keptStart
	parts           int           // number of stages
	slow            float64       // factor of the time of one stage in the middle
	warmup, counted time.Duration
}

// usual has the values that a map does not vary.
var usual = condition{work: work, cv: 1, start: 1, parts: stages, slow: 1, warmup: 40 * time.Second, counted: 100 * time.Second}

// startWarmup is multiplied by condition.start and added to the warm-up. Slower starts need a
// longer warm-up, because a run begins with one replica of each stage.
const startWarmup = 4 * time.Second

// burstRate is the rate in a burst, as a multiple of the mean rate. Between bursts no request
// arrives. A burst needs more than the budget, because otherwise fixed replica counts would do.
const burstRate = 3

// length returns how long the counted part of a run takes: the time c.counted, or the time of one
// burst and the gap after it if that is longer.
func (c condition) length() time.Duration { return max(c.counted, burstRate*c.burst) }

// model returns the model that is served: WideResnet. It makes the fewest calls per second for its
// work, so its runs take the least time to simulate. It fits on one GPU, so it can also be served
// without a pipeline.
func (c condition) model() Model {
	m := Models()[4]
	size := m.Size()
	m.GiB = make([]float64, c.parts)
	for i := range m.GiB {
		m.GiB[i] = size / float64(c.parts)
	}
	return m
}

// scenario returns the scenario without what a contender adds.
func (c condition) scenario(name string) sim.Scenario {
	m := c.model()
	n := int(c.work/m.Time.Seconds()*c.length().Seconds() + 0.5)
	s := m.scenario(name, sim.Arrivals{Make: func(seed uint64) (arrivals.Source, error) { return c.arrive(n, seed), nil }})
	s.Warmup, s.Duration = c.warmup, c.warmup+c.length()
	for i := range s.Stages {
		st := &s.Stages[i]
		share := 1.0
		if i == c.parts/2 {
			share = c.slow
		}
		for k := range st.Service.Profile {
			p := &st.Service.Profile[k]
			p.Mean = time.Duration(float64(p.Mean) * share * float64(c.parts) / (float64(c.parts) - 1 + c.slow))
		}
	}
	return s
}

// starts returns the costs of a start. Every node already has the parameters in main memory: it
// would read them only once, and this study is not about that.
func (c condition) starts(b sim.Bytes) sim.Start {
	is := keptStart(b)
	return sim.Start{Cold: part(is.Fork, c.start), Fork: part(is.Fork, c.start), Parked: part(is.Parked, c.start)}
}

// boundsMap is a matrix of conditions.
type boundsMap struct {
	name, title           string
	rowTitle, columnTitle string
	rows, columns         []axis
	base                  condition
}

// axis is a value of a property that varies.
type axis struct {
	label string
	set   func(*condition)
}

// at returns the name of a cell's setting.
func (m *boundsMap) at(row, column axis) string {
	return fmt.Sprintf("%s: %s %s, %s %s", m.name, m.rowTitle, row.label, m.columnTitle, column.label)
}

// draining is the factor by which a contender may exceed the budget. Replicas that still finish
// their work after a plan has removed them count as well.
const draining = 1.02

// budget returns twice the work in GPUs, or all GPUs of the cluster if that is less.
func (c condition) budget() float64 { return min(2*c.work, gpus) }

// boundsMaps returns all maps.
func boundsMaps() []boundsMap {
	burst := func(c condition) condition {
		c.burst = 10 * time.Second
		return c
	}
	over := func(values []float64, unit string, set func(*condition, float64)) []axis {
		var out []axis
		for _, v := range values {
			out = append(out, axis{strconv.FormatFloat(v, 'g', -1, 64) + unit, func(c *condition) { set(c, v) }})
		}
		return out
	}
	cv := over(cvs, "", func(c *condition, v float64) { c.cv = v })
	start := over([]float64{0.1, 1, 3, 10, 30}, "×", func(c *condition, v float64) { c.start = v })
	return []boundsMap{
		{
			name: "load", title: "Load and burstiness", rowTitle: "work, GPUs", columnTitle: "CV of gaps", base: usual, columns: cv,
			rows: over([]float64{4, 8, 12, 24, 36}, "", func(c *condition, v float64) { c.work = v }),
		},
		{
			name: "bursts", title: "Length of bursts and start costs", rowTitle: "starts", columnTitle: "bursts of", base: burst(usual), rows: start,
			columns: over([]float64{0.3, 2, 10, 40, 160}, " s", func(c *condition, v float64) { c.burst = seconds(v) }),
		},
		{
			name: "stages", title: "Number of stages and start costs, bursts of 10 s", rowTitle: "starts", columnTitle: "stages", base: burst(usual), rows: start,
			columns: over([]float64{1, 2, 4, 8, 16}, "", func(c *condition, v float64) { c.parts = int(v) }),
		},
		{
			name: "uneven", title: "Unevenness of stages and burstiness", rowTitle: "slowest stage", columnTitle: "CV of gaps", base: usual, columns: cv,
			rows: over([]float64{1, 1.5, 2, 3, 4}, "×", func(c *condition, v float64) { c.slow = v }),
		},
	}
}

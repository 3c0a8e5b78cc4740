package quart

import (
	"fmt"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// Bounds asks where scaling stage by stage stops paying: four maps of a load, each of two things that vary, with who does without it. All
// have the KeysManager's starts, the same budget, and as many configurations tried. [WriteBounds] and the figures show the maps.
func Bounds() study.Study { return boundsOf(boundsMaps()) }

// QuickBounds is a small part of [Bounds] for a look, and for tests: two by two cells of two maps, and two runs of less than a minute.
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
		Train: study.Seeds{First: trainSeeds.First, N: 1}, Test: study.Seeds{First: testSeeds.First, N: 3},
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

// setting is a cell of a map; contenders are tuned on each.
func (c condition) setting(name string) study.Setting {
	return study.Setting{
		Name: name, Model: resnet, Group: name, Service: c.model().Time, Train: true, Budget: draining * c.budget(),
		Scenario: func(bool) sim.Scenario { return c.scenario(name) },
	}
}

// condition is what a cell of a map is simulated under: [resnet] in equal parts, one of which may be slower.
type condition struct {
	work            float64       // GPUs that are busy on average
	cv              float64       // of gaps, which are gamma; not used of bursts
	burst           time.Duration // mean length of bursts; 0: none, but gaps
	start           float64       // start costs, in those of keptStart
	parts           int           // stages
	slow            float64       // how many times as long as of any other stage one in the middle takes
	warmup, counted time.Duration
}

// usual is what does not vary on a map.
var usual = condition{work: work, cv: 1, start: 1, parts: stages, slow: 1, warmup: 40 * time.Second, counted: 100 * time.Second}

// startWarmup is what a warm-up is longer by, in start costs of today: a run begins with one replica of each stage.
const startWarmup = 4 * time.Second

// burstRate is the rate in a burst, in mean rates; between bursts nothing comes. It is above the budget: else counts that stay would do.
const burstRate = 3

// length is how long a run counts: as many bursts and gaps as fit, but at least one.
func (c condition) length() time.Duration { return max(c.counted, burstRate*c.burst) }

// model is what is served. Of the models WideResnet has the fewest calls a second for its work, so that runs take least. It fits on one GPU,
// so that it could be served without a pipeline as well.
func (c condition) model() Model {
	m := Models()[4]
	size := m.Size()
	m.GiB = make([]float64, c.parts)
	for i := range m.GiB {
		m.GiB[i] = size / float64(c.parts)
	}
	return m
}

// scenario is complete but for what a contender adds.
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

// starts are the costs of a start. Every node has the parameters in main memory: it would read them once, which is none of what is asked.
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

// axis is a value that varies.
type axis struct {
	label string
	set   func(*condition)
}

// at is the name of a cell's setting.
func (m *boundsMap) at(row, column axis) string {
	return fmt.Sprintf("%s: %s %s, %s %s", m.name, m.rowTitle, row.label, m.columnTitle, column.label)
}

// draining is what replicas that finish their work may take beyond the budget.
const draining = 1.02

// budget is twice the work, or all GPUs there are.
func (c condition) budget() float64 { return min(2*c.work, gpus) }

// boundsMaps are all of them.
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

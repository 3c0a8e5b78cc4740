package autoscaler

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

// fluid simulates a pipeline whose requests flow like a fluid: arrivals that replicas cannot serve
// stand in line and flow on later. In addition, tasks wait as in a queue with the true burstiness,
// which the snapshot does not show.
type fluid struct {
	s      plan.Snapshot
	stages []*fluidStage
	rate   func(sec float64) float64
	start  time.Duration // of a replica
	bursty float64       // the true (Ca²+Cs²)/2
	now    float64
	named  int

	sizer  Memory
	quart  QuartMemory
	policy Quart
	share  plan.Sharer
}

// fluidStage is a stage of a fluid.
type fluidStage struct {
	service float64 // seconds, with quota's CPU; see speed
	fixed   float64 // the part of service that CPU does not change
	line    float64
	demand  float64 // per second, faded over 5 s
	wait    float64 // seconds, faded over 15 s
	served  float64 // seconds, faded as in package dispatch
	seen    bool
	line0   plan.Line
}

const fluidStep = 0.1 // seconds

func newFluid(slo time.Duration, services ...time.Duration) *fluid {
	w := &fluid{start: 3 * time.Second, bursty: 1, policy: NewQuart(QuartConfig{})}
	w.s = plan.Snapshot{At: t0, Nodes: []plan.Node{{Name: "node", CPUMilli: 64000, Memory: 1 << 40}}}
	p := plan.Pipeline{Name: "p", SLO: slo}
	for i, d := range services {
		name := string(rune('a' + i))
		w.stages = append(w.stages, &fluidStage{service: d.Seconds(), served: d.Seconds()})
		w.s.Functions = append(w.s.Functions, plan.Function{Name: name, Revision: 1, Min: 1, Max: 40, Batch: 1, Slots: 1})
		w.add(&w.s.Functions[i], plan.Ready)
		p.Stages = append(p.Stages, name)
		if i > 0 {
			p.Edges = append(p.Edges, plan.Edge{From: i - 1, To: i})
		}
	}
	w.s.Pipelines = []plan.Pipeline{p}
	return w
}

func (w *fluid) add(f *plan.Function, state plan.State) {
	w.named++
	f.Replicas = append(f.Replicas, plan.Replica{Name: fmt.Sprint(w.named), Revision: 1, Node: "node", State: state, Since: w.s.At})
}

// profile gives a stage a quota, and service times measured with other quotas. A fifth of the
// service time does not depend on the quota.
func (w *fluid) profile(i int) {
	g, f := w.stages[i], &w.s.Functions[i]
	g.fixed, f.CPULimit = g.service/5, 500
	for _, q := range []int{250, 500, 1000, 2000} {
		mean := g.fixed + (g.service-g.fixed)*500/float64(q)
		f.Profile = append(f.Profile, plan.Point{CPUMilli: q, Batch: 1, Mean: time.Duration(mean * 1e9), N: 50})
	}
}

// speed returns a stage's service time in seconds with its present quota.
func (w *fluid) speed(i int) float64 {
	g, f := w.stages[i], &w.s.Functions[i]
	if f.CPUNow == 0 {
		return g.service
	}
	return g.fixed + (g.service-g.fixed)*float64(f.CPULimit)/float64(f.CPUNow)
}

// flow advances the fluid by one step.
func (w *fluid) flow() {
	in := w.rate(w.now)
	for i, g := range w.stages {
		ready, _ := w.s.Functions[i].Current()
		capacity := float64(ready) / w.speed(i)
		out := min(in+g.line/fluidStep, capacity)
		g.line = max(g.line+(in-out)*fluidStep, 0)
		g.demand += (in - g.demand) * (1 - math.Exp(-fluidStep/5))
		g.served += (w.speed(i) - g.served) * (1 - math.Exp(-fluidStep/serviceFade.Seconds()))
		if ready > 0 && out > 0.01 {
			wait := g.line/capacity + meanWait(min(in, 0.95*capacity), 1/w.speed(i), ready, 1, 2*w.bursty-1)
			g.wait += (wait - g.wait) * (1 - math.Exp(-fluidStep/5))
			g.seen = true
		}
		in = out
	}
	w.now += fluidStep
	w.s.At = t0.Add(time.Duration(math.Round(w.now*10)) * 100 * time.Millisecond)
}

// decide observes the fluid, decides and applies the decision.
func (w *fluid) decide(t *testing.T) {
	t.Helper()
	w.s.Rev++
	for i, g := range w.stages {
		f := &w.s.Functions[i]
		for k := range f.Replicas {
			if r := &f.Replicas[k]; r.State == plan.Starting && w.s.At.Sub(r.Since) >= w.start {
				r.State, r.Since = plan.Ready, w.s.At
			}
		}
		ready, _ := f.Current()
		f.Demand = plan.Demand{Known: true, Rate: g.demand, Last: w.s.At}
		f.Service = plan.Service{Known: true, Mean: time.Duration(g.served * 1e9)}
		f.Wait = plan.Wait{Known: g.seen, Mean: time.Duration(g.wait * 1e9), Oldest: time.Duration(g.line * w.speed(i) / float64(max(ready, 1)) * 1e9)}
		f.Waiting = int(g.line)
		f.Running = min(ready, int(g.demand*w.speed(i)+0.5))
	}
	d := plan.Domains(w.s)[0]
	a, sizer, err := NewSizer(Config{}).Allocate(w.s, d, w.sizer)
	if err != nil {
		t.Fatal(err)
	}
	a, quart, err := w.policy.Correct(w.s, d, a, w.quart)
	if err != nil {
		t.Fatal(err)
	}
	w.sizer, w.quart = sizer, quart
	if w.share != nil {
		if a, err = w.share.Share(w.s, a); err != nil {
			t.Fatal(err)
		}
	}
	for i, l := range a {
		f := &w.s.Functions[i]
		w.stages[i].line0 = l
		f.CPUNow = l.CPUMilli
		for len(f.Replicas) < l.Count {
			w.add(f, plan.Starting)
		}
		f.Replicas = f.Replicas[:l.Count]
	}
}

// run returns what happened as text: each second in which a count or quota changed, and every tenth
// second.
func (w *fluid) run(t *testing.T, seconds int) string {
	t.Helper()
	var out strings.Builder
	var last []plan.Line
	for sec := range seconds {
		for range 10 {
			w.flow()
		}
		w.decide(t)
		var lines []plan.Line
		for _, g := range w.stages {
			lines = append(lines, g.line0)
		}
		changed := func(i int) bool {
			return len(last) > 0 && (last[i].Count != lines[i].Count || last[i].CPUMilli != lines[i].CPUMilli)
		}
		some := len(last) == 0 || (sec+1)%10 == 0
		for i := range lines {
			some = some || changed(i)
		}
		if !some {
			last = lines
			continue
		}
		fmt.Fprintf(&out, "%3ds %5.1f/s", sec+1, w.rate(w.now-fluidStep))
		for i, g := range w.stages {
			f := &w.s.Functions[i]
			ready, _ := f.Current()
			fmt.Fprintf(&out, " | %s %2d of %2d, wait %4.0fms", f.Name, min(ready, g.line0.Count), g.line0.Count, g.wait*1000)
		}
		out.WriteString("\n")
		for i, l := range lines {
			if changed(i) {
				fmt.Fprintf(&out, "     %s: %d to %d: %s\n", l.Function, last[i].Count, l.Count, l.Why)
			}
		}
		last = lines
	}
	return out.String()
}

func TestQuartMatchesGoldenSeries(t *testing.T) {
	for name, build := range map[string]func() (*fluid, int){
		"step.txt": func() (*fluid, int) {
			w := newFluid(600*time.Millisecond, 50*time.Millisecond, 150*time.Millisecond, 80*time.Millisecond)
			w.bursty = 4
			w.rate = func(s float64) float64 { return pick(s < 20, 5, 30) }
			return w, 120
		},
		"burst.txt": func() (*fluid, int) {
			w := newFluid(time.Second, 100*time.Millisecond, 200*time.Millisecond)
			w.rate = func(s float64) float64 { return pick(s >= 10 && s < 20, 60, 10) }
			return w, 120
		},
		"decay.txt": func() (*fluid, int) {
			w := newFluid(600*time.Millisecond, 50*time.Millisecond, 150*time.Millisecond, 80*time.Millisecond)
			w.bursty = 8
			w.rate = func(s float64) float64 { return 40 * math.Exp(-s/60) }
			return w, 240
		},
		// The replicas that a burst leaves over are taken back while the count is still held. If b then
		// comes near its target, it gets CPU for a while.
		"cpu.txt": func() (*fluid, int) {
			w := newFluid(500*time.Millisecond, 40*time.Millisecond, 100*time.Millisecond)
			w.profile(1)
			w.rate = func(s float64) float64 { return pick(s < 20, 60, pick(s < 150, 26, 4)) }
			return w, 260
		},
		// On devices, idle CPU is given first, and replicas are removed later. At 60 s the node loses its
		// free cores. The count returns to its old value, and a little later to the value that is needed
		// without extra CPU. At 150 s the cores are back.
		"devices.txt": func() (*fluid, int) {
			w := newFluid(500*time.Millisecond, 40*time.Millisecond, 100*time.Millisecond)
			for i := range w.stages {
				w.profile(i)
				w.s.Functions[i].GPU = 1
			}
			w.rate = func(s float64) float64 {
				w.s.Nodes[0].CPUMilli = int(pick(s >= 60 && s < 150, 4000, 64000))
				return pick(s < 200, 50, 2)
			}
			return w, 300
		},
		// The same step, with a budget that is too small for it.
		"budget.txt": func() (*fluid, int) {
			w := newFluid(600*time.Millisecond, 50*time.Millisecond, 150*time.Millisecond, 80*time.Millisecond)
			w.s.Budget, w.share = 9, Gain{}
			w.rate = func(s float64) float64 { return pick(s < 20, 5, 30) }
			return w, 60
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, seconds := build()
			golden.Compare(t, name, w.run(t, seconds))
		})
	}
}

func pick(yes bool, a, b float64) float64 {
	if yes {
		return a
	}
	return b
}

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

// fluid is a pipeline whose requests are a fluid: what arrives beyond what replicas serve stands in line and flows on later. On top of
// that, tasks wait as they do in a queue of the true burstiness, of which the snapshot tells nothing.
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

// fluidStage is one of its stages.
type fluidStage struct {
	service float64 // seconds, with quota's worth of CPU; see speed
	fixed   float64 // the part of it that CPU does not change
	line    float64
	demand  float64 // a second, faded over 5 s
	wait    float64 // seconds, faded over 15 s
	served  float64 // seconds, faded as package dispatch does
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

// profile gives a stage a quota, of which a fifth of its service time does not depend, and what was measured with others.
func (w *fluid) profile(i int) {
	g, f := w.stages[i], &w.s.Functions[i]
	g.fixed, f.CPULimit = g.service/5, 500
	for _, q := range []int{250, 500, 1000, 2000} {
		mean := g.fixed + (g.service-g.fixed)*500/float64(q)
		f.Profile = append(f.Profile, plan.Point{CPUMilli: q, Batch: 1, Mean: time.Duration(mean * 1e9), N: 50})
	}
}

// speed is a stage's service time with the quota it has now.
func (w *fluid) speed(i int) float64 {
	g, f := w.stages[i], &w.s.Functions[i]
	if f.CPUNow == 0 {
		return g.service
	}
	return g.fixed + (g.service-g.fixed)*float64(f.CPULimit)/float64(f.CPUNow)
}

// flow lets a step of time pass.
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
			wait := g.line/capacity + meanWait(min(in, 0.95*capacity), 1/w.speed(i), ready, w.bursty)
			g.wait += (wait - g.wait) * (1 - math.Exp(-fluidStep/5))
			g.seen = true
		}
		in = out
	}
	w.now += fluidStep
	w.s.At = t0.Add(time.Duration(math.Round(w.now*10)) * 100 * time.Millisecond)
}

// decide observes, decides and applies.
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

// run writes what happened: each second in which a count or quota changed, and every tenth.
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

func TestSeries(t *testing.T) {
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
		// What a burst leaves over is taken back while it is still held; where that brings b near its target, it gets CPU for a while.
		"cpu.txt": func() (*fluid, int) {
			w := newFluid(500*time.Millisecond, 40*time.Millisecond, 100*time.Millisecond)
			w.profile(1)
			w.rate = func(s float64) float64 { return pick(s < 20, 60, pick(s < 150, 26, 4)) }
			return w, 260
		},
		// On devices idle CPU comes first, and replicas go after. At 60 s the node's cores are gone: there are as many replicas as before, and a
		// little later as many as that takes. At 150 s they are back.
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
		// The same step with a budget that is too small for it.
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

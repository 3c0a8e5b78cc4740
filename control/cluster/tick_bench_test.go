package cluster

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// ticker makes whole ticks of control with the default policies: observe, decide, validate, apply.
type ticker struct {
	w     *world
	l     *Local
	set   policy.Set
	m     policy.Memory
	parts map[string]time.Duration
}

// newTicker returns a ticker over a cluster with pipelines of five stages. All stages are busy and
// have the replicas that they need. Nodes and lines are fakes.
func newTicker(t testing.TB, stages int) *ticker {
	var nodes []string
	for i := range max(stages/20, 1) {
		nodes = append(nodes, fmt.Sprintf("n%04d", i))
	}
	w, l := newWorld(t, nodes...)
	w.crowd(stages)
	set, err := policy.Names{}.Choose()
	if err != nil {
		t.Fatal(err)
	}
	k := &ticker{w: w, l: l, set: set, parts: map[string]time.Duration{}}
	k.tick(t)
	for !w.staffed() {
		k.tick(t)
	}
	clear(k.parts)
	return k
}

func (k *ticker) tick(t testing.TB) {
	at := time.Now()
	took := func(part string) {
		now := time.Now()
		k.parts[part] += now.Sub(at)
		at = now
	}
	s, err := k.l.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	took("observe-ms")
	p, next, held, err := k.set.Decide(s, k.m)
	if err != nil || len(held) > 0 {
		t.Fatal(err, held)
	}
	took("decide-ms")
	if err := k.l.Apply(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	took("apply-ms")
	k.m = next
	k.w.forgetWarm()
}

// BenchmarkTick measures whole ticks. The goal is 5 ms at 1,000 stages.
func BenchmarkTick(b *testing.B) {
	for _, stages := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("stages=%d", stages), func(b *testing.B) {
			k := newTicker(b, stages)
			b.ReportAllocs()
			before := processorTime(b)
			for b.Loop() {
				k.tick(b)
			}
			b.ReportMetric((processorTime(b)-before).Seconds()*1e3/float64(b.N), "cpu-ms")
			for part, took := range k.parts {
				b.ReportMetric(took.Seconds()*1e3/float64(b.N), part)
			}
			b.StopTimer()
			if err := k.l.Close(b.Context()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// TestAllocationsPerTick bounds the number of allocations per stage in a tick. Most of a tick's
// time is spent on allocation and garbage collection. Unlike the time, the number does not depend
// on the machine's load.
func TestAllocationsPerTick(t *testing.T) {
	const stages, most = 200, 22
	k := newTicker(t, stages)
	if got := testing.AllocsPerRun(20, func() { k.tick(t) }) / stages; got > most {
		t.Errorf("a tick allocates %.1f times per stage, want at most %d", got, most)
	}
	if err := k.l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// processorTime returns the CPU time that the process has used so far. Unlike the clock, it does
// not count other processes.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// crowd replaces the world's functions by this many busy stages.
func (w *world) crowd(stages int) {
	w.specs, w.signals = nil, map[string]plan.Signals{}
	for i := range stages {
		f := spec(fmt.Sprintf("f%04d", i), 1)
		f.Max = 20
		w.specs = append(w.specs, f)
		w.signals[f.Key.String()] = plan.Signals{
			Demand:  plan.Demand{Known: true, Rate: 10 + float64(i%7), CV: 1 + float64(i%4)},
			Service: plan.Service{Known: true, Mean: time.Duration(100+i%50) * time.Millisecond, CV: 0.5},
			Wait:    plan.Wait{Known: true, Mean: 20 * time.Millisecond, P50: 10 * time.Millisecond, P95: 50 * time.Millisecond, P99: 80 * time.Millisecond},
			Busy:    plan.Busy{Known: true, Share: 0.6}, Waiting: i % 3, Running: 2,
		}
	}
	for i := 0; i+5 <= stages; i += 5 {
		p := pipeline.Pipeline{Name: fmt.Sprintf("p%04d", i), Namespace: "ns", SLO: 2 * time.Second, Entry: w.specs[i].Key.Name}
		for k := range 5 {
			s := pipeline.Stage{Function: pipeline.Function{Name: w.specs[i+k].Key.Name, Namespace: "ns"}}
			if k < 4 {
				s.Next = []pipeline.Edge{{To: w.specs[i+k+1].Key.Name}}
			}
			p.Stages = append(p.Stages, s)
		}
		w.pipelines = append(w.pipelines, p)
	}
}

// staffed reports whether there are replicas and all are ready.
func (w *world) staffed() bool {
	n := 0
	for _, c := range w.l.Counts() {
		if c.Starting > 0 {
			return false
		}
		n += c.Ready
	}
	return n >= 2*len(w.specs)
}

func (w *world) forgetWarm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.warmed = nil
}

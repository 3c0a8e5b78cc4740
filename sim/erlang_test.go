package sim

import (
	"errors"
	"io"
	"math"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
)

// nothing is an Opener of scenarios without traces.
func nothing(name string) (io.ReadCloser, error) { return nil, errors.New("no file " + name) }

func simulate(t testing.TB, scenario string) Result {
	t.Helper()
	s, err := Parse(strings.NewReader(scenario))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.Model(nothing)
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// queue is a scenario of one stage with a fixed number of replicas, and nothing but its line.
func queue(servers int, rate, cv, service, duration, seeds string) string {
	return strings.NewReplacer("SERVERS", itoa(servers), "RATE", rate, "CV", cv, "SERVICE", service, "DURATION", duration, "SEEDS", seeds).Replace(`
name: queue
duration: DURATION
warmup: 200s
seeds: SEEDS
hop: 0s
nodes: [{memory: 1Ti, cpu: 1000}]
pipelines: [{name: p, timeout: 9000h, arrivals: {rate: "RATE", cv: CV}}]
stages: [{name: s, service: SERVICE, min: SERVERS, max: SERVERS, queueLimit: 1000000}]
`)
}

func itoa(n int) string {
	return strings.TrimPrefix(time.Duration(n).String(), "")[:len(time.Duration(n).String())-2]
}

// TestFirst is replaced below.
func TestFirst(t *testing.T) {
	r := simulate(t, queue(1, "80", "1", "{mean: 10ms}", "2000s", "2"))
	p := r.Policies[0].Pipelines[0]
	if math.Abs(p.Mean.Mean-0.05) > 0.01 {
		t.Errorf("%+v", r.Policies[0])
	}
	t.Logf("%+v\n%+v", p, r.Policies[0].Stages[0])
}

func BenchmarkChain(b *testing.B) {
	text := `
name: bench
duration: 1000s
seeds: 1
nodes: [{memory: 1Ti, cpu: 1000, count: 4}]
pipelines: [{name: p, slo: 2s, arrivals: {rate: "200"}}]
x: 1
stages:
`
	text = strings.Replace(text, "x: 1\n", "", 1)
	for i := range 8 {
		next := ""
		if i < 7 {
			next = ", next: s" + string(rune('1'+i+1))
		}
		text += "- {name: s" + string(rune('1'+i)) + ", service: {mean: 20ms, dist: gamma, cv: 0.5}, max: 40" + next + "}\n"
	}
	s, err := Parse(strings.NewReader(text))
	if err != nil {
		b.Fatal(err)
	}
	m, err := s.Model(nothing)
	if err != nil {
		b.Fatal(err)
	}
	defer debug.SetGCPercent(debug.SetGCPercent(800)) // as the command does
	events, before := 0.0, processor(b)
	b.ReportAllocs()
	for b.Loop() {
		r, err := m.Run(b.Context(), nil)
		if err != nil {
			b.Fatal(err)
		}
		events += r.Policies[0].Events.Mean
	}
	b.ReportMetric(events/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(events/(processor(b)-before).Seconds(), "events/cpu-s")
}

// processor is the time that the process has used of processors, collecting garbage included.
func processor(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

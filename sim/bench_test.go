package sim

import (
	"fmt"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
)

// BenchmarkEvents measures simulated events per second, on a chain of eight stages with one
// decision per simulated second, on one goroutine.
//
//	go test -run '^$' -bench Events -benchtime 3x -cpuprofile cpu.out ./sim
func BenchmarkEvents(b *testing.B) {
	for _, rate := range []int{20, 200, 2000} {
		b.Run(fmt.Sprintf("rate=%d", rate), func(b *testing.B) {
			m := model(b, chain(8, rate))
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
			// includes the time of garbage collection
			b.ReportMetric(events/(processor(b)-before).Seconds(), "events/cpu-s")
		})
	}
}

// chain returns a scenario of stages in a row, for 400,000 calls.
func chain(stages, rate int) string {
	var b strings.Builder
	fmt.Fprintf(&b, `
duration: %ds
seeds: 1
nodes: [{memory: 1Ti, cpu: 1000, count: 4}]
pipelines: [{name: p, slo: 2s, arrivals: {rate: "%d"}}]
stages:
`, 400_000/stages/rate, rate)
	for i := range stages {
		next := ""
		if i < stages-1 {
			next = fmt.Sprintf("next: s%02d, ", i+1)
		}
		fmt.Fprintf(&b, "- {name: s%02d, %sservice: {dist: gamma, mean: 20ms, cv: 0.5}, max: 100}\n", i, next)
	}
	return b.String()
}

// processor returns the processor time that the process has used.
func processor(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

package control

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestLoopComparesPredictions runs a function whose tasks wait longer than predicted. The loop logs
// that once, exports the ratio, and forgets the function when it is removed.
func TestLoopComparesPredictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"), function("idle"))
		wait := time.Second
		f.observe = func(context.Context) error {
			if len(f.s.Functions) == 0 {
				return nil
			}
			is := &f.s.Functions[0]
			is.Replicas = []plan.Replica{{Name: "r", Revision: 1, Node: "n", State: plan.Ready}}
			is.Demand, is.Wait.Known = plan.Demand{Known: true, Rate: 50, CV: 1, Last: time.Now()}, true
			is.Service.Known, is.Service.Mean, is.Service.CV = true, 10*time.Millisecond, 1
			is.Wait.Left.N, is.Wait.Left.Seconds = is.Wait.Left.N+50, is.Wait.Left.Seconds+50*wait.Seconds()
			is.Service.Served.N, is.Service.Served.Seconds = is.Service.Served.N+50, is.Service.Served.Seconds+50*0.01
			return nil
		}
		change := func(do func()) {
			f.mu.Lock()
			defer f.mu.Unlock()
			do()
		}
		l, log, stop := start(t, f, nil)
		defer stop()
		logged := func(far, again int) {
			t.Helper()
			text := log.String()
			if strings.Count(text, "far off") != far || strings.Count(text, "holds again") != again {
				t.Errorf("%s\nwant %d and %d lines", text, far, again)
			}
		}
		ratio := func() float64 {
			r := prometheus.NewRegistry()
			r.MustRegister(newModelErrors(l))
			families, err := r.Gather()
			if err != nil || len(families) != 1 || families[0].GetName() != "stagecoach_model_error_ratio" || len(families[0].GetMetric()) != 1 {
				return 0
			}
			return families[0].GetMetric()[0].GetGauge().GetValue()
		}
		time.Sleep(59 * time.Second)
		if got := ratio(); got != 0 {
			t.Errorf("a ratio of %g in the first minute", got)
		}
		time.Sleep(31 * time.Second)
		// M/M/1 at load 0.5: a mean sojourn of 20 ms, and 1,010 ms measured.
		if got := ratio(); got < 50.4 || got > 50.6 || l.ModelErrors()["f"].Off {
			t.Errorf("a ratio of %g, %+v, want 50.5, and nothing is off yet", got, l.ModelErrors())
		}
		logged(0, 0)
		time.Sleep(5 * time.Minute)
		logged(1, 0)
		if text := log.String(); !strings.Contains(text, "function=f predicted=20ms measured=1.01s ratio=50.5 tasks=3") || !l.ModelErrors()["f"].Off {
			t.Errorf("%s", text)
		}
		change(func() { wait = 10 * time.Millisecond })
		time.Sleep(2 * time.Minute)
		logged(1, 1)
		if got := ratio(); got < 0.99 || got > 1.01 {
			t.Errorf("a ratio of %g, want 1", got)
		}
		change(func() { f.s.Functions = nil })
		time.Sleep(2 * time.Second)
		if got := ratio(); got != 0 || len(l.ModelErrors()) != 0 {
			t.Errorf("a ratio of %g of a removed function", got)
		}
	})
}

package autoscaler

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestTermsPredictForTheReadyReplicas checks the prediction against the textbook's formula. Neither
// starting replicas nor the present line count.
func TestTermsPredictForTheReadyReplicas(t *testing.T) {
	f := timed("f", 100*ms)
	f.Slots, f.Demand, f.Service.CV = 1, plan.Demand{Known: true, Rate: 15, CV: 1}, 1
	f.Replicas = []plan.Replica{{Revision: 1, State: plan.Ready}, {Revision: 1, State: plan.Ready}, {Revision: 1, State: plan.Starting}, {Revision: 1, State: plan.Draining}}
	f.Demand.Ahead = 19 // the rate to expect does not count
	f.Waiting, f.Wait = 50, plan.Wait{Known: true, Mean: 200 * ms}
	got := NewTerms(&f)
	// Erlang's C for 2 servers at load 0.75 is 0.642857: Cooper 1981.
	want := 0.1 + 0.642857/(20-15)
	if math.Abs(got.Stay.Seconds()-want) > 1e-5 || got.Load != 0.75 || got.Batch != 100*ms || got.Stayed != 300*ms || got.NoStay != "" || got.Bounded != nil {
		t.Errorf("%+v, want a sojourn of %g s, load 0.75, 300 ms measured", got, want)
	}
	if part, ok := got.Error(); !ok || math.Abs(part-(0.3/want-1)) > 1e-5 {
		t.Errorf("error %g, %v, want %g", part, ok, 0.3/want-1)
	}
	f.Slots = 2
	if slots := NewTerms(&f); slots.Load != 0.375 || slots.Stay >= got.Stay {
		t.Errorf("%+v with two slots each, want half of the load", slots)
	}
	batches := batched("f")
	batches.Replicas = f.Replicas
	if got := NewTerms(&batches); got.Batch != 80*ms || got.Stay < 80*ms || got.Load != 0.4 {
		t.Errorf("%+v of batches, want their whole time", got)
	}
}

// TestTermsWaitForBatches checks the prediction for batches that wait for more calls. The waits are
// counted by hand: of calls that come evenly, the first one waits for the whole time.
func TestTermsWaitForBatches(t *testing.T) {
	for name, tc := range map[string]struct {
		rate  float64
		batch int
		wait  time.Duration
		want  float64 // seconds in the batch's wait; 0: as without one
	}{
		"two join":       {20, 64, 100 * ms, (0.1 + 0.05 + 0.05) / 3},
		"nobody joins":   {0.001, 64, 100 * ms, 0.1},
		"it fills":       {100, 5, 100 * ms, (0.04 + 0.03 + 0.02 + 0.01 + 0) / 5},
		"no wait":        {20, 64, 0, 0},
		"no batches":     {20, 1, 100 * ms, 0},
		"longer in line": {480, 64, 1 * ms, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := timed("f", 2*ms)
			f.Slots, f.Demand, f.Service.CV, f.Batch = 1, plan.Demand{Known: true, Rate: tc.rate, CV: 1}, 1, tc.batch
			f.Replicas = []plan.Replica{{Revision: 1, State: plan.Ready}}
			without := NewTerms(&f).Stay.Seconds()
			f.BatchWait = tc.wait
			want := 0.002 + tc.want
			if tc.want == 0 {
				want = without
			}
			if got := NewTerms(&f).Stay.Seconds(); math.Abs(got-want) > 1e-4 {
				t.Errorf("%g s, want %g; without a wait %g", got, want, without)
			}
		})
	}
}

// TestTermsSayWhatTheyLack checks the reasons for missing predictions, and the bounds of inputs.
func TestTermsSayWhatTheyLack(t *testing.T) {
	falling := []plan.Point{{CPUMilli: 1000, Batch: 1, Mean: 60 * ms, N: 5}, {CPUMilli: 1000, Batch: 8, Mean: 30 * ms, N: 5}}
	for name, tc := range map[string]struct {
		change  func(*plan.Function)
		none    string // why there is no prediction
		bounded string // by which texts, in order
	}{
		"all is well":        {func(*plan.Function) {}, "", ""},
		"no service time":    {func(f *plan.Function) { f.Service = plan.Service{} }, "service time is not known", ""},
		"no rate":            {func(f *plan.Function) { f.Demand = plan.Demand{} }, "rate is not known", ""},
		"a rate of zero":     {func(f *plan.Function) { f.Demand.Rate = 0 }, "nothing arrives", ""},
		"a negative rate":    {func(f *plan.Function) { f.Demand.Rate = -1 }, "nothing arrives", "the rate is no number"},
		"a rate of NaN":      {func(f *plan.Function) { f.Demand.Rate = math.NaN() }, "nothing arrives", "the rate is no number"},
		"no replica":         {func(f *plan.Function) { f.Replicas = f.Replicas[1:] }, "no replica is ready", ""},
		"overload":           {func(f *plan.Function) { f.Demand.Rate = 9.9 }, "overloaded", ""},
		"an infinite rate":   {func(f *plan.Function) { f.Demand.Rate = math.Inf(1) }, "overloaded", ""},
		"a large CV":         {func(f *plan.Function) { f.Demand.CV = 12 }, "", "arrivals is 12, and counts as 10"},
		"a negative CV":      {func(f *plan.Function) { f.Demand.CV = -1 }, "", "arrivals is no positive number, and counts as 1"},
		"services of NaN":    {func(f *plan.Function) { f.Service.CV = math.NaN() }, "", "service times is no positive number"},
		"falling times":      {func(f *plan.Function) { f.Batch, f.Profile = 8, falling }, "", "a batch of 8 takes less"},
		"chosen from them":   {func(f *plan.Function) { f.Batch, f.AutoBatch, f.Profile = 8, 8, falling }, "", ""},
		"no batches of them": {func(f *plan.Function) { f.Batch, f.Profile = 4, falling }, "", ""},
		"measured batches": {func(f *plan.Function) {
			f.Batch, f.Profile, f.Service.Batches = 8, falling, []plan.Batched{{Size: 8, Mean: 200 * ms, N: 9}}
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := timed("f", 100*ms)
			f.Slots, f.Batch, f.Demand, f.Service.CV = 1, 1, plan.Demand{Known: true, Rate: 5, CV: 1}, 1
			f.Replicas = []plan.Replica{{Revision: 1, State: plan.Ready}, {Revision: 1, State: plan.Starting}}
			f.Wait = plan.Wait{Known: true, Mean: 10 * ms}
			tc.change(&f)
			got := NewTerms(&f)
			if tc.none == "" && (got.NoStay != "" || got.Stay < 100*ms || got.Stay > time.Minute) || !strings.Contains(got.NoStay, tc.none) {
				t.Errorf("%v, %q, want %q", got.Stay, got.NoStay, tc.none)
			}
			if _, ok := got.Error(); ok != (tc.none == "") {
				t.Errorf("an error: %t", ok)
			}
			if text := strings.Join(got.Bounded, "; "); !strings.Contains(text, tc.bounded) || (text == "") != (tc.bounded == "") {
				t.Errorf("%q, want %q", text, tc.bounded)
			}
		})
	}
}

package dispatch

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestCVOfBursts checks the CV of the gaps between arrivals for a stage that gets one call per
// item. Its arrivals come in bursts of n. Each burst has one long gap before it, and n-1 gaps of
// almost zero inside. If long gaps are exponential, the squared CV of all gaps is 2n-1. If they are
// constant, it is n-1.
func TestCVOfBursts(t *testing.T) {
	gap := 20 * time.Microsecond // between the calls of a burst
	for _, tc := range []struct {
		burst int
		every time.Duration
		even  bool
		want  float64
	}{
		{5, 2 * time.Second, false, math.Sqrt(9)},
		{20, time.Second, false, math.Sqrt(39)},
		{20, 100 * ms, false, math.Sqrt(39)},
		{20, time.Second, true, math.Sqrt(19)},
		{20, 10 * time.Second, true, math.Sqrt(19)},
		{100, 3 * time.Second, true, math.Sqrt(99)},
	} {
		var a arrivals
		rnd := rand.New(rand.NewPCG(7, uint64(tc.burst)))
		now, looks, sum := time.Duration(0), 0.0, 0.0
		for now < 20*time.Minute {
			next := tc.every
			if !tc.even {
				next = time.Duration(rnd.ExpFloat64() * float64(tc.every))
			}
			now += next
			for i := range tc.burst {
				a.add(at(now + time.Duration(i)*gap))
			}
			if d := a.read(at(now + next/2)); now > 2*time.Minute {
				sum, looks = sum+d.CV, looks+1
			}
		}
		if got := sum / looks; !near(got/tc.want, 1, 0.08) {
			t.Errorf("%d calls each %v: CV %.2f, want %.2f", tc.burst, tc.every, got, tc.want)
		}
	}
}

// TestOneBurstHasNoCV checks that one burst has no CV, however many calls it has.
func TestOneBurstHasNoCV(t *testing.T) {
	var a arrivals
	burst := func(from time.Duration) {
		for i := range 1000 {
			a.add(at(from + time.Duration(i)*7*time.Microsecond))
		}
	}
	for i, want := range []bool{false, false, true, true} {
		burst(time.Duration(i) * 5 * time.Second)
		if d := a.read(at(time.Duration(i)*5*time.Second + 100*ms)); d.CV > 0 != want || !d.Known {
			t.Errorf("after %d bursts: %+v, want a CV: %v", i+1, d, want)
		}
	}
	if d := a.read(at(10 * time.Minute)); d.CV != 0 {
		t.Errorf("CV %v ten minutes later, want it forgotten", d.CV)
	}
}

// TestCVOfGamma checks that the measured CV is 4 for gamma arrivals with a CV of 4, which
// benchmarks send.
func TestCVOfGamma(t *testing.T) {
	const cv = 4.0
	for _, rate := range []float64{5, 20} {
		var a arrivals
		rnd := rand.New(rand.NewPCG(11, uint64(rate)))
		now, look, looks, sum := 0.0, 60.0, 0.0, 0.0
		for now < 3600 {
			// A gamma variate of shape 1/16 by Johnk's method: with E exponential and U, V uniform,
			// X = U^(1/a) and Y = V^(1/(1-a)).
			x, y := 1.0, 1.0
			for x+y > 1 {
				x, y = math.Pow(rnd.Float64(), cv*cv), math.Pow(rnd.Float64(), 1/(1-1/(cv*cv)))
			}
			now += rnd.ExpFloat64() * x / (x + y) * cv * cv / rate
			for ; look < now; look++ {
				sum, looks = sum+a.read(at(time.Duration(look*1e9))).CV, looks+1
			}
			a.add(at(time.Duration(now * 1e9)))
		}
		if got := sum / looks; !near(got, cv, 0.4) {
			t.Errorf("at %v/s: mean CV %.2f, want %v", rate, got, cv)
		}
	}
}

// TestCVForgetsARateStep checks that soon after the rate has changed tenfold, the CV reflects
// the new traffic alone.
func TestCVForgetsARateStep(t *testing.T) {
	var a arrivals
	rnd := rand.New(rand.NewPCG(5, 5))
	drive(&a, rnd, 2, 0, time.Minute, func(time.Duration) {})
	worst, after := 0.0, 0.0
	drive(&a, rnd, 20, time.Minute, 3*time.Minute, func(now time.Duration) {
		worst = max(worst, a.read(at(now)).CV)
		if now == 150*time.Second {
			after = a.read(at(now)).CV
		}
	})
	if worst > 4 || !near(after, 1, 0.25) {
		t.Errorf("CV %.2f at most and %.2f after 90 s, want at most 4 and about 1", worst, after)
	}
}

func TestWaitsLeaveTheWindow(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	now := epoch
	c.Step(now, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 1})
	if got := c.Signals(now).Wait; got != (plan.Wait{}) {
		t.Errorf("%+v before any task, want nothing known", got)
	}
	// Ten tasks at once, 100 ms each: they wait 0, 100, … 900 ms.
	for i := range 10 {
		c.Step(now, submit(fmt.Sprint(i), 0))
	}
	for i := range 9 {
		if got := c.Signals(now.Add(50 * ms)).Wait; got.Oldest != time.Duration(i)*100*ms+50*ms {
			t.Errorf("after %d answers the oldest waits %v, want %v", i, got.Oldest, time.Duration(i)*100*ms+50*ms)
		}
		now = now.Add(100 * ms)
		c.Step(now, answer("r1", uint64(i+1), 0))
	}
	got := c.Signals(now).Wait
	// Later tasks weigh a little more.
	if !got.Known || !near(got.Mean.Seconds(), 0.45, 0.03) || got.Oldest != 0 ||
		!near(got.P50.Seconds(), 0.4, 0.4/64) || !near(got.P95.Seconds(), 0.9, 0.9/64) || !near(got.P99.Seconds(), 0.9, 0.9/64) {
		t.Errorf("%+v, want a mean of 450ms, a median of 400ms, 900ms at p95 and p99, and none that waits", got)
	}
	// The wait of a task that expires in the line counts too.
	c.Step(now, submit("late", 2*time.Second+now.Sub(epoch)))
	now = now.Add(3 * time.Second)
	c.Step(now, Tick{})
	if got := c.Signals(now).Wait; got.P99 < 2900*ms {
		t.Errorf("%+v, want 3s at p99", got)
	}
	// The tallies do not fade. Ten tasks waited 0 to 900 ms, and one 3 s. Eight of the nine that were
	// answered took 100 ms each; the first on a replica does not count.
	is := c.Signals(now.Add(16 * time.Second))
	if left, served := is.Wait.Left, is.Service.Served; left.N != 11 || !near(left.Seconds, 4.5+3, 1e-9) || served.N != 8 || !near(served.Seconds, 0.8, 1e-9) {
		t.Errorf("%+v left and %+v were served, want 11 in 7.5 s and 8 in 0.8 s", left, served)
	}
	if got := is.Wait; got != (plan.Wait{Left: got.Left}) {
		t.Errorf("%+v 16 s later, want nothing known", got)
	}
	now = now.Add(time.Minute)
	c.Step(now, answer("r1", 10, 0))
	c.Step(now, submit("alone", 0))
	if got := c.Signals(now).Wait; got != (plan.Wait{Known: true, Left: got.Left}) {
		t.Errorf("%+v, want that of a task that did not wait, and nothing of those a minute ago", got)
	}
}

// lifo is a task.Orderer: last in, first out.
type lifo struct{}

func (lifo) Key(v *task.View, _ *task.Task) (float64, time.Time) {
	return -float64(v.Now.Sub(epoch)), time.Time{}
}

// TestOldestTaskInAnyOrder checks that the oldest task is found even if the order is not that of
// arrival.
func TestOldestTaskInAnyOrder(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns", Orderer: lifo{}})
	for i := range 5 {
		c.Step(at(time.Duration(i)*time.Second), submit(fmt.Sprint(i), 0))
	}
	if got := c.Signals(at(5 * time.Second)).Wait; got.Oldest != 5*time.Second || got.Known {
		t.Errorf("%+v, want 5s, and nothing known of those that have left", got)
	}
}

func TestBusyIsTheShareOfTakenSlots(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	share := func(now time.Duration) float64 {
		t.Helper()
		b := c.Signals(at(now)).Busy
		if !b.Known {
			t.Errorf("at %v it is not known how busy replicas are", now)
		}
		return b.Share
	}
	if b := c.Signals(epoch).Busy; b.Known {
		t.Errorf("%+v without replicas, want unknown", b)
	}
	c.Step(epoch, ReplicaUp{Name: "r1", Slots: 2, MaxBatch: 4})
	if b := c.Signals(at(100 * ms)).Busy; b.Known {
		t.Errorf("%+v after 100 ms, want unknown", b)
	}
	if got := share(20 * time.Second); got != 0 {
		t.Errorf("%v busy, want 0", got)
	}
	c.Step(at(20*time.Second), submit("a", 0))
	if got := share(36 * time.Second); !near(got, 0.5, 1e-9) {
		t.Errorf("%v busy with one of two slots taken for 16 s, want 0.5", got)
	}
	c.Step(at(36*time.Second), submit("b", 0))
	if got := share(52 * time.Second); !near(got, 1, 1e-9) {
		t.Errorf("%v busy with both taken for 16 s, want 1", got)
	}
	// 5 s with both replicas and 5 s with one, which weigh less. Weights: 1-e^-1 for the last 5 s,
	// e^-1-e^-2 for the 5 s before, and so on over 15 s.
	c.Step(at(57*time.Second), answer("r1", 1, 0))
	e := math.Exp(-1)
	if got, want := share(62*time.Second), 1-0.5*(1-e)/(1-e*e*e); !near(got, want, 0.02) {
		t.Errorf("%v busy, want %.3f", got, want)
	}
	// A draining replica and its slots do not count.
	c.Step(at(62*time.Second), ReplicaUp{Name: "r2", Slots: 2, MaxBatch: 1})
	c.Step(at(62*time.Second), ReplicaDrain{"r1"})
	if got := share(78 * time.Second); got != 0 {
		t.Errorf("%v busy, want 0: what drains does not count", got)
	}
	c.Step(at(78*time.Second), Credit{Replica: "r2", Slots: 1})
	c.Step(at(78*time.Second), submit("c", 0))
	if got := share(94 * time.Second); !near(got, 1, 1e-9) {
		t.Errorf("%v busy with its one slot taken, want 1", got)
	}
	c.Step(at(94*time.Second), ReplicaDown{Name: "r2", Cause: "gone"})
	if b := c.Signals(at(110 * time.Second)).Busy; b.Known {
		t.Errorf("%+v without replicas for 16 s, want unknown", b)
	}
	if c.lanes[0].busy != 0 || c.lanes[0].slots != 0 {
		t.Errorf("%d of %d slots are taken, want none of none", c.lanes[0].busy, c.lanes[0].slots)
	}
}

func TestServiceByBatchSize(t *testing.T) {
	var s services
	for range 30 {
		s.add(epoch, 10*ms, 1)
		s.add(epoch, 22*ms, 3)
		s.add(epoch, 26*ms, 4)
	}
	want := []plan.Batched{{Size: 1, Mean: 10 * ms, N: 20}, {Size: 4, Mean: 24 * ms, N: 20}}
	got := s.read().Batches
	if len(got) != 2 || got[0] != want[0] || got[1].N != 20 || !near(got[1].Mean.Seconds(), 0.024, 0.0005) || got[1].Size < 3 || got[1].Size > 4 {
		t.Errorf("%+v, want about %+v", got, want)
	}
	s.add(epoch, -time.Hour, 100_000)
	if got := s.read(); got.Mean < 0 || got.Batches[2].Size != 100_000 {
		t.Errorf("%+v after an absurd batch", got)
	}
}

// TestAClockThatGoesBackwardsStandsStill checks that no figure includes time that did not pass.
func TestAClockThatGoesBackwardsStandsStill(t *testing.T) {
	var a arrivals
	rnd := rand.New(rand.NewPCG(2, 2))
	drive(&a, rnd, 20, 0, time.Minute, func(time.Duration) {})
	before := a.read(at(time.Minute))
	for _, back := range []time.Duration{time.Millisecond, time.Minute, 24 * time.Hour} {
		if d := a.read(at(time.Minute - back)); !near(d.Rate, before.Rate, 0.5) || d.CV != before.CV {
			t.Errorf("%+v as of %v before, want %+v", d, back, before)
		}
	}
	a.add(at(-time.Hour))
	if d := a.read(at(time.Minute)); !d.Known || !near(d.Rate, before.Rate, 1) {
		t.Errorf("%+v after an arrival an hour before, want %+v", d, before)
	}
}

// FuzzSignals checks that after any events at any times, all measurements are within their ranges
// and can be encoded as JSON.
func FuzzSignals(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, int64(1), int64(1e9))
	f.Add([]byte{1, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1}, int64(-3e18), int64(math.MaxInt64))
	f.Add([]byte{1, 9, 1, 10, 1, 7, 1}, int64(math.MaxInt64), int64(math.MinInt64))
	f.Fuzz(func(t *testing.T, ops []byte, jump, look int64) {
		var s signals
		var v services
		now := epoch
		for _, op := range ops {
			s.tick(now, int(op%4), int(op%3))
			switch op % 11 {
			case 0, 1, 2, 3:
				s.arrive()
			case 4, 5:
				s.leave(time.Duration(op) * ms)
			case 6:
				s.leave(time.Duration(jump))
			case 7:
				v.add(now, time.Duration(jump), int(op)+1)
			case 8:
				v.add(now, time.Duration(op)*ms, 1)
			case 9:
				now = now.Add(time.Duration(jump))
			case 10:
				now = now.Add(time.Duration(op) * 100 * ms)
			}
		}
		is := plan.Signals{Service: v.read()}
		is.Demand, is.Wait, is.Busy = s.read(now.Add(time.Duration(look)), 2, 1)
		is.Demand.Last = time.Time{} // JSON cannot write every year
		if is.Demand.Rate < 0 || is.Demand.CV < 0 || is.Busy.Share < 0 || is.Busy.Share > 1 || is.Service.Mean < 0 || is.Wait.P50 > is.Wait.P99 {
			t.Errorf("%+v", is)
		}
		b, err := json.Marshal(is)
		if err != nil {
			t.Fatalf("%+v: %v", is, err)
		}
		var back plan.Signals
		if err := json.Unmarshal(b, &back); err != nil || !reflect.DeepEqual(is, back) {
			t.Errorf("%+v came back as %+v: %v", is, back, err)
		}
	})
}

// TestPauseMeasuring checks that nothing is measured during PauseMeasuring, neither demand nor
// waits, busy slots or service times, and that everything is measured afterwards.
func TestPauseMeasuring(t *testing.T) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	now, n := epoch, uint64(0)
	calls := func(many int, took time.Duration) {
		t.Helper()
		for range many {
			n++
			c.Step(now, submit(fmt.Sprint(n), 0))
			now = now.Add(took)
			c.Step(now, answer("r1", n, 0))
			now = now.Add(took)
		}
	}
	c.Step(now, ReplicaUp{Name: "r1", Slots: 1, MaxBatch: 1})
	calls(20, 10*ms)
	before, known := c.Signals(now), c.lanes[0].signals.total
	until := now.Add(30 * time.Second)
	c.lanes[0].PauseMeasuring(until)
	calls(10, time.Second)
	if after := c.Signals(now); !reflect.DeepEqual(after.Service, before.Service) || c.lanes[0].signals.total != known || after.Demand.Rate > 0 || after.Wait.Known || after.Busy.Known {
		t.Errorf("%+v after calls that are to be disregarded, want nothing of them; before them %+v", after, before)
	}
	n++
	c.Step(now, submit(fmt.Sprint(n), 0)) // it is answered afterwards
	now = until
	c.Step(now, answer("r1", n, 0))
	if after := c.Signals(now); !reflect.DeepEqual(after.Service, before.Service) {
		t.Errorf("service %+v with a call that began while it was tried out, want %+v", after.Service, before.Service)
	}
	calls(20, 40*ms)
	if after := c.Signals(now); after.Service.Mean < 20*ms || c.lanes[0].signals.total != known+20 || !after.Busy.Known || after.Busy.Share < 0.4 {
		t.Errorf("%+v of calls afterwards, want them to count", after)
	}
	c.lanes[0].PauseMeasuring(now.Add(time.Hour))
	c.lanes[0].PauseMeasuring(time.Time{})
	calls(1, ms)
	if c.lanes[0].signals.total != known+21 {
		t.Error("what was let go is still disregarded")
	}
}

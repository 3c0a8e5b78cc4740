package autoscaler

import (
	"math"
	"testing"
	"time"
)

// follow runs a controller on measurements, one per second, against a target of 1.
func follow(c PID, held bool, measured ...float64) (states []PIDState) {
	var s PIDState
	for i, m := range measured {
		s = c.Step(s, t0.Add(time.Duration(i)*time.Second), m, 1, held)
		states = append(states, s)
	}
	return states
}

func constant(n int, v float64) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = v
	}
	return out
}

func last(s []PIDState) PIDState { return s[len(s)-1] }

func TestPIDHasTheRightSign(t *testing.T) {
	// The paper's Alg. 1 would remove replicas for 0.9 s against 0.3 s.
	over := follow(defaultPID, false, constant(20, 3)...)
	for i := 1; i < len(over); i++ {
		if over[i].Out < over[i-1].Out {
			t.Errorf("step %d: %v after %v, want no fall while tasks take three times as long as they may", i, over[i].Out, over[i-1].Out)
		}
	}
	if got := last(over).Out; got < 1 {
		t.Errorf("%v after 20 s of overload, want 1 or more", got)
	}
	for i, s := range follow(defaultPID, false, constant(100, 0.1)...) {
		if s.Out != 0 || s.Sum != 0 {
			t.Errorf("step %d: %+v, want nothing to be added, or taken, where tasks are in time", i, s)
		}
	}
}

func TestPIDHasADeadBand(t *testing.T) {
	if s := last(follow(defaultPID, false, constant(600, 1.09)...)); s.Out != 0 {
		t.Errorf("%+v after ten minutes 9 %% above target, want nothing", s)
	}
	if s := last(follow(defaultPID, false, constant(600, 1.2)...)); s.Out < 1 {
		t.Errorf("%+v after ten minutes 20 %% above target, want 1 or more", s)
	}
}

func TestPIDDoesNotWindUp(t *testing.T) {
	free, held := last(follow(defaultPID, false, constant(300, 4)...)), last(follow(defaultPID, true, constant(300, 4)...))
	if held.Sum != 0 || held.Out == 0 {
		t.Errorf("held back for five minutes: %+v, want an output and no integral", held)
	}
	if free.Sum <= 1 || free.Out > defaultPID.Most {
		t.Errorf("not held back: %+v, want an integral, and %v at most", free, defaultPID.Most)
	}
	// After an overload has ended, it is forgotten in seconds. That does not take as long as the
	// overload lasted.
	if s := last(follow(defaultPID, false, append(constant(30, 4), constant(30, 0.5)...)...)); s.Out > 0.5 {
		t.Errorf("%+v half a minute after an overload of half a minute, want most of it gone", s)
	}
	falling := follow(defaultPID, false, append(constant(10, 4), 3.5, 3, 2.5, 2)...)
	if got, want := last(falling).Sum, falling[9].Sum; got != want {
		t.Errorf("integral %v while the wait falls, want it to stay at %v", got, want)
	}
}

func TestPIDRisesAndFallsBySteps(t *testing.T) {
	s := follow(defaultPID, false, append(constant(10, 100), constant(60, 0.01)...)...)
	for i := 1; i < len(s); i++ {
		if d := s[i].Out - s[i-1].Out; d > defaultPID.Up+1e-9 || d < -defaultPID.Down-1e-9 {
			t.Errorf("step %d: by %v, want at most %v up and %v down a second", i, d, defaultPID.Up, defaultPID.Down)
		}
	}
}

func TestPIDSurvivesClockJumps(t *testing.T) {
	s := last(follow(defaultPID, false, constant(10, 2)...))
	for name, at := range map[string]time.Time{
		"an hour back": t0.Add(-time.Hour), "a day on": t0.Add(24 * time.Hour), "no time": t0.Add(9 * time.Second),
	} {
		got := defaultPID.Step(s, at, 2, 1, false)
		if math.Abs(got.Out-s.Out) > defaultPID.Up*longestStep.Seconds() || got.Sum < s.Sum || got.Sum > s.Sum+defaultPID.Ki*longestStep.Seconds() {
			t.Errorf("%s: %+v after %+v, want a step of %v at most", name, got, s, longestStep)
		}
		if next := defaultPID.Step(got, at.Add(time.Second), 2, 1, false); next.Sum <= got.Sum {
			t.Errorf("%s: %+v after %+v, want it to go on", name, next, got)
		}
		if b := defaultPID.Blind(s, at); b.Sum > s.Sum || b.Out > s.Out+1e-9 {
			t.Errorf("%s, nothing measured: %+v after %+v, want it to fade", name, b, s)
		}
	}
}

func TestPIDOutputRisesWithTheMeasurement(t *testing.T) {
	for _, before := range [][]PIDState{follow(defaultPID, false, 1), follow(defaultPID, false, constant(30, 5)...), follow(defaultPID, true, 5, 4, 3, 2, 1, 0.5)} {
		lastOut := -1.0
		for m := 0.01; m < 100; m *= 1.3 {
			for _, held := range []bool{false, true} {
				if s := defaultPID.Step(last(before), last(before).At.Add(time.Second), m, 1, held); held {
					continue
				} else if s.Out < lastOut {
					t.Errorf("%v with a measurement of %v, want no less than %v, as with a smaller one", s.Out, m, lastOut)
				} else {
					lastOut = s.Out
				}
			}
		}
	}
}

func TestStayRoundsOnlyBeyondThreeQuarters(t *testing.T) {
	for _, tc := range []struct {
		n    int
		v    float64
		want int
	}{{0, 0.5, 0}, {0, 0.75, 1}, {1, 0.3, 1}, {1, 0.25, 0}, {3, 3.7, 3}, {3, 6.2, 6}, {3, 6.8, 7}, {3, 0, 0}, {3, 1.2, 1}, {3, 1.3, 2}, {5, 0.1, 0}} {
		if got := stay(tc.n, tc.v); got != tc.want {
			t.Errorf("stay(%d, %v) = %d, want %d", tc.n, tc.v, got, tc.want)
		}
	}
}

func TestKeyStagesFadeAfterTheirLastRaise(t *testing.T) {
	var k Key
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	if k = k.step(at(0), false); k.is() {
		t.Errorf("%+v is a key stage that was never raised", k)
	}
	k = k.step(at(time.Second), true)
	if !k.is() || !k.bursts(at(2*time.Second)) || k.bursts(at(time.Minute)) {
		t.Errorf("%+v, want a key stage in a burst of seconds", k)
	}
	if once := k.step(at(5*time.Minute), false); !once.is() {
		t.Errorf("%+v after five minutes, want a key stage still", once)
	}
	if once := k.step(at(7*time.Minute), false); once.is() {
		t.Errorf("%+v after seven minutes, want none any more", once)
	}
	for i := range 100 {
		k = k.step(at(time.Duration(i)*time.Second), true)
	}
	if often := k.step(at(12*time.Minute), false); !often.is() || k.Weight > keyMost {
		t.Errorf("%+v after ten quiet minutes, want a key stage that was raised often to be one still", often)
	}
	if gone := k.step(at(24*time.Hour), false); gone != (Key{}) {
		t.Errorf("%+v after a day, want it forgotten", gone)
	}
	if back := k.step(at(-time.Hour), false); back.Weight != k.Weight || back.bursts(at(-time.Hour)) {
		t.Errorf("%+v with the clock an hour back, want the same weight and no burst for an hour", back)
	}
}

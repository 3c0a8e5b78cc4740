package dispatch

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

func lengthsOf(c *Core, now time.Time) string {
	text := ""
	for _, l := range c.Lane("f.ns").Signals(now).Lengths {
		text += fmt.Sprintf("%d:%.2f ", l.MaxLength, l.Share)
	}
	return text
}

// TestLengthsAreCountedByClass sends tasks of many lengths to a stage with two variants, and then
// changes the classes.
func TestLengthsAreCountedByClass(t *testing.T) {
	c := NewCore(named(CoreConfig{Revision: 1, QueueLimit: 10_000}))
	c.Step(epoch, Deployed{Lane: "g.ns", Revision: 1, MaxLength: 10})
	c.Step(epoch, Deployed{Lane: "h.ns", Revision: 1, MaxLength: 20})
	send := func(n int, at time.Time, length int) {
		for range n {
			c.Step(at, long(fmt.Sprint("t", c.seq), length))
		}
	}
	send(3, epoch, 5)
	send(2, epoch, 10)
	if got := lengthsOf(c, epoch); got != "" {
		t.Errorf("after five tasks: %q, want nothing yet", got)
	}
	send(5, epoch, 11)
	send(6, epoch, 21)
	send(4, epoch, 0) // unknown: only the last class takes any
	c.Step(epoch, direct("own", "g.ns"))
	if got, want := lengthsOf(c, epoch), "10:0.25 20:0.25 0:0.50 "; got != want {
		t.Errorf("shares %q, want %q", got, want)
	}
	if g := c.Lane("g.ns").Signals(epoch).Lengths; len(g) != 3 {
		t.Errorf("a variant has %v, want the shares of its stage", g)
	}
	// A third of the weight is left after two minutes.
	send(20, epoch.Add(lengthFade), 5)
	share := (5/math.E + 20) / (20/math.E + 20)
	if got := c.Lane("f.ns").Signals(epoch.Add(lengthFade)).Lengths[0].Share; math.Abs(got-share) > 1e-9 {
		t.Errorf("share %g of short inputs, want %g", got, share)
	}
	if got := lengthsOf(c, epoch.Add(time.Hour)); got != "" {
		t.Errorf("an hour later: %q, want nothing", got)
	}
	c.Step(epoch.Add(lengthFade), Deployed{Lane: "h.ns", Revision: 1, MaxLength: 30})
	if got := lengthsOf(c, epoch.Add(lengthFade)); got != "" {
		t.Errorf("with other classes: %q, want nothing yet", got)
	}
	c.Step(epoch.Add(lengthFade), Deployed{Lane: "h.ns", Revision: 1})
	c.Step(epoch.Add(lengthFade), Deployed{Lane: "g.ns", Revision: 1})
	send(50, epoch.Add(lengthFade), 5)
	if got := lengthsOf(c, epoch.Add(lengthFade)); got != "" {
		t.Errorf("with one class: %q, want nothing", got)
	}
}

// TestSharesOfLengthsSumToOne checks random arrivals, also with clocks that go back.
func TestSharesOfLengthsSumToOne(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		l, now := &lengths{}, epoch
		l.cut([]*Lane{{maxLength: 1 + rnd.IntN(100)}, {maxLength: rnd.IntN(100)}, {}, {maxLength: 7, removed: true}})
		for range rnd.IntN(300) {
			now = now.Add(time.Duration(rnd.Int64N(int64(2*time.Minute)) - int64(time.Minute)/2))
			l.add(now, rnd.IntN(120))
			sum := 0.0
			for _, s := range l.read(now) {
				if !(s.Share >= 0 && s.Share <= 1) {
					t.Fatalf("share %v", s)
				}
				sum += s.Share
			}
			if known := l.read(now); known != nil && math.Abs(sum-1) > 1e-9 || len(known) > 0 && known[len(known)-1] == (plan.LengthShare{}) && sum == 0 {
				t.Fatalf("shares %v sum to %g", known, sum)
			}
		}
	}
}

// BenchmarkLengths measures what counting a length adds to an arrival.
func BenchmarkLengths(b *testing.B) {
	l, now := &lengths{}, epoch
	l.cut([]*Lane{{maxLength: 64}, {maxLength: 128}, {}})
	for i := 0; b.Loop(); i++ {
		now = now.Add(time.Millisecond)
		l.add(now, i%200)
	}
}

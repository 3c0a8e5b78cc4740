package dispatch

import (
	"math"
	"math/bits"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Old batches fade from the mean service time, but the last serviceKeep batches count however old
// they are. Service times depend on the model and not on the time of day. So a function that was
// scaled to zero is sized by its earlier batches when it comes back.
const (
	serviceFade   = 30 * time.Second
	serviceKeep   = 20 // number of batches that never fade
	fewestBatches = 3  // batches needed to know the mean
	fewestShares  = 10 // batches needed to know the CV
	sizeClasses   = 13 // classes of batch sizes: 1, 2, 3 to 4, 5 to 8, … 2049 and more
)

// services measures how long a slot is busy, in bounded memory. The zero value is ready.
type services struct {
	last           time.Time
	batches, tasks float64 // faded counts
	busy, squares  float64 // in seconds; squares of the share of each task
	sizes          [sizeClasses]sizeClass
	calls, items   float64 // faded counts: successful calls, and the items that they returned
	served         plan.Tally
}

// sizeClass averages batches of about one size.
type sizeClass struct {
	// Number of batches in the means, at most serviceKeep, so that older batches count ever less.
	n          int
	size, busy float64 // means; busy in seconds
}

// add counts a batch of n tasks that kept its slot busy until now.
func (s *services) add(now time.Time, busy time.Duration, n int) {
	busy = max(busy, 0)
	if s.batches > serviceKeep {
		fade := max(faded(now.Sub(s.last)), serviceKeep/s.batches)
		s.batches, s.tasks, s.busy, s.squares = s.batches*fade, s.tasks*fade, s.busy*fade, s.squares*fade
		s.calls, s.items = s.calls*fade, s.items*fade
	}
	s.last = now
	took, tasks := float64(busy)/float64(time.Second), float64(n)
	s.served.N += uint64(n)
	s.served.Seconds += took * tasks
	s.batches++
	s.tasks += tasks
	s.busy += took
	s.squares += took * took / tasks // each of the n tasks has the share took/tasks
	c := &s.sizes[min(bits.Len(uint(n-1)), sizeClasses-1)]
	c.n = min(c.n+1, serviceKeep)
	part := 1 / float64(c.n)
	c.size += (tasks - c.size) * part
	c.busy += (took - c.busy) * part
}

// returned counts a successful call that returned n items.
func (s *services) returned(n int) {
	s.calls++
	s.items += float64(n)
}

// factor returns the number of items per call.
func (s *services) factor() plan.Items {
	if s.calls < fewestBatches {
		return plan.Items{}
	}
	return plan.Items{Known: true, Mean: s.items / s.calls}
}

// faded returns the factor by which a batch's weight fades in d.
func faded(d time.Duration) float64 {
	x := float64(max(d, 0)) / float64(serviceFade)
	if x < 1e-3 { // usual case: exp(-x) to ten digits at a fifth of the cost
		return 1 - x + x*x/2
	}
	return math.Exp(-x)
}

// mean returns the mean time per task, which is its share of its batch's time; 0: unknown.
func (s *services) mean() time.Duration {
	if s.batches < fewestBatches {
		return 0
	}
	return seconds(s.busy / s.tasks)
}

// read returns the service time of a task, and that of batches by size.
func (s *services) read() plan.Service {
	if s.batches < fewestBatches {
		return plan.Service{Served: s.served}
	}
	out := plan.Service{Known: true, Mean: s.mean(), Served: s.served}
	if s.batches >= fewestShares {
		out.CV = cv(s.tasks, s.busy, s.squares)
	}
	for _, c := range s.sizes {
		if c.n > 0 {
			out.Batches = append(out.Batches, plan.Batched{Size: int(math.Round(c.size)), Mean: seconds(c.busy), N: c.n})
		}
	}
	return out
}

// perBatch returns the mean time of a batch; 0: unknown.
func (s *services) perBatch() time.Duration {
	if s.batches < fewestBatches {
		return 0
	}
	return seconds(s.busy / s.batches)
}

// cv returns the coefficient of variation of n values from their sum and their sum of squares.
func cv(n, sum, squares float64) float64 {
	mean := sum / n
	if !(mean > 0) {
		return 0
	}
	return math.Sqrt(max(squares/n-mean*mean, 0)) / mean
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

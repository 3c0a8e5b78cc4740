package recorded

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// Arrival is a request of the recorded run.
type Arrival struct {
	At       time.Duration // since the begin of the record
	Pipeline string        // its name in the scenario
}

// least is the shortest gap in the counts that is filled with arrivals at the measured rate.
const least = 100 * time.Millisecond

// missing returns the times that no line has counted.
func (h *history) missing() (out []spread, lines []int) {
	for i := 1; i < len(h.moments); i++ {
		from, to := h.step(i)
		m := h.moments[i]
		if before := h.moments[i-1]; before.to.After(from) {
			from = before.to
		}
		if !m.to.IsZero() {
			to = m.from
		}
		if to.Sub(from) >= least {
			out, lines = append(out, spread{from: from, to: to}), append(lines, i)
		}
	}
	return out, lines
}

// arrivals returns when the requests of an application came. Where requests were not counted, it
// draws them at the measured rate of entry, the function that all of them call first. share is the
// part of entry's calls that are of this application.
func (h *history) arrivals(a *app, entry *function, share float64, seed uint64) (out []time.Time, err error) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	if a != nil {
		out = append(out, a.at...)
		for _, s := range a.spread {
			out = s.draw(out, rnd)
		}
	}
	holes, lines := h.missing()
	carry := 0.0
	for k, s := range holes {
		i := lines[k]
		expected := max(get(entry.rates, i)*share*s.to.Sub(s.from).Seconds(), 0) + carry
		if expected > float64(mostArrivals-h.arrived) {
			return nil, fmt.Errorf("%s: a rate of %g per second, want at most %d requests in all", entry.Name, get(entry.rates, i), mostArrivals)
		}
		h.arrived += int(expected)
		s.n, s.cv = int(expected), cmp.Or(get(entry.cvs, i), 1)
		carry = expected - float64(s.n)
		out = s.draw(out, rnd)
	}
	return out, nil
}

// draw appends the arrivals of s. Their gaps are gamma with s.cv, on the condition that exactly s.n
// arrivals come.
func (s spread) draw(out []time.Time, rnd *rand.Rand) []time.Time {
	at, shape := make([]float64, s.n+1), 1/max(s.cv*s.cv, 1e-4)
	sum := 0.0
	for i := range at {
		gap := arrivals.Gamma(rnd, shape)
		if i == 0 {
			gap *= rnd.Float64() // the rest of a gap
		}
		sum += gap
		at[i] = sum
	}
	for _, x := range at[:s.n] {
		out = append(out, s.from.Add(time.Duration(x/max(sum, 1e-300)*float64(s.to.Sub(s.from)))))
	}
	return out
}

// WriteArrivals writes the arrivals as a trace in the format [arrivals.Instants].
func (r *Run) WriteArrivals(w io.Writer) error {
	b := bufio.NewWriter(w)
	fmt.Fprintln(b, arrivals.InstantsHeader)
	for _, a := range r.Arrivals {
		fmt.Fprintf(b, "%.6f,%s\n", a.At.Seconds(), a.Pipeline)
	}
	return b.Flush()
}

// Package recorded turns a record of the autoscaler, which `stagecoach up --record` writes, into a
// scenario of the simulator: the same load on the same stages and nodes. So policies can be
// compared on what has happened.
package recorded

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// mostArrivals bounds the requests of a record. The simulator's traces have the same bound.
const mostArrivals = 50_000_000

// history has the parts of a record that the conversion needs.
type history struct {
	moments   []moment
	functions map[string]*function // by key, those that some line has
	pipelines map[string]plan.Pipeline
	nodes     map[string]plan.Node
	apps      map[string]*app // those with counted requests
	zygotes   map[string]int64
	policies  []policy.Names // without repetitions, the latest one last
	budget    int
	estimated int // lines without counts
	arrived   int // counted requests
}

// moment is a line of the record.
type moment struct {
	at    time.Time
	epoch uint64
	// Counted part of the time since the previous line; zero: nothing is counted.
	from, to time.Time
}

// function holds the measurements of one function, by line of the record.
type function struct {
	plan.Function // as in the latest line that has it
	replicas      []int
	rates, cvs    []float64 // of arrivals, by the measured rate
	service       service
	items         weighted
	starts        []plan.Start // latest known ones
}

// app is the counted requests for a pipeline, or for a function under its own name.
type app struct {
	arrived                  []float64 // per line
	at                       []time.Time
	spread                   []spread // counts whose instants are unknown
	answered, inTime, failed int
	sum                      time.Duration
	latencies                sketch.Sketch
	means                    []float64 // of the latencies per line, in seconds; 0: none
}

// spread is a number of arrivals in a time, whose instants are unknown.
type spread struct {
	from, to time.Time
	n        int
	cv       float64
}

// read reads a record. It refuses lines that it cannot read, with their number.
func read(r io.Reader) (*history, error) {
	h := &history{
		functions: map[string]*function{}, pipelines: map[string]plan.Pipeline{}, nodes: map[string]plan.Node{}, apps: map[string]*app{}, zygotes: map[string]int64{},
	}
	err := record.Scan(r, func(n int, text []byte) error {
		l, err := record.Decode(text)
		if err == nil {
			err = l.Check()
		}
		if version := (record.VersionError{}); errors.As(err, &version) {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w; delete the line, the others are a record without it", n, err)
		}
		return h.add(n, &l)
	})
	switch {
	case err != nil:
		return nil, err
	case len(h.moments) < 2:
		return nil, fmt.Errorf("%d decisions, want at least 2, as `stagecoach up --record FILE` writes them", len(h.moments))
	}
	return h, nil
}

// add takes a line.
func (h *history) add(n int, l *record.Line) error {
	s := &l.Snapshot
	m := moment{at: s.At, epoch: s.Epoch}
	if k := len(h.moments); k > 0 && s.At.Before(h.moments[k-1].at) {
		return fmt.Errorf("line %d: of %v, the line before is of %v: put the older file first, as in `cat FILE.1 FILE`",
			n, s.At.UTC().Format(time.DateTime), h.moments[k-1].at.UTC().Format(time.DateTime))
	}
	if t := l.Traffic; t != nil {
		m.from, m.to = t.From, t.To
	} else {
		h.estimated++
	}
	h.moments = append(h.moments, m)
	if i := slices.Index(h.policies, l.Policies); i >= 0 {
		h.policies = slices.Delete(h.policies, i, i+1)
	}
	h.policies = append(h.policies, l.Policies)
	h.budget = s.Budget
	for i := range s.Pipelines {
		p := &s.Pipelines[i]
		if len(p.Stages) == 0 || slices.ContainsFunc(p.Edges, func(e plan.Edge) bool { return min(e.From, e.To) < 0 || max(e.From, e.To) >= len(p.Stages) }) {
			return fmt.Errorf("line %d: pipeline %q has no stages, or an edge without a stage; delete the line", n, p.Name)
		}
		h.pipelines[p.Name] = *p
	}
	for _, x := range s.Nodes {
		for _, z := range x.Zygotes {
			h.zygotes[z.Function] = max(h.zygotes[z.Function], z.Bytes)
		}
		if x.Unavailable == "" && !x.Leaving || h.nodes[x.Name].Name == "" {
			h.nodes[x.Name] = x
		}
	}
	for i := range s.Functions {
		h.function(&s.Functions[i])
	}
	if l.Traffic != nil {
		h.traffic(l.Traffic)
	}
	if h.arrived > mostArrivals {
		return fmt.Errorf("line %d: more than %d requests until here, want at most that: take a part of the record, such as its last lines", n, mostArrivals)
	}
	return nil
}

// function takes a function of the latest line.
func (h *history) function(is *plan.Function) {
	f := h.functions[is.Name]
	if f == nil {
		f = &function{}
		h.functions[is.Name] = f
	}
	k := len(h.moments) - 1
	f.Function = *is
	f.replicas, f.rates, f.cvs = at(f.replicas, k, len(is.Replicas)), at(f.rates, k, is.Demand.Rate), at(f.cvs, k, is.Demand.CV)
	f.Function.Replicas = nil
	if len(is.Starts) > 0 {
		f.starts = is.Starts
	}
	passed := time.Second
	if k > 0 {
		passed = h.moments[k].at.Sub(h.moments[k-1].at)
	}
	calls := is.Demand.Rate * passed.Seconds()
	f.service.add(is, calls)
	if is.Items.Known {
		f.items.add(is.Items.Mean, 0, calls)
	}
}

// at returns values with v at an index. Those in between are zero.
func at[T any](values []T, i int, v T) []T {
	if missing := i - len(values); missing > 0 {
		values = append(values, make([]T, missing)...)
	}
	return append(values, v)
}

// get returns a value, or zero behind the end.
func get[T any](values []T, i int) (v T) {
	if i < len(values) {
		v = values[i]
	}
	return v
}

// traffic takes the counts of the latest line.
func (h *history) traffic(t *record.Traffic) {
	k := len(h.moments) - 1
	for i := range t.Apps {
		is := &t.Apps[i]
		a := h.apps[is.Name]
		if a == nil {
			a = &app{}
			h.apps[is.Name] = a
		}
		h.arrived += is.Arrived
		a.arrived = at(a.arrived, k, float64(is.Arrived))
		instant := t.From
		for _, gap := range is.Gaps {
			instant = instant.Add(time.Duration(gap) * time.Microsecond)
			a.at = append(a.at, instant)
		}
		if len(is.Gaps) == 0 && is.Arrived > 0 {
			a.spread = append(a.spread, spread{t.From, t.To, is.Arrived, is.CV})
		}
		a.answered, a.inTime, a.failed, a.sum = a.answered+is.Answered, a.inTime+is.InTime, a.failed+is.Failed, a.sum+is.Sum
		for _, l := range is.Latencies {
			a.latencies.AddN(time.Duration(l[0])*time.Microsecond, uint64(l[1]))
		}
		if is.Answered > 0 {
			a.means = at(a.means, k, is.Sum.Seconds()/float64(is.Answered))
		}
	}
}

// span returns when the record begins and ends.
func (h *history) span() (from, to time.Time) {
	first, last := h.moments[0], h.moments[len(h.moments)-1]
	from, to = first.at, last.at
	if !first.to.IsZero() && first.from.Before(from) {
		from = first.from
	}
	if last.to.After(to) {
		to = last.to
	}
	return from, to
}

// step returns the time from the line before to line i. It is empty if Stagecoach was restarted in
// between, because it has served nothing meanwhile.
func (h *history) step(i int) (from, to time.Time) {
	from, to = h.moments[i-1].at, h.moments[i].at
	if h.moments[i].epoch != h.moments[i-1].epoch {
		from = to
	}
	return from, to
}

// replicaSeconds returns the integral of a function's replicas over the record. The count of a line
// has held since the previous line, because a plan takes effect after its line.
func (h *history) replicaSeconds(f *function) (sum float64) {
	for i := 1; i < len(h.moments); i++ {
		from, to := h.step(i)
		sum += to.Sub(from).Seconds() * float64(get(f.replicas, i))
	}
	return sum
}

// running returns how long Stagecoach ran within the record, in seconds.
func (h *history) running() (sum float64) {
	for i := 1; i < len(h.moments); i++ {
		from, to := h.step(i)
		sum += to.Sub(from).Seconds()
	}
	return sum
}

// weighted is the mean and the CV of a quantity.
type weighted struct{ n, sum, squares float64 }

// add adds a mean with its CV, as the mean of n values.
func (w *weighted) add(mean, cv, n float64) {
	w.n, w.sum, w.squares = w.n+n, w.sum+n*mean, w.squares+n*mean*mean*(1+cv*cv)
}

func (w *weighted) mean() float64 { return w.sum / max(w.n, 1e-12) }

func (w *weighted) variance() float64 { return max(w.squares/max(w.n, 1e-12)-w.mean()*w.mean(), 0) }

// service is how long calls take, over the whole record.
type service struct {
	calls weighted          // seconds
	sizes map[int]*weighted // seconds per batch, by its size
}

// add takes the measured service times of a line, which count as those of this many calls.
func (s *service) add(f *plan.Function, calls float64) {
	if !f.Service.Known || calls <= 0 {
		return
	}
	s.calls.add(f.Service.Mean.Seconds(), f.Service.CV, calls)
	total := 0
	for _, b := range f.Service.Batches {
		total += b.N
	}
	for _, b := range f.Service.Batches {
		if s.sizes == nil {
			s.sizes = map[int]*weighted{}
		}
		if s.sizes[b.Size] == nil {
			s.sizes[b.Size] = &weighted{}
		}
		s.sizes[b.Size].add(b.Mean.Seconds(), 0, calls*float64(b.N)/float64(max(total, 1)))
	}
}

// names returns the keys of a map, sorted.
func names[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for name := range m {
		out = append(out, name)
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Compare(a, b) })
	return out
}

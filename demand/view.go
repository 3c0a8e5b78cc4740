package demand

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// App is what is known about an application at one instant. It shares no memory with its learner.
type App struct {
	Name     string
	Last     time.Time // end of its latest request
	Requests float64   // number of requests, each weighted by its age
	Bytes    int       // memory that it takes
	Stages   []Stage   // sorted by Name
}

// Stage is what is known about a stage of an application.
type Stage struct {
	Name       string
	PerRequest float64 // calls per complete request; 0: unknown
	Lanes      []Lane  // sorted by Function, then Batch
	// Length of the inputs of known length, in the unit of the stages' max-length.
	Length Distribution
	Next   []Next // sorted by To
}

// Lane is what is known about the calls that one function ran in batches of about one size.
type Lane struct {
	Function        string
	Batch           float64      // mean batch size
	Given, Returned float64      // items per call, as means
	Work            Distribution // of seconds per item
	Last            time.Time    // end of the latest of these calls
}

// Next is an edge to a next stage.
type Next struct {
	To          string
	Probability float64 // that To runs in a complete request in which the stage runs
	Factor      float64 // items that To receives per item that the stage receives
	// Variants has the factor of each function that serves the stage, sorted by function.
	Variants []Factor
}

// Factor is how many items a next stage receives per item that one function received. A next stage
// gets the whole output, so these are the items that the function returned.
type Factor struct {
	Function string
	Factor   float64
	Calls    float64   // number of calls, each weighted by its age
	Last     time.Time // end of the latest of these calls
}

// factors returns the factors of a stage's functions. fade turns weights into numbers of calls.
func (s *stage) factors(fade float64) (out []Factor) {
	for i := 0; i < len(s.cells); { // sorted by function
		f, given, returned := Factor{Function: s.cells[i].function}, 0.0, 0.0
		for ; i < len(s.cells) && s.cells[i].function == f.Function; i++ {
			c := s.cells[i]
			f.Calls, given, returned = f.Calls+c.calls*fade, given+c.given, returned+c.returned
			if c.last.After(f.Last) {
				f.Last = c.last
			}
		}
		f.Factor = ratio(returned, given)
		out = append(out, f)
	}
	return out
}

// Distribution is a distribution of values above or equal to 0. If Weight is 0, nothing is known.
type Distribution struct {
	Weight   float64 // number of values, each weighted by its age
	Mean, CV float64
	// Buckets sort the values by size. Their weights sum to 1. A policy that needs a remaining time,
	// such as Gittins's index, reads it from them.
	Buckets []Bucket
}

// Bucket is a part of a distribution.
type Bucket struct {
	Value  float64 // stands for its values, with a relative error of at most sketch.Error
	Weight float64 // share of all values
}

// Quantile returns the smallest value that at least a share q (0 to 1) of all values do not exceed;
// 0: nothing is known. Its relative error is at most sketch.Error for values within a factor of 64;
// see sketch.Weighted.
func (d *Distribution) Quantile(q float64) float64 {
	var sum float64
	for _, b := range d.Buckets {
		if sum += b.Weight; sum >= q-1e-9 {
			return b.Value
		}
	}
	if n := len(d.Buckets); n > 0 {
		return d.Buckets[n-1].Value
	}
	return 0
}

// App returns what is known about an application at now, and whether anything is.
func (l *Learner) App(name string, now time.Time) (App, bool) {
	a := l.apps[name]
	if a == nil {
		return App{}, false
	}
	fade := a.faded(now, l.limits.HalfLife)
	out := App{Name: a.name, Last: a.last, Requests: a.requests * fade, Bytes: a.bytes}
	for _, s := range a.stages {
		st := Stage{Name: s.name, PerRequest: ratio(s.calls, a.completed)}
		for _, c := range s.cells {
			st.Lanes = append(st.Lanes, Lane{
				Function: c.function, Batch: ratio(c.batch, c.calls), Given: ratio(c.given, c.calls), Returned: ratio(c.returned, c.calls),
				Work: distribution(&c.work, time.Second, c.moments(fade)), Last: c.last,
			})
		}
		st.Length = distribution(&s.lengths, 1, moments{})
		st.Length.Weight *= fade
		for _, n := range s.next {
			if n.seen > 0 {
				st.Next = append(st.Next, Next{To: n.to, Probability: n.taken / n.seen, Factor: ratio(n.items, n.given), Variants: s.factors(fade)})
			}
		}
		out.Stages = append(out.Stages, st)
	}
	return out, true
}

// Work returns the distribution of the seconds that a stage takes per item, whichever function runs
// it in whatever batch. If the stage is unknown, its Weight is 0.
func (a *App) Work(stage string) Distribution {
	i, ok := slices.BinarySearchFunc(a.Stages, stage, func(s Stage, name string) int { return cmp.Compare(s.Name, name) })
	if !ok {
		return Distribution{}
	}
	var all Distribution
	var second float64 // moment
	shares := map[float64]float64{}
	for _, l := range a.Stages[i].Lanes {
		all.Weight += l.Work.Weight
		all.Mean += l.Work.Weight * l.Work.Mean
		second += l.Work.Weight * l.Work.Mean * l.Work.Mean * (1 + l.Work.CV*l.Work.CV)
		for _, b := range l.Work.Buckets {
			shares[b.Value] += b.Weight * l.Work.Weight
		}
	}
	all.Mean = ratio(all.Mean, all.Weight)
	all.CV = cv(all.Mean, ratio(second, all.Weight))
	for _, v := range slices.Sorted(maps.Keys(shares)) {
		all.Buckets = append(all.Buckets, Bucket{Value: v, Weight: ratio(shares[v], all.Weight)})
	}
	return all
}

// Function is what is known about a function, whichever applications call it.
type Function struct {
	Name          string
	Calls         float64   // number of calls, each weighted by its age
	Mean, CV      float64   // of the seconds per item
	P50, P95, P99 float64   // seconds per item
	Items         float64   // items returned per item received
	Last          time.Time // end of the latest of these calls
}

// Functions returns what is known about all functions at now, sorted by name.
func (l *Learner) Functions(now time.Time) []Function {
	type sum struct {
		moments
		given, returned float64
		work            sketch.Weighted
		last            time.Time
	}
	sums := map[string]*sum{}
	for e := l.order.Front(); e != nil; e = e.Next() {
		a := e.Value.(*app)
		fade := a.faded(now, l.limits.HalfLife)
		for _, s := range a.stages {
			for _, c := range s.cells {
				f := sums[c.function]
				if f == nil {
					f = &sum{}
					sums[c.function] = f
				}
				m := c.moments(fade)
				f.calls, f.sum, f.squares = f.calls+m.calls, f.sum+m.sum, f.squares+m.squares
				f.given, f.returned = f.given+c.given*fade, f.returned+c.returned*fade
				f.work.MergeScaled(&c.work, fade)
				if c.last.After(f.last) {
					f.last = c.last
				}
			}
		}
	}
	out := make([]Function, 0, len(sums))
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		s := sums[name]
		d := distribution(&s.work, time.Second, s.moments)
		out = append(out, Function{
			Name: name, Calls: s.calls, Mean: d.Mean, CV: d.CV, P50: d.Quantile(0.5), P95: d.Quantile(0.95), P99: d.Quantile(0.99),
			Items: ratio(s.returned, s.given), Last: s.last,
		})
	}
	return out
}

// faded returns the factor that turns a weight into the number of calls at now. If the clock was
// set back, it returns the factor at the latest call. It is never 0.
func (a *app) faded(now time.Time, halfLife time.Duration) float64 {
	if a.last.After(now) {
		now = a.last
	}
	return math.Exp2(-min(max(float64(now.Sub(a.ref))/float64(halfLife), 0), 4*mostDoublings))
}

// moments are weighted sums over the calls of one or more cells.
type moments struct{ calls, sum, squares float64 }

func (c *cell) moments(fade float64) moments {
	return moments{c.calls * fade, c.sum * fade, c.squares * fade}
}

// distribution returns the distribution of a sketch whose values are in units. If m has no calls,
// the buckets give the mean and the CV.
func distribution(s *sketch.Weighted, unit time.Duration, m moments) Distribution {
	total := s.Total()
	if total <= 0 {
		return Distribution{}
	}
	exact := m.calls > 0
	d := Distribution{Weight: m.calls}
	for v, w := range s.All() {
		b := Bucket{Value: float64(v) / float64(unit), Weight: w / total}
		d.Buckets = append(d.Buckets, b)
		if !exact {
			m.sum += b.Weight * b.Value
			m.squares += b.Weight * b.Value * b.Value
		}
	}
	if !exact {
		m.calls, d.Weight = 1, total
	}
	d.Mean = m.sum / m.calls
	d.CV = cv(d.Mean, m.squares/m.calls)
	return d
}

// cv returns the coefficient of variation.
func cv(mean, second float64) float64 {
	if mean <= 0 {
		return 0
	}
	return math.Sqrt(max(second/(mean*mean)-1, 0))
}

func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

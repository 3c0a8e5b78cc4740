package control

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// Traffic counts requests for the record: when they arrive, and how long they take. [NewTraffic]
// makes one. A nil *Traffic counts nothing. It is safe for concurrent use.
type Traffic struct {
	objective func(app string) time.Duration

	mu   sync.Mutex
	from time.Time // of the counts below
	apps map[string]*appTraffic
}

// appTraffic is the requests for one application since Traffic.from.
type appTraffic struct {
	record.App
	last      int64   // µs from Traffic.from to the latest arrival
	squares   float64 // of the gaps in µs, added up
	latencies sketch.Sketch
}

// NewTraffic returns a Traffic that counts from now on. objective returns the objective of an
// application, a pipeline.Key in text; 0: it has none.
func NewTraffic(objective func(app string) time.Duration) *Traffic {
	return &Traffic{objective: objective, from: time.Now(), apps: map[string]*appTraffic{}}
}

// Begun counts the arrival of a request for app, and returns when that was.
func (t *Traffic) Begun(app string) time.Time {
	if t == nil {
		return time.Time{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now() // under the lock, so that arrivals are in order
	a := t.app(app)
	at := now.Sub(t.from).Microseconds()
	gap := max(at-a.last, 0)
	a.Arrived, a.last = a.Arrived+1, a.last+gap
	if a.squares += float64(gap) * float64(gap); a.Arrived <= record.MostGaps {
		a.Gaps = append(a.Gaps, gap)
	}
	return now
}

// Ended counts the end of a request for app that began at begun.
func (t *Traffic) Ended(app string, begun time.Time, answered bool) {
	if t == nil {
		return
	}
	took := time.Since(begun)
	objective := t.objective(app)
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.app(app)
	if !answered {
		a.Failed++
		return
	}
	a.Answered++
	if objective == 0 || took <= objective {
		a.InTime++
	}
	a.Sum += took
	a.latencies.Add(took)
}

// app returns the counts of an application. The caller holds t.mu.
func (t *Traffic) app(name string) *appTraffic {
	a := t.apps[name]
	if a == nil {
		a = &appTraffic{App: record.App{Name: name}}
		t.apps[name] = a
	}
	return a
}

// cv returns the coefficient of variation of the gaps.
func (a *appTraffic) cv() float64 {
	mean := float64(a.last) / float64(a.Arrived)
	if mean == 0 {
		return 0
	}
	return math.Sqrt(max(a.squares/float64(a.Arrived)-mean*mean, 0)) / mean
}

// Take returns the counts since the last call, and begins to count from zero. It returns nil if t
// is nil.
func (t *Traffic) Take() *record.Traffic {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	now := time.Now()
	out := &record.Traffic{From: t.from, To: now, Apps: []record.App{}}
	apps := t.apps
	t.from, t.apps = now, make(map[string]*appTraffic, len(apps))
	t.mu.Unlock()
	for _, a := range apps {
		if a.Arrived > record.MostGaps {
			a.Gaps, a.CV = nil, a.cv()
		}
		a.latencies.Each(func(d time.Duration, n uint64) {
			a.Latencies = append(a.Latencies, [2]int64{d.Microseconds(), int64(n)})
		})
		out.Apps = append(out.Apps, a.App)
	}
	slices.SortFunc(out.Apps, func(a, b record.App) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

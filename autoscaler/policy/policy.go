package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Names selects policies. An empty name means the default. The name "none" in Corrector, Sharer or
// Warmer leaves that level out. A domain whose entry stages ask for another Allocator, Rank or
// Route gets that one: see [plan.Chosen].
type Names struct {
	Allocator string `json:"allocator,omitempty" yaml:"allocator"`
	Corrector string `json:"corrector,omitempty" yaml:"corrector"`
	Sharer    string `json:"sharer,omitempty" yaml:"sharer"`
	Placer    string `json:"placer,omitempty" yaml:"placer"`
	Warmer    string `json:"warmer,omitempty" yaml:"warmer"`
	Rank      string `json:"rank,omitempty" yaml:"rank"`
	Route     string `json:"route,omitempty" yaml:"route"`

	// Price is what one second of one request's latency is worth to the allocator sizer, in
	// replica-seconds; 0: nothing. See autoscaler.Config.
	Price float64 `json:"price,omitempty" yaml:"price"`
}

// Set holds one policy per level. [Names.Choose] makes one.
type Set struct {
	names      Names
	allocators map[string]level // those that a domain may ask for
	routes     map[string]plan.Router

	allocator level
	corrector level       // nil: none
	sharer    plan.Sharer // nil: none
	placer    plan.Placer
	warmer    plan.Warmer // nil: none
	router    plan.Router
}

// none leaves a level out.
const none = "none"

// Choose returns the named policies. For an unknown name, the error lists the known ones.
func (n Names) Choose() (Set, error) {
	allocators := map[string]level{
		"sizer":   allocating[autoscaler.Memory]{autoscaler.NewSizer(autoscaler.Config{Price: n.Price})},
		"uniform": allocating[autoscaler.Memory]{autoscaler.NewUniform(autoscaler.Config{})},
		"fixed":   allocating[struct{}]{autoscaler.Fixed{}},

		"accuracy":        mixing[autoscaler.AccuracyMemory]{autoscaler.NewAccuracy(autoscaler.Config{})},
		"accuracy-waits":  mixing[autoscaler.AccuracyMemory]{autoscaler.NewAccuracyWithWaits(autoscaler.Config{})},
		"accuracy-greedy": mixing[autoscaler.Memory]{autoscaler.NewGreedyMix(autoscaler.Config{})},
	}
	maps.Copy(allocators, added)
	quart := func(cfg autoscaler.QuartConfig) level {
		return correcting[autoscaler.QuartMemory]{autoscaler.NewQuart(cfg)}
	}
	correctors := map[string]level{
		none:              nil,
		"quart":           quart(autoscaler.QuartConfig{}),
		"quart-no-pid":    quart(autoscaler.QuartConfig{NoPID: true}),
		"quart-no-smooth": quart(autoscaler.QuartConfig{NoSmooth: true}),
		"quart-no-cpu":    quart(autoscaler.QuartConfig{NoCPU: true}),
	}
	sharers := map[string]plan.Sharer{none: nil, "gain": autoscaler.Gain{}}
	placers := map[string]plan.Placer{"dispersed": placement.Dispersed{}, "spread": placement.Spread{}, "first-fit": placement.FirstFit{}}
	warmers := map[string]plan.Warmer{none: nil, "key-stages": placement.KeyStages{}}
	routes := map[string]plan.Router{"best": autoscaler.Best{}, "even": autoscaler.Even{}}
	ranks := map[string]bool{}
	for _, rank := range plan.Ranks {
		ranks[rank] = true
	}
	s := Set{names: n, allocators: allocators, routes: routes}
	var errs [8]error
	s.allocator, errs[0] = pick("allocator", allocators, &s.names.Allocator, "sizer")
	s.corrector, errs[1] = pick("corrector", correctors, &s.names.Corrector, "quart")
	s.sharer, errs[2] = pick("sharer", sharers, &s.names.Sharer, "gain")
	s.placer, errs[3] = pick("placer", placers, &s.names.Placer, "dispersed")
	s.warmer, errs[4] = pick("warmer", warmers, &s.names.Warmer, "key-stages")
	_, errs[5] = pick("rank", ranks, &s.names.Rank, fifo)
	s.router, errs[6] = pick("route", routes, &s.names.Route, "best")
	if !(n.Price >= 0 && n.Price <= autoscaler.MostPrice) {
		errs[7] = &PriceError{n.Price}
	}
	return s, errors.Join(errs[:]...)
}

// fifo is the rank of lines that are served first come, first served.
const fifo = "fifo"

// Names returns the names of the policies, including the defaults.
func (s Set) Names() Names { return s.names }

// added has the allocators of AddAllocator.
var added = map[string]level{}

// AddAllocator adds an allocator that may be chosen by a name. Only init functions may call it. It
// panics if the name is taken.
func AddAllocator[M any](name string, a plan.Allocator[M]) {
	if _, err := (Names{Allocator: name}).Choose(); err == nil {
		panic(fmt.Sprintf("policy: allocator %q is added twice", name))
	}
	added[name] = allocating[M]{a}
}

// renamed has, for each name of an earlier version, the name to use instead.
var renamed = map[string]string{
	"quart-persistence": `"quart", which is the same`,
	"quart-qna":         `"quart"; its predictor of burstiness is compared by "make bench-cv"`,
	"quart-attention":   `"quart"; its predictor of burstiness is compared by "make bench-cv"`,
}

// NameError means that a level has no policy of this name.
type NameError struct {
	Level string // such as "allocator"
	Name  string
	Want  string // the names to choose from, or the one to use in its place
	Gone  bool   // an earlier version had the policy
}

// Error returns the level, the name and what to use in its place.
func (e *NameError) Error() string {
	if e.Gone {
		return fmt.Sprintf("policy: %s %q is no more, want %s", e.Level, e.Name, e.Want)
	}
	return fmt.Sprintf("policy: %s %q, want %s", e.Level, e.Name, e.Want)
}

// PriceError means that [Names.Price] is out of its bounds.
type PriceError struct{ Price float64 }

// Error returns the price and the bounds.
func (e *PriceError) Error() string {
	return fmt.Sprintf("policy: price %v, want %s", e.Price, e.Want())
}

// Want returns the bounds.
func (e *PriceError) Want() string { return fmt.Sprintf("0 to %d", int(autoscaler.MostPrice)) }

func pick[P any](kind string, from map[string]P, name *string, fallback string) (P, error) {
	if *name == "" {
		*name = fallback
	}
	p, ok := from[*name]
	if instead := renamed[*name]; !ok && instead != "" {
		return p, &NameError{Level: kind, Name: *name, Want: instead, Gone: true}
	}
	if !ok {
		return p, &NameError{Level: kind, Name: *name, Want: "one of " + strings.Join(slices.Sorted(maps.Keys(from)), ", ")}
	}
	return p, nil
}

// WithAllocator returns s with another allocator, for tests and studies.
func WithAllocator[M any](s Set, name string, a plan.Allocator[M]) Set {
	return s.withAllocator(name, allocating[M]{a})
}

func (s Set) withAllocator(name string, a level) Set {
	s.allocators = maps.Clone(s.allocators)
	s.allocator, s.names.Allocator, s.allocators[name] = a, name, a
	return s
}

// WithCorrector returns s with another corrector.
func WithCorrector[M any](s Set, name string, c plan.Corrector[M]) Set {
	s.corrector, s.names.Corrector = correcting[M]{c}, name
	return s
}

// WithSharer returns s with another sharer.
func WithSharer(s Set, name string, x plan.Sharer) Set {
	s.sharer, s.names.Sharer = x, name
	return s
}

// WithPlacer returns s with another placer.
func WithPlacer(s Set, name string, p plan.Placer) Set {
	s.placer, s.names.Placer = p, name
	return s
}

// WithWarmer returns s with another warmer.
func WithWarmer(s Set, name string, w plan.Warmer) Set {
	s.warmer, s.names.Warmer = w, name
	return s
}

// level is an allocator or corrector without its memory's type.
type level interface {
	decide(s plan.Snapshot, d plan.Domain, a plan.Alloc, m any) (plan.Alloc, any, error)
	merge(a, b any) any
	decode(data []byte) (any, error)
}

// merger is a policy that can merge the memories of domains that became one. For other policies,
// the first memory is kept.
type merger[M any] interface{ Merge(a, b M) M }

type allocating[M any] struct{ plan.Allocator[M] }

func (e allocating[M]) decide(s plan.Snapshot, d plan.Domain, _ plan.Alloc, m any) (plan.Alloc, any, error) {
	typed, _ := m.(M) // nil before the first decision
	return e.Allocate(s, d, typed)
}

func (e allocating[M]) merge(a, b any) any              { return merge[M](e.Allocator, a, b) }
func (e allocating[M]) decode(data []byte) (any, error) { return decode[M](data) }

// mixing is a mixer as a level. Its decide is never called, because [mixer] is.
type mixing[M any] struct{ plan.Mixer[M] }

// mixer is a level that owns the mix of variants.
type mixer interface {
	mix(s plan.Snapshot, d plan.Domain, b plan.Budget, m any) (plan.Mix, any, error)
}

func (e mixing[M]) mix(s plan.Snapshot, d plan.Domain, b plan.Budget, m any) (plan.Mix, any, error) {
	typed, _ := m.(M)
	return e.Mix(s, d, b, typed)
}

func (e mixing[M]) decide(plan.Snapshot, plan.Domain, plan.Alloc, any) (plan.Alloc, any, error) {
	return nil, nil, errors.New("it decides within a budget alone")
}

func (e mixing[M]) merge(a, b any) any              { return merge[M](e.Mixer, a, b) }
func (e mixing[M]) decode(data []byte) (any, error) { return decode[M](data) }

type correcting[M any] struct{ plan.Corrector[M] }

func (e correcting[M]) decide(s plan.Snapshot, d plan.Domain, a plan.Alloc, m any) (plan.Alloc, any, error) {
	typed, _ := m.(M)
	return e.Correct(s, d, a, typed)
}

func (e correcting[M]) merge(a, b any) any              { return merge[M](e.Corrector, a, b) }
func (e correcting[M]) decode(data []byte) (any, error) { return decode[M](data) }

func merge[M any](policy, a, b any) any {
	x, ok := a.(M)
	if !ok {
		return b
	}
	y, ok := b.(M)
	if j, can := policy.(merger[M]); ok && can {
		return j.Merge(x, y)
	}
	return x
}

func decode[M any](data []byte) (any, error) {
	var m M
	err := json.Unmarshal(data, &m)
	return m, err
}

package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/placement"
	"github.com/stagecoach-serving/stagecoach/plan"
)

// Policies names the policies of a loop. An empty name means the default.
type Policies struct {
	Allocator string // sizer
	Placer    string // spread, first-fit
	Warmer    string // key-stages
}

// chosen are policies by value, the allocator without the type of its memory.
type chosen struct {
	allocator allocator
	placer    plan.Placer
	warmer    plan.Warmer
}

// choose finds the named policies.
func (p Policies) choose() (c chosen, err error) {
	list := struct {
		allocators map[string]allocator
		placers    map[string]plan.Placer
		warmers    map[string]plan.Warmer
	}{
		allocators: map[string]allocator{"sizer": erased[autoscaler.Memory]{autoscaler.NewSizer(autoscaler.Config{})}},
		placers:    map[string]plan.Placer{"spread": placement.Spread{}, "first-fit": placement.FirstFit{}},
		warmers:    map[string]plan.Warmer{"key-stages": placement.KeyStages{}},
	}
	var errs [3]error
	c.allocator, errs[0] = pick("allocator", list.allocators, p.Allocator, "sizer")
	c.placer, errs[1] = pick("placer", list.placers, p.Placer, "spread")
	c.warmer, errs[2] = pick("warmer", list.warmers, p.Warmer, "key-stages")
	return c, errors.Join(errs[:]...)
}

func pick[P any](kind string, from map[string]P, name, fallback string) (P, error) {
	if name == "" {
		name = fallback
	}
	p, ok := from[name]
	if !ok {
		return p, fmt.Errorf("control: %s %q, want one of %s", kind, name, strings.Join(slices.Sorted(maps.Keys(from)), ", "))
	}
	return p, nil
}

// allocator is a plan.Allocator whose memory is opaque.
type allocator interface {
	allocate(s plan.Snapshot, d plan.Domain, m any) (plan.Alloc, any, error)
	merge(a, b any) any
}

// merger is an allocator that can join the memories of domains that became one; others keep the first.
type merger[M any] interface{ Merge(a, b M) M }

type erased[M any] struct{ plan.Allocator[M] }

func (e erased[M]) allocate(s plan.Snapshot, d plan.Domain, m any) (plan.Alloc, any, error) {
	typed, _ := m.(M) // nil before the first decision
	return e.Allocate(s, d, typed)
}

func (e erased[M]) merge(a, b any) any {
	x, ok := a.(M)
	if !ok {
		return b
	}
	y, ok := b.(M)
	if j, can := e.Allocator.(merger[M]); ok && can {
		return j.Merge(x, y)
	}
	return x
}

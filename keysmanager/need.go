package keysmanager

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// ErrNoRoom means that parameters do not fit into a node's memory, now or ever.
var ErrNoRoom = errors.New("no room")

// refused is the error of a load that does not fit.
type refused struct {
	bytes int64
	text  string
}

func (e *refused) Error() string { return ErrNoRoom.Error() + ": " + e.text }

func (e *refused) Unwrap() error { return ErrNoRoom }

// NeedsMemory returns the bytes that the load needs.
func (e *refused) NeedsMemory() int64 { return e.bytes }

// need is the memory that a zygote takes.
type need struct {
	bytes int64
	of    string // where the number comes from
}

// needShare is the divisor of a zygote's overhead: a zygote takes 1/needShare of the size of its
// parameters, in addition to the parameters themselves and its engine's base.
const needShare = 32

// need returns how much memory the zygote of an image is expected to take. If the zygote was loaded
// before, this is what it took then. Otherwise, need estimates the memory from the sizes of the
// model's files. It returns an error if the model is missing or incomplete.
func (l *loader) need(key zygote.Key, image sandbox.Image) (need, error) {
	key.Generation = 0
	l.store.mu.Lock()
	known, ok := l.store.sizes[key]
	l.store.mu.Unlock()
	if ok {
		return need{known, "as it took before"}, nil
	}
	base := engineByKey(key).base
	if key.Model == "" {
		return need{base, "no model"}, nil
	}
	bytes, of, err := resources.Parameters(image.Root, key.Model)
	if err != nil {
		return need{}, fmt.Errorf("image %q: %w", image.Name, err)
	}
	return need{bytes + bytes/needShare + base, of}, nil
}

// memory describes how much of a node's memory is in use.
type memory struct {
	bounds []resources.Bound
	coming int64 // bytes that loads under way are expected to take
}

// keeper is a function that has memory.
type keeper struct {
	name  string
	bytes int64
}

// refusal returns the error of a load that does not fit. The error says how much memory the load
// needs, how much is free, and which functions have the rest.
func refusal(function string, n need, m memory, own int64, busy, loading []keeper) error {
	b, room := cache.Tightest(m.bounds, Threshold)
	limit := int64(float64(b.Total) * Threshold)
	var s strings.Builder
	fmt.Fprintf(&s, "zygote of %q needs about %s (%s), ", function, plan.Size(n.bytes), n.of)
	free := max(0, room-m.coming)
	fmt.Fprintf(&s, "%s are free of %s (%.0f %% of %s, %s)", plan.Size(free), plan.Size(limit), 100*Threshold, plan.Size(b.Total), b.Name)
	held := func(what string, by []keeper) {
		slices.SortFunc(by, func(x, y keeper) int { return cmp.Or(cmp.Compare(y.bytes, x.bytes), cmp.Compare(x.name, y.name)) })
		sum, names := int64(0), []string{}
		for i, h := range by {
			sum += h.bytes
			if i < 5 {
				names = append(names, fmt.Sprintf("%s %s", h.name, plan.Size(h.bytes)))
			} else if i == 5 {
				names = append(names, "…")
			}
		}
		if len(by) > 0 {
			fmt.Fprintf(&s, "; %s are %s: %s", plan.Size(sum), what, strings.Join(names, ", "))
		}
	}
	held("held by zygotes with replicas", busy)
	held("kept for loads under way", loading)
	if others := b.Used - own; b.Name != resources.BoundOwn && others > 0 {
		fmt.Fprintf(&s, "; %s are used by other processes", plan.Size(others))
	}
	switch {
	case n.bytes > limit:
		fmt.Fprintf(&s, "; it can never fit here: use a node with more memory")
	case b.Name == resources.BoundOwn:
		s.WriteString("; scale other functions down, or raise --memory")
	default:
		s.WriteString("; scale other functions down, or use a node with more memory")
	}
	return &refused{n.bytes, s.String()}
}

package join

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Mask is the name of the input that allows padding: 1 for each value of the second axis, 0 for
// padding.
const Mask = "attention_mask"

// Bounds of a joined run.
const (
	// maxBytes bounds the inputs of a joined run, with padding, so that a batch takes about as much
	// memory in a replica as the largest request.
	maxBytes = 64 << 20
	// maxPadding is the largest part of a joined run's second axis that may be padding.
	maxPadding = 0.25
)

// set is the inputs of one run, in the order of the model's inputs.
type set struct {
	at     int // index in the caller's list
	inputs []tensor.Tensor
	rows   int64
	length int64  // of the axis that can be padded; 0: none can
	bytes  int64  // of the inputs
	key    string // sets with the same key can be joined if their lengths are equal or padded
}

// group is sets that one run computes.
type group struct {
	sets   []set
	length int64 // of the longest set
	padded bool  // the sets have several lengths

	rows, filled int64 // rows of all sets, and values of the second axis without padding
	bytes        int64 // inputs of all sets, per value of the second axis if that can be padded
}

// newSet returns the set of some inputs. It returns false if the inputs do not match the model's or
// if their first axes differ; then they can only run alone.
func newSet(at int, model []zygote.Info, given []tensor.Tensor) (set, bool) {
	s := set{at: at, inputs: make([]tensor.Tensor, len(model))}
	if len(given) != len(model) {
		return s, false
	}
	for i, info := range model {
		k := slices.IndexFunc(given, func(t tensor.Tensor) bool { return t.Name == info.Name })
		if k < 0 || given[k].Datatype != info.Datatype || len(given[k].Shape) == 0 || len(given[k].Data) == 0 || given[k].Validate() != nil {
			return s, false
		}
		s.inputs[i] = given[k]
		s.bytes += int64(len(given[k].Data))
		if info.Name == Mask && len(given[k].Shape) == 2 && open(info, 1) {
			s.length = given[k].Shape[1]
		}
	}
	s.rows = s.inputs[0].Shape[0]
	var key strings.Builder
	for i, t := range s.inputs {
		if t.Shape[0] != s.rows {
			return s, false
		}
		rest := slices.Clone(t.Shape[1:])
		if s.pads(model[i], t) {
			rest[0] = -1
		}
		fmt.Fprint(&key, rest, ";")
	}
	s.key = key.String()
	return s, true
}

// open reports whether an axis of an input or output may have any length.
func open(info zygote.Info, axis int) bool {
	return info.Shape == nil || axis < len(info.Shape) && info.Shape[axis] < 0
}

// pads reports whether t's second axis is one that the set's mask covers.
func (s *set) pads(info zygote.Info, t tensor.Tensor) bool {
	return s.length > 0 && len(t.Shape) > 1 && t.Shape[1] == s.length && open(info, 1)
}

// groups splits sets into groups, in an order that depends only on the sets. padding says that sets
// of different lengths may share a group.
func groups(sets []set, padding bool) []group {
	sets = slices.Clone(sets)
	first := map[string]int{}
	for i, s := range sets {
		if _, known := first[s.key]; !known {
			first[s.key] = i
		}
	}
	slices.SortStableFunc(sets, func(a, b set) int {
		return cmp.Or(cmp.Compare(first[a.key], first[b.key]), cmp.Compare(a.length, b.length))
	})
	var out []group
	for _, s := range sets {
		if last := len(out) - 1; last < 0 || !out[last].takes(s, padding) {
			out = append(out, group{})
		}
		out[len(out)-1].add(s)
	}
	return out
}

// newGroup returns the group of sets that can share a run, in order of length.
func newGroup(sets []set) *group {
	g := new(group)
	for _, s := range sets {
		g.add(s)
	}
	return g
}

// takes reports whether the group has room for s, which is at least as long as the group's sets.
func (g *group) takes(s set, padding bool) bool {
	if g.sets[0].key != s.key || g.length != s.length && !padding {
		return false
	}
	all, filled := (g.rows+s.rows)*s.length, g.filled+s.rows*s.length
	bytes := (g.bytes + s.bytes/max(s.length, 1)) * max(s.length, 1)
	return bytes <= maxBytes && float64(all-filled) <= maxPadding*float64(all)
}

func (g *group) add(s set) {
	g.padded = g.padded || len(g.sets) > 0 && g.length != s.length
	g.sets, g.length = append(g.sets, s), s.length
	g.rows, g.filled, g.bytes = g.rows+s.rows, g.filled+s.rows*s.length, g.bytes+s.bytes/max(s.length, 1)
}

// inputs returns the joined inputs of the group.
func (g *group) inputs(model []zygote.Info) []tensor.Tensor {
	out := make([]tensor.Tensor, len(model))
	for i := range model {
		like := g.sets[len(g.sets)-1].inputs[i] // the longest
		joined := tensor.Tensor{Name: like.Name, Datatype: like.Datatype, Shape: slices.Clone(like.Shape)}
		joined.Shape[0] = g.rows
		size := len(like.Data) / int(like.Shape[0]) // of a row
		joined.Data = make([]byte, 0, int(joined.Shape[0])*size)
		for _, s := range g.sets {
			t := s.inputs[i]
			row := len(t.Data) / int(s.rows)
			if row == size {
				joined.Data = append(joined.Data, t.Data...)
				continue
			}
			for r := range int(s.rows) {
				joined.Data = append(joined.Data, t.Data[r*row:(r+1)*row]...)
				joined.Data = joined.Data[:len(joined.Data)+size-row] // zeros
			}
		}
		out[i] = joined
	}
	return out
}

// outputs splits the outputs of a joined run, by set. It returns an error if an output's first axis
// is not the rows of all sets.
func (g *group) outputs(model []zygote.Info, joined []tensor.Tensor) ([][]tensor.Tensor, error) {
	out := make([][]tensor.Tensor, len(g.sets))
	for k, t := range joined {
		if len(t.Shape) == 0 || t.Shape[0] != g.rows {
			return nil, fmt.Errorf("output %q of shape %v, want %d along the first axis", t.Name, t.Shape, g.rows)
		}
		row, begin := len(t.Data)/int(g.rows), 0
		cut := g.padded && len(t.Shape) > 1 && t.Shape[1] == g.length && open(model[k], 1)
		for i, s := range g.sets {
			own := tensor.Tensor{Name: t.Name, Datatype: t.Datatype, Shape: slices.Clone(t.Shape)}
			own.Shape[0] = s.rows
			end := begin + row*int(s.rows)
			if own.Data = slices.Clip(t.Data[begin:end]); cut && s.length < g.length {
				own.Shape[1] = s.length
				own.Data = shortened(own.Data, int(s.rows), row, row/int(g.length)*int(s.length))
			}
			out[i], begin = append(out[i], own), end
		}
	}
	return out, nil
}

// shortened returns the first bytes of each row.
func shortened(data []byte, rows, from, to int) []byte {
	out := make([]byte, 0, rows*to)
	for r := range rows {
		out = append(out, data[r*from:r*from+to]...)
	}
	return out
}

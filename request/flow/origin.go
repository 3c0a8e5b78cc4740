package flow

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// origin says which function produced some items, and how long the items are.
type origin struct {
	from    string   // producer of all items, see task.Task.Variant; plan.FromJoin: several
	froms   []string // producer per item; nil: from
	length  int      // of all items together; 0: unknown
	lengths []int    // per item; nil: each item has length
}

// producer returns the producer of an item.
func (o *origin) producer(item int) string {
	if o.froms != nil {
		return o.froms[item]
	}
	return o.from
}

// lengthOf returns the length of an item.
func (o *origin) lengthOf(item int) int {
	if o.lengths != nil {
		return o.lengths[item]
	}
	return o.length
}

// origin returns the producer and the length of the input of a call. A call with all items of
// several stages has the producer plan.FromJoin and the greatest length of the parts.
func (s *stage) origin(each bool, call int) (from string, length int) {
	switch {
	case len(s.origins) == 0:
		return plan.FromClient, 0
	case each:
		for i := range s.parts {
			if n := len(s.parts[i].Items); call >= n {
				call -= n
				continue
			}
			return s.origins[i].producer(call), s.origins[i].lengthOf(call)
		}
	case len(s.origins) == 1:
		return s.origins[0].from, s.origins[0].length
	}
	for i := range s.origins {
		length = max(length, s.origins[i].length)
	}
	return plan.FromJoin, length
}

// merged returns the origin of a stage's whole output. unit is the unit of lengths. The output of
// no calls, for no items, has no producer and the least length.
func (s *stage) merged(unit string) origin {
	switch {
	case len(s.outs) == 1:
		return s.outs[0]
	case len(s.outs) == 0 && unit != "":
		return origin{length: 1}
	}
	var o origin
	measured := false
	for i := range s.outs {
		out := &s.outs[i]
		if i == 0 {
			o.from = out.from
		} else if o.from != out.from {
			o.from = plan.FromJoin
		}
		if measured = measured || out.length > 0; unit == pipeline.LengthTensor {
			o.length = max(o.length, out.length)
		} else {
			o.length = min(o.length+out.length, longest)
		}
	}
	for i := range s.outs {
		for k := range s.results[i] {
			if o.from == plan.FromJoin {
				o.froms = append(o.froms, s.outs[i].producer(k))
			}
			if measured {
				o.lengths = append(o.lengths, s.outs[i].lengthOf(k))
			}
		}
	}
	return o
}

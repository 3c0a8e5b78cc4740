package sim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// digest is a hash of the decisions of a run, in their order. Two runs have equal digests if their
// policies decided the same. A decision is what a plan asks for: slots, CPU, batches, ranks, and
// parameters to keep. It does not include:
//
//   - reasons and revisions
//   - names of replicas, which only show in what order the replicas were started
//   - marks of key stages. If a mark has an effect, later decisions show it
//   - the time, and repetitions of the last decision. So ticks at other times are no difference
type digest struct {
	sum  []byte // of all decisions so far
	last []byte
	text []byte // memory for the next one
}

// add adds the decision of a plan.
func (d *digest) add(p *plan.Plan) {
	d.text = d.text[:0]
	slots := make([]string, 0, 64)
	for i := range p.Wants {
		w := &p.Wants[i]
		d.text = fmt.Appendf(d.text, "%s %d %d %s\n", w.Function, w.CPUMilli, w.Batch, w.Rank)
		slots = slots[:0]
		for _, s := range w.Slots {
			slots = append(slots, s.Node+" "+s.Device)
		}
		slices.Sort(slots)
		d.text = append(append(d.text, strings.Join(slots, ",")...), '\n')
	}
	for _, w := range p.Warm {
		d.text = fmt.Appendf(d.text, "%s %s %d\n", w.Function, w.Node, w.Warmth)
	}
	for _, t := range p.Tables {
		d.text = fmt.Appendf(d.text, "%s %d\n", t.Stage, t.Version)
	}
	if d.sum != nil && bytes.Equal(d.text, d.last) {
		return
	}
	h := fnv.New128a()
	h.Write(d.sum)
	h.Write(binary.AppendUvarint(nil, uint64(len(d.text))))
	h.Write(d.text)
	d.sum = h.Sum(nil)
	d.text, d.last = d.last, d.text
}

// String returns the digest; empty: nothing was decided.
func (d *digest) String() string { return fmt.Sprintf("%x", d.sum) }

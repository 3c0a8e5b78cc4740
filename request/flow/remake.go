package flow

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// remakes is what a walk needs to make lost items again.
type remakes struct {
	made     map[uint32]*made       // calls whose outputs stay on nodes, by their ids
	makers   map[string]uint32      // ids of calls, by the blobs of the items that they made
	replaced map[string]tensor.Item // new items, by the blobs of the lost ones
	waiting  map[uint32][]string    // blobs of lost items that a call waits for, by its id
}

// made is a call that has an answer, with what is needed to run it again.
type made struct {
	input  tensor.Input
	output tensor.Activation
	pin    task.Pin // the revision that has answered
}

// kept returns the blob of an item that a node keeps. It is empty for an item of the control plane.
func kept(it *tensor.Item) string {
	if it.Ref == nil || it.Ref.Node == "" {
		return ""
	}
	return it.Ref.Blob
}

// remember records a call if nodes keep items of its output, because these may get lost.
func (w *walk) remember(k *call, r *task.Reply) {
	for i := range r.Output {
		blob := kept(&r.Output[i])
		if blob == "" {
			continue
		}
		m := w.remakes
		if m == nil {
			m = &remakes{made: map[uint32]*made{}, makers: map[string]uint32{}, replaced: map[string]tensor.Item{}, waiting: map[uint32][]string{}}
			w.remakes = m
		}
		if m.made[k.id] == nil {
			m.made[k.id] = &made{input: w.stages[k.stage].inputs[k.item], output: r.Output, pin: task.Pin{Function: w.answering(k, r), Revision: r.Revision}}
		}
		m.makers[blob] = k.id
	}
}

// input returns the input of a call, with the items that were made again.
func (w *walk) input(k *call) tensor.Input {
	m := w.remakes
	if m == nil {
		return w.stages[k.stage].inputs[k.item]
	}
	var in tensor.Input
	if at := m.made[k.id]; at != nil {
		in = at.input // the stage may have dropped its inputs
	} else {
		in = w.stages[k.stage].inputs[k.item]
	}
	if len(m.replaced) == 0 {
		return in
	}
	in = slices.Clone(in)
	for i := range in {
		in[i].Items = slices.Clone(in[i].Items)
		for n := range in[i].Items {
			in[i].Items[n] = m.now(in[i].Items[n])
		}
	}
	return in
}

// now returns the latest item in place of one that may be lost.
func (m *remakes) now(it tensor.Item) tensor.Item {
	for {
		next, ok := m.replaced[kept(&it)]
		if !ok {
			return it
		}
		it = next
	}
}

// pins returns the revision that has to run a call again.
func (m *remakes) pins(k *call) []task.Pin {
	if pin := m.made[k.id].pin; pin.Revision != 0 {
		return []task.Pin{pin}
	}
	return nil
}

// remake runs the calls again that made the lost items of k, and then k. If a call may not run
// again, the request ends.
func (c *Core) remake(now time.Time, w *walk, k *call, r *task.Reply) {
	makers, cause := w.makersOf(r.Lost)
	switch {
	case cause != "":
	case k.exhausted(r):
		cause = fmt.Sprintf("attempt %d of %d", k.used, Attempts)
	case !beforeDeadline(now, w):
		cause = "the deadline has passed"
	}
	if cause != "" {
		k.done = true // the dispatcher is done with it and needs no cancel
		failed := *r
		failed.Message += "; not tried again: " + cause
		c.fail(w, w.failure(k, &failed))
		return
	}
	k.attempt++
	w.remakes.waiting[k.id] = r.Lost
	for _, p := range makers {
		if p.done { // otherwise it runs again already
			p.done, p.again = false, true
			p.attempt++
			c.submit(w, p)
		}
	}
	c.resume(w)
}

// makersOf returns the calls that must run again to make lost items. cause says why they cannot.
func (w *walk) makersOf(lost []string) (out []*call, cause string) {
	for _, blob := range lost {
		if w.remakes == nil || w.remakes.makers[blob] == 0 {
			return nil, "no stage is known that has made it"
		}
		if _, there := w.remakes.replaced[blob]; there {
			continue
		}
		p := &w.calls[w.remakes.makers[blob]-1]
		stage := &w.graph.Stages[p.stage]
		if !stage.Idempotent {
			return nil, fmt.Sprintf("stage %q, which has made it, is declared not idempotent", stage.Name)
		}
		if slices.Contains(out, p) {
			continue
		}
		if p.done {
			if p.used++; p.used >= Attempts || p.attempt >= mostAttempts {
				return nil, fmt.Sprintf("stage %q has made it %d times", stage.Name, p.used)
			}
		}
		out = append(out, p)
	}
	return out, ""
}

// remade replaces the items of a call that has run again.
func (c *Core) remade(w *walk, p *call, r *task.Reply) {
	m := w.remakes
	old := m.made[p.id]
	p.done = true
	if len(r.Output) != len(old.output) {
		failed := *r
		failed.Code = task.InputLost
		failed.Message = fmt.Sprintf("items of its output were lost with a node, and it has made %d items again, of %d", len(r.Output), len(old.output))
		c.fail(w, w.failure(p, &failed))
		return
	}
	w.blobs = w.blobs || hasRefs(r.Output)
	for i := range r.Output {
		if blob := kept(&old.output[i]); blob != "" {
			m.replaced[blob] = r.Output[i]
		}
		if blob := kept(&r.Output[i]); blob != "" {
			m.makers[blob] = p.id
		}
	}
	old.output = r.Output
	c.resume(w)
}

// resume submits the calls that no longer wait for lost items, in order.
func (c *Core) resume(w *walk) {
	for i := range w.calls {
		k := &w.calls[i]
		lost, waits := w.remakes.waiting[k.id]
		if !waits || slices.ContainsFunc(lost, func(blob string) bool { _, there := w.remakes.replaced[blob]; return !there }) {
			continue
		}
		delete(w.remakes.waiting, k.id)
		c.submit(w, k)
	}
}

package flow

import (
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// If another process owns the function of a task, the task's large items go directly between this
// process and the nodes, and the message to the owner has references to them. In these cases, the
// message has the items themselves:
//
//   - The owner is of a release without [ItemsFeature].
//   - This process lacks a connection with a node.
//   - The replica is on no node that keeps items, such as the owner's own node.

// ItemsFeature is the feature of owners that pass on references to items, and obey the field Keep
// of a task.
const ItemsFeature = "items"

// offerPause is how long messages have the items for a function after one of its replicas could not
// fetch an item from this process.
const offerPause = 30 * time.Second

func newWhole() *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "stagecoach", Subsystem: "flow", Name: "message_items_total", Help: "Large items that went whole through NATS, to the control plane that leads or from it.",
	}, []string{"direction"})
	v.WithLabelValues("sent") // a series from the start
	v.WithLabelValues("received")
	return v
}

// large returns how many large items an activation has in memory.
func large(a tensor.Activation) (n int) {
	for i := range a {
		if a[i].Ref == nil && a[i].Size() > tensor.InlineLimit {
			n++
		}
	}
	return n
}

// direct reports whether an owner understands references to items, and whether large items can go
// directly between this process and the nodes.
func (r *remote) direct(owner string) (understands, direct bool) {
	understands = r.c.nodes != nil && r.c.cfg.Remote.Understands(owner, ItemsFeature)
	return understands, understands && r.c.cfg.Remote.Reaches()
}

// offers reports whether nodes can get items for a function from this process.
func (r *remote) offers(function string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Now().After(r.pauses[function])
}

// enter submits a task from a shard. Before that, it moves large items to the store, if nodes can
// fetch them from there.
func (r *remote) enter(s *shard, t *task.Task) *task.Reply {
	n := 0
	for _, p := range t.Input {
		n += large(p.Items)
	}
	if n > 0 {
		if _, direct := r.direct(r.c.cfg.Remote.Owner(t.Function)); direct && r.offers(t.Function) {
			if w := s.waiting[t.Request]; w != nil {
				w.blobs = true
			}
			if err := store(r.c.cfg.Store, t); err != nil {
				r.c.cfg.Log.Debug("items go through NATS", "call", t.Request, "error", err)
			}
		}
	}
	return r.submit(t)
}

// encode encodes a task for the owner of its function. If that is not possible, it returns a reply
// that says why.
func (r *remote) encode(t *task.Task) (l letter, failed *task.Reply) {
	if l.owner = r.c.cfg.Remote.Owner(t.Function); l.owner == "" {
		return l, nil
	}
	understands, direct := r.direct(l.owner)
	if lost := keptBlobs(t.Input); len(lost) > 0 && !understands {
		return l, &task.Reply{Key: t.Key, Code: task.InputLost, Lost: lost, Message: fmt.Sprintf("the process %s, which owns the function now, is of an earlier release, which cannot fetch items of nodes", l.owner)}
	}
	whole, most, offer := *t, r.c.cfg.Remote.Most(), direct && r.offers(t.Function)
	whole.Keep, whole.Input = direct, slices.Clone(t.Input)
	for i := range whole.Input {
		p := &whole.Input[i]
		if offer {
			p.Items, l.offered = r.offer(p.Items, l.offered)
		}
		items, err := tensor.ResolveStored(r.c.cfg.Store, p.Items)
		if err != nil {
			return l, &task.Reply{Key: t.Key, Code: task.Unavailable, Message: "input: " + err.Error()}
		}
		p.Items = items
		r.c.whole.WithLabelValues("sent").Add(float64(large(items)))
	}
	l.msg = wire.AppendTask(nil, &whole)
	if len(l.msg) > most-messageRoom {
		return l, &task.Reply{Key: t.Key, Code: task.BadInput, Message: fmt.Sprintf(
			"input of %d bytes, want at most %d: the function's owner is another process, and the NATS cluster takes no larger messages (max_payload)", len(l.msg), most-messageRoom)}
	}
	return l, nil
}

// keptBlobs returns the items of an input that nodes keep.
func keptBlobs(in tensor.Input) (all []string) {
	for _, p := range in {
		for i := range p.Items {
			if blob := kept(&p.Items[i]); blob != "" {
				all = append(all, blob)
			}
		}
	}
	return all
}

// offer replaces references to items of the store by references with which nodes can fetch them. It
// adds the names of the new references to offered. If an item cannot be offered, its reference
// stays.
func (r *remote) offer(a tensor.Activation, offered []string) (tensor.Activation, []string) {
	out := slices.Clone(a)
	for i := range out {
		ref := out[i].Ref
		if ref == nil || ref.Node != "" {
			continue
		}
		at, err := r.c.nodes.Offer(*ref)
		if err != nil {
			r.c.cfg.Log.Debug("an item goes through NATS", "call", ref.Owner, "bytes", ref.Size, "error", err)
			continue
		}
		out[i].Ref = &at
		offered = append(offered, at.Blob)
	}
	return out, offered
}

// refetch handles a reply that says that a replica did not get items that this process has offered.
// The items are not lost: the task runs again, with the items in its message. The caller holds
// r.mu.
func (r *remote) refetch(p *passage, reply *task.Reply) {
	if reply.Code != task.InputLost {
		return
	}
	n := len(reply.Lost)
	reply.Lost = slices.DeleteFunc(reply.Lost, func(blob string) bool { return slices.Contains(p.offered, blob) })
	if len(reply.Lost) == n {
		return
	}
	now := time.Now()
	for f, until := range r.pauses {
		if now.After(until) {
			delete(r.pauses, f)
		}
	}
	if r.pauses[p.task.Function].IsZero() {
		r.c.cfg.Log.Info("a replica cannot fetch items from this process; they go through NATS for a while", "function", p.task.Function, "for", offerPause, "error", reply.Message)
	}
	r.pauses[p.task.Function] = now.Add(offerPause)
}

package flow

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// nodeStore is a Store that also has items of nodes. Package items implements it.
type nodeStore interface {
	// Adopt records the items of an output that nodes keep, so that Drop drops them, too.
	Adopt(a tensor.Activation)
	// Read returns an encoded item that a node keeps.
	Read(ctx context.Context, ref tensor.Ref) ([]byte, error)
	// Offer returns a reference with which nodes can fetch an item of the Store from this process,
	// until the item's owner is dropped.
	Offer(ref tensor.Ref) (tensor.Ref, error)
}

// nodeItems fetches items that nodes keep, for this process.
type nodeItems struct {
	nodeStore

	ctx  context.Context // of fetches
	end  context.CancelFunc
	work sync.WaitGroup
}

// newNodeItems returns nil if the store has no items of nodes.
func newNodeItems(s tensor.Store) *nodeItems {
	store, ok := s.(nodeStore)
	if !ok {
		return nil
	}
	n := &nodeItems{nodeStore: store}
	n.ctx, n.end = context.WithCancel(context.Background())
	return n
}

// close ends all fetches, and waits for them. No reply comes after that.
func (n *nodeItems) close() {
	if n != nil {
		n.end()
		n.work.Wait()
	}
}

// needs reports whether this process needs the items of a reply's output itself: for the client, or
// to measure them.
func (c *Core) needs(r *task.Reply) bool {
	w := c.walks[r.Request]
	if w == nil || r.Code != task.OK || r.Task < 1 || int(r.Task) > len(w.calls) {
		return false
	}
	k := &w.calls[r.Task-1]
	if k.done || k.attempt != r.Attempt || !slices.ContainsFunc(r.Output, func(it tensor.Item) bool { return kept(&it) != "" }) {
		return false
	}
	return len(w.graph.Stages[k.stage].Next) == 0 || w.measures(k)
}

// fetched returns a copy of a reply that has the items of nodes in memory. If one of them is lost,
// the answer is lost, too: the call may run again as if its replica was lost. ctx ends with the
// request.
func (n *nodeItems) fetched(ctx context.Context, r *task.Reply) *task.Reply {
	whole := *r
	whole.Output = slices.Clone(r.Output)
	for i := range whole.Output {
		it := &whole.Output[i]
		if kept(it) == "" {
			continue
		}
		b, err := n.Read(ctx, *it.Ref)
		if err == nil {
			*it, err = tensor.DecodeItem(b)
		}
		if err != nil {
			whole.Code, whole.Output = task.ReplicaLost, nil
			whole.Message = fmt.Sprintf("item %d of its output, which node %q keeps: %v", i, r.Output[i].Ref.Node, err)
			return &whole
		}
	}
	return &whole
}

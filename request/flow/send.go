package flow

import (
	"fmt"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Bounds in bytes of an encoded task. Above largeTask, the task's inline items are moved to the
// store too. Above maxTask, the task is refused. The bus's own limit is higher.
const (
	largeTask = 4 << 20
	maxTask   = 7 << 20
)

// submit sends a task. If it cannot, it returns the reply that says why.
func (c *Coordinator) submit(s *shard, t *task.Task) *task.Reply {
	if t.Attempt > 1 {
		c.retries.Inc()
	}
	t.ReplyTo = c.inbox
	if size(t) > largeTask {
		if w := s.waiting[t.Request]; w != nil {
			w.blobs = true
		}
		if err := store(c.cfg.Store, t); err != nil {
			return &task.Reply{Key: t.Key, Code: task.Unavailable, Message: "input: " + err.Error()}
		}
		if n := size(t); n > maxTask {
			return &task.Reply{Key: t.Key, Code: task.BadInput, Message: fmt.Sprintf("input of %d bytes in small items, want at most %d: pass fewer or larger items", n, maxTask)}
		}
	}
	if c.cfg.Near != nil && c.cfg.Near.Submit(t) {
		return nil
	}
	if c.remote != nil {
		return c.remote.enter(s, t)
	}
	s.scratch = wire.AppendTask(s.scratch[:0], t)
	err := c.cfg.Bus.Submit(t.Function, s.scratch)
	if cap(s.scratch) > largeTask {
		s.scratch = nil
	}
	if err != nil {
		return &task.Reply{Key: t.Key, Code: task.Unavailable, Message: err.Error()}
	}
	return nil
}

// store moves the large items of a task's input to a store.
func store(s tensor.Store, t *task.Task) error {
	for i := range t.Input {
		items, err := tensor.Externalise(s, t.Request, t.Input[i].Items)
		if err != nil {
			return err
		}
		t.Input[i].Items = items
	}
	return nil
}

// size estimates the encoded size of a task in bytes. The estimate is rather too high than too low.
func size(t *task.Task) int {
	n := 512 + len(t.Request) + len(t.Function) + len(t.Pipeline) + len(t.Stage) + len(t.ReplyTo) + len(t.Traceparent) + len(t.App) + len(t.Variant)
	for _, p := range t.Pins {
		n += len(p.Function) + 16
	}
	for _, h := range t.Header {
		n += len(h.Name) + len(h.Value) + 8
	}
	for _, p := range t.Input {
		n += len(p.From) + 8
		for i := range p.Items {
			n += 64 + 32*len(p.Items[i].Tensors) + p.Items[i].Size() + len(p.Items[i].ContentType)
		}
	}
	return n
}

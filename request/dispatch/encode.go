package dispatch

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// encoder encodes batches for one replica.
type encoder struct {
	link  *link
	store Store // nil: that of the Shell

	frame []byte // of the latest batch
	calls []wire.Call
}

// batch encodes a batch. If the batch cannot be sent, bad is the call that is the cause. The caller
// closes the frame's files, also after an error.
func (enc *encoder) batch(e Send) (frame wire.Frame, bad int, err error) {
	enc.calls = enc.calls[:0]
	frame = wire.Frame{Type: wire.FrameBatch, Batch: e.Batch, Keep: enc.link.at != nil && enc.link.f.shell.cfg.keeps(e.Tasks)}
	kept := 0
	for i, t := range e.Tasks {
		in, more, err := enc.input(t.Input, len(frame.Files), &kept)
		frame.Files = append(frame.Files, more...)
		if err != nil {
			return frame, i, fmt.Errorf("input: %w", err)
		}
		enc.calls = append(enc.calls, wire.Call{Key: t.Key, Deadline: t.Deadline, Traceparent: t.Traceparent, Header: t.Header, Input: in})
	}
	enc.frame = wire.Batch{Calls: enc.calls}.Append(enc.frame[:0])
	if len(enc.frame) > wire.MaxFrame {
		return frame, 0, fmt.Errorf("a batch of %d bytes, want at most %d: pass fewer or larger items", len(enc.frame), wire.MaxFrame)
	}
	frame.Payload, frame.Kept = enc.frame, kept > 0
	return frame, 0, nil
}

// reset forgets the latest batch.
func (enc *encoder) reset() {
	clear(enc.calls)
	if cap(enc.frame) > 1<<20 {
		enc.frame = nil
	}
}

// input returns a copy of the input with the large items as files. The frame already has n files,
// and as many references to items of nodes as kept says. If the frame would have too many files and
// references, the items stay inline.
func (enc *encoder) input(in tensor.Input, n int, kept *int) (out tensor.Input, files []*os.File, err error) {
	if !large(in) {
		return in, nil, nil
	}
	store := enc.store
	if store == nil {
		store = enc.link.f.shell.cfg.Store
	}
	open := func(ref tensor.Ref) (*os.File, error) {
		if enc.link.at != nil && ref.Node != "" {
			*kept++ // the replica's daemon fetches it
			return nil, nil
		}
		return store.Open(ref)
	}
	out = slices.Clone(in)
	for i := range out {
		var more []*os.File
		if attached(n+len(files)+*kept, out[i].Items) {
			out[i].Items, more, err = wire.Attach(out[i].Items, n+len(files), open)
		} else {
			out[i].Items, err = tensor.Resolve(store, out[i].Items)
		}
		files = append(files, more...)
		if err != nil {
			return nil, files, err
		}
	}
	return out, files, nil
}

// large reports whether an input has an item that is not sent inline.
func large(in tensor.Input) bool {
	return slices.ContainsFunc(in, func(p tensor.Part) bool { return separate(p.Items) > 0 })
}

// attached reports whether items can be files or references in a frame that has used others.
func attached(used int, items tensor.Activation) bool { return used+len(items) <= wire.MaxFiles }

// separate returns how many of the items are files or references where the frame has room for them.
func separate(items tensor.Activation) (n int) {
	for i := range items {
		if items[i].Ref != nil || items[i].Size() > tensor.InlineLimit {
			n++
		}
	}
	return n
}

// unsent returns the reply to a call of a batch that is not sent. The bad call fails with the error
// why. The other calls get InputLost without items, so that they run again.
func unsent(bad bool, why error) *task.Reply {
	if !bad {
		return &task.Reply{Code: task.InputLost, Message: fmt.Sprintf("another call of its batch could not be sent: %v", why)}
	}
	r := &task.Reply{Code: task.Unavailable, Message: why.Error()}
	var lost *task.LostError
	if errors.As(why, &lost) {
		r.Code, r.Lost = task.InputLost, []string{lost.Item}
	}
	return r
}

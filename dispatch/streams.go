package dispatch

import (
	"fmt"

	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// Bounds of streamed outputs, in bytes.
const (
	streamCredit = 1 << 20   // that a replica may be ahead
	streamLimit  = 64 << 20  // of one call
	streamsLimit = 256 << 20 // of all calls that a replica has not answered
	streamGrant  = 256 << 10 // given back at a time
)

// streams gathers the chunks of a replica's calls. Replies go out whole, so that a streamed output is put together here
// and becomes the start of the call's output.
type streams struct {
	calls map[streamed]*stream
	held  int // bytes of all calls
	owed  int // credit not yet given back
}

// streamed is a call with chunks.
type streamed struct {
	batch uint64
	call  int
}

// stream is what there is of a call's output.
type stream struct {
	data []byte
	over string // the limit that it came over: nothing is kept of it
}

// begun says whether there are chunks of a call already.
func (s *streams) begun(batch uint64, call int) bool { return s.calls[streamed{batch, call}] != nil }

// add keeps a chunk and returns the credit to give back now, and whether the call has just come over a limit: it has failed, whatever
// it goes on with.
func (s *streams) add(batch uint64, c wire.Chunk) (grant int, over bool) {
	if s.owed += len(c.Data); s.owed >= streamGrant {
		grant, s.owed = s.owed, 0
	}
	if s.calls == nil {
		s.calls = map[streamed]*stream{}
	}
	k := streamed{batch, c.Index}
	if s.calls[k] == nil {
		s.calls[k] = &stream{}
	}
	b := s.calls[k]
	switch {
	case b.over != "":
		return grant, false
	case len(b.data)+len(c.Data) > streamLimit:
		b.over = fmt.Sprintf("the function streamed more than %d bytes: return large outputs, or several items", streamLimit)
	case s.held+len(c.Data) > streamsLimit:
		b.over = fmt.Sprintf("the calls of its replica streamed more than %d bytes together: return large outputs, or take fewer calls at a time", streamsLimit)
	default:
		b.data = append(b.data, c.Data...)
		s.held += len(c.Data)
		return grant, false
	}
	s.held -= len(b.data)
	b.data = nil
	return grant, true
}

// finish puts what a call has streamed in front of its output.
func (s *streams) finish(batch uint64, call int, r *task.Reply) {
	k := streamed{batch, call}
	b := s.calls[k]
	if b == nil {
		return
	}
	delete(s.calls, k)
	s.held -= len(b.data)
	switch {
	case b.over != "" && (r.Code == task.OK || r.Code == task.Canceled):
		r.Code, r.Message, r.Output = task.Failed, b.over, nil
	case r.Code != task.OK:
	case len(r.Output) > 0 && r.Output[0].Tensors == nil:
		first := r.Output[0]
		first.Bytes = append(b.data, first.Bytes...)
		r.Output[0] = first
	default:
		r.Output = append(tensor.Activation{{Bytes: b.data}}, r.Output...)
	}
}

package dispatch

import (
	"fmt"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Bounds of streamed outputs, in bytes.
const (
	streamCredit = 1 << 20   // that a replica may send without new credit
	streamLimit  = 64 << 20  // per call
	streamsLimit = 256 << 20 // for all unanswered calls of a replica
	streamGrant  = 256 << 10 // returned at a time
)

// streams collects the chunks of a replica's calls. Replies are sent as a whole, so a streamed
// output is assembled here and becomes the start of the call's output.
type streams struct {
	calls map[streamed]*stream
	held  int // bytes of all calls
	owed  int // credit to be returned
}

// streamed is a call with chunks.
type streamed struct {
	batch uint64
	call  int
}

// stream is the collected output of a call.
type stream struct {
	data []byte
	over string // the limit that it exceeded; nothing of it is kept then
}

// begun reports whether a call has chunks already.
func (s *streams) begun(batch uint64, call int) bool { return s.calls[streamed{batch, call}] != nil }

// add stores a chunk. It returns the credit to return now, and whether the call has just exceeded a
// limit. Such a call has failed, whatever follows.
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

// finish puts a call's streamed output before the output of its reply.
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

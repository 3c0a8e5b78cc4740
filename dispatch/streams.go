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
	streamGrant  = 256 << 10 // given back at a time
)

// streams gathers the chunks of a replica's calls. Replies go out whole, so that a streamed output is put together here
// and becomes the start of the call's output.
type streams struct {
	calls map[streamed]*[]byte
	owed  int // credit not yet given back
}

// streamed is a call with chunks.
type streamed struct {
	batch uint64
	call  int
}

// add keeps a chunk, or of a call over the limit one byte too many, and returns the credit to give back now, and whether the call has
// just come over the limit: it has failed, whatever it goes on with.
func (s *streams) add(batch uint64, c wire.Chunk) (grant int, over bool) {
	if s.calls == nil {
		s.calls = map[streamed]*[]byte{}
	}
	k := streamed{batch, c.Index}
	if s.calls[k] == nil {
		s.calls[k] = new([]byte)
	}
	b := s.calls[k]
	before := len(*b)
	*b = append(*b, c.Data[:min(len(c.Data), streamLimit+1-len(*b))]...)
	if s.owed += len(c.Data); s.owed >= streamGrant {
		grant, s.owed = s.owed, 0
	}
	return grant, before <= streamLimit && len(*b) > streamLimit
}

// finish puts what a call has streamed in front of its output.
func (s *streams) finish(batch uint64, call int, r *task.Reply) {
	k := streamed{batch, call}
	b := s.calls[k]
	if b == nil {
		return
	}
	delete(s.calls, k)
	switch {
	case len(*b) > streamLimit && (r.Code == task.OK || r.Code == task.Canceled):
		r.Code, r.Output = task.Failed, nil
		r.Message = fmt.Sprintf("the function streamed more than %d bytes: return large outputs, or several items", streamLimit)
	case r.Code != task.OK:
	case len(r.Output) > 0 && r.Output[0].Tensors == nil:
		first := r.Output[0]
		first.Bytes = append(*b, first.Bytes...)
		r.Output[0] = first
	default:
		r.Output = append(tensor.Activation{{Bytes: *b}}, r.Output...)
	}
}

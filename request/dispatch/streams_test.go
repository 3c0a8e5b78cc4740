package dispatch

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestStreamsArePutTogether(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("a")
	id, _ := a.batch("a")
	chunk := bytes.Repeat([]byte("c"), streamGrant/2)
	for range 2 {
		a.write(wire.FrameChunk, id, wire.Chunk{Data: chunk}.Append(nil))
	}
	if c, err := wire.DecodeCredit(a.read(wire.FrameCredit).Payload); err != nil || c.Amount != streamGrant {
		t.Errorf("credit %+v, %v, want %d", c, err, streamGrant)
	}
	a.answer(id, 0, text("end"))
	out, err := tensor.Resolve(r.store, r.reply("a", task.OK, "").Output)
	if err != nil || len(out) != 1 || out[0].ContentType != "text/plain" || len(out[0].Bytes) != streamGrant+3 {
		t.Errorf("output %d items, %v, want one of chunks and end", len(out), err)
	}
	r.submit("b")
	id, _ = a.batch("b")
	for range streamLimit / streamGrant {
		a.write(wire.FrameChunk, id, wire.Chunk{Data: chunk}.Append(nil))
		a.write(wire.FrameChunk, id, wire.Chunk{Data: chunk}.Append(nil))
		a.read(wire.FrameCredit)
	}
	// Without a bound it would go on for ever.
	a.write(wire.FrameChunk, id, wire.Chunk{Data: chunk[:1]}.Append(nil))
	f := a.read(wire.FrameCancel)
	if c, err := wire.DecodeCancelFrame(f.Payload); f.Batch != id || err != nil || c.Index != 0 {
		t.Errorf("a cancel of %+v of batch %d, %v, want of call 0 of batch %d", c, f.Batch, err, id)
	}
	a.write(wire.FrameError, id, wire.Error{Code: task.Canceled}.Append(nil))
	r.reply("b", task.Failed, "streamed more than 67108864 bytes")
}

// TestUnexpectedChunksEndTheReplica checks that chunks of unknown or answered calls are not stored,
// and that the replica is given up.
func TestUnexpectedChunksEndTheReplica(t *testing.T) {
	for name, strange := range map[string]struct {
		batch uint64 // after the replica's own batch
		call  int
	}{"another batch": {batch: 1}, "another call": {call: 1}, "a call below 0": {call: -1}, "an answered call": {}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Spec{})
			a := attach(t, r.shell, "f-1", 1, 1)
			r.submit("a")
			id, _ := a.batch("a")
			if name == "an answered call" {
				a.write(wire.FrameChunk, id, wire.Chunk{Data: []byte("c")}.Append(nil))
				a.answer(id, 0)
				r.reply("a", task.OK, "")
			}
			a.write(wire.FrameChunk, id+strange.batch, wire.Chunk{Index: strange.call, Data: []byte("c")}.Append(nil))
			if cause := receive(t, r.dropped, "drop"); !strings.Contains(cause, "hunk") {
				t.Errorf("dropped: %s, want it to be for the chunk", cause)
			}
		})
	}
}

// TestStreamsOfAReplicaShareALimit checks the common limit of a replica's calls, and that ended
// calls release their share.
func TestStreamsOfAReplicaShareALimit(t *testing.T) {
	s := streams{held: streamsLimit - 5} // held by other calls
	if _, over := s.add(1, wire.Chunk{Data: []byte("12345")}); over || s.held != streamsLimit {
		t.Fatalf("all there is room for: over %t, %d bytes held", over, s.held)
	}
	if _, over := s.add(2, wire.Chunk{Data: []byte("6")}); !over {
		t.Error("one byte more is kept")
	}
	if _, over := s.add(2, wire.Chunk{Data: []byte("7")}); over || s.held != streamsLimit {
		t.Errorf("what a call over the limit goes on with: over %t again, %d bytes held", over, s.held)
	}
	if _, over := s.add(1, wire.Chunk{Index: 1, Data: nil}); over {
		t.Error("nothing is over the limit")
	}
	s.held -= 3 // another call has ended
	s.add(3, wire.Chunk{Data: []byte("abc")})
	if _, over := s.add(3, wire.Chunk{Data: []byte("d")}); !over || s.held != streamsLimit-3 {
		t.Errorf("a call with output comes over the limit: over %t, %d bytes held, want its own freed", over, s.held)
	}
	s.finish(3, 0, new(task.Reply))
	s.finish(1, 1, new(task.Reply))
	s.held += 3
	var r task.Reply
	if s.finish(2, 0, &r); r.Code != task.Failed || !strings.Contains(r.Message, "together") {
		t.Errorf("%+v, want a failure that says why", r)
	}
	r = task.Reply{}
	if s.finish(1, 0, &r); s.held != streamsLimit-5 || len(s.calls) != 0 || string(r.Output[0].Bytes) != "12345" {
		t.Errorf("%+v, %d bytes held of %d calls", r, s.held, len(s.calls))
	}
}

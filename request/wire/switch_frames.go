package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// readReplica passes on what the replica sends, until its socket ends.
func (s *Switch) readReplica() {
	defer close(s.done)
	r := newFrames(s.near)
	defer r.release()
	for {
		err := r.read()
		if err == nil {
			err = s.passReplica(r)
		}
		switch {
		case err == nil:
		case hangup(err):
			s.end(errEnded)
			return
		default:
			s.end(fmt.Errorf("replica: %w", err))
			return
		}
	}
}

// hangup reports whether an error is the end of a connection, not a fault in what was sent.
func hangup(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// passReplica passes on the frames in r.
func (s *Switch) passReplica(r *frames) error {
	var to *owner
	out := run{frames: r, send: func(b []byte, files []*os.File) error {
		_ = to.put(b, files) // the replica goes on when an owner ends
		return nil
	}}
	for {
		f, ok, err := out.next()
		if err != nil {
			return err
		}
		if !ok {
			return out.flush()
		}
		d, err := s.sort(r, f)
		if err != nil {
			return err
		}
		if d.to != to {
			_ = out.flush()
			to = d.to
		}
		if d.to == nil {
			_ = out.drop(f)
		} else {
			_ = out.add(f)
		}
		if d.grant > 0 {
			if err := s.toReplica(appendFrame(nil, Frame{Type: FrameCredit, Payload: Credit{d.grant}.Append(nil)}), nil); err != nil {
				return err
			}
		}
		if d.free != nil || d.over != nil {
			_ = out.flush()
		}
		if d.over != nil {
			_ = d.over.far.Close()
		}
		if d.free != nil {
			_ = d.free.put(appendFrame(nil, Frame{Type: FrameCredit, Payload: Credit{d.slots}.Append(nil)}), nil)
		}
	}
}

// decision says what happens with a frame of the replica.
type decision struct {
	to    *owner // nil: it is dropped
	grant uint64 // bytes of chunks for which the replica gets new credit
	over  *owner // an earlier owner, which has all of its answers now
	free  *owner // the owner, which may send batches now
	slots uint64 // how many
}

// sort decides what happens with a frame of the replica, and puts in the owner's number of the
// batch.
func (s *Switch) sort(r *frames, f span) (d decision, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.to = s.owner
	r.raw(f)[5] &^= flagKept | flagKeep // replicas must not set these flags
	switch f.kind {
	case FrameHello:
		h, err := DecodeHello(r.payload(f))
		if err != nil {
			return d, err
		}
		s.hello = append([]byte{}, r.raw(f)...)
		s.slots = uint64(h.Slots)
	case FrameCredit:
		c, err := DecodeCredit(r.payload(f))
		if err != nil {
			return d, err
		}
		s.slots = c.Amount
		if s.owner != nil && s.foreign(s.owner) > 0 {
			d.to = nil // it is told when it may send batches
		}
	case FrameResult, FrameError, FrameChunk:
		return s.answer(d, r, f)
	}
	return d, nil
}

// answer decides about a frame for a call. The caller holds s.mu.
func (s *Switch) answer(d decision, r *frames, f span) (decision, error) {
	b := s.open[f.batch]
	if b == nil { // pass it on, so that the owner learns that the protocol is broken
		if d.to != nil && f.batch <= d.to.offset {
			d.to = nil
		}
		if d.to != nil {
			renumber(r, f, f.batch-d.to.offset)
		}
		return d, nil
	}
	renumber(r, f, f.batch-b.of.offset)
	if d.to = b.of; d.to.ended {
		d.to = nil
	}
	if f.kind == FrameChunk {
		c, err := DecodeChunk(r.payload(f))
		if err != nil {
			return d, err
		}
		if b.of == s.owner {
			s.credit -= int64(len(c.Data))
			b.of.view -= int64(len(c.Data))
		} else {
			d.grant = uint64(len(c.Data))
		}
		return d, nil
	}
	if b.left--; b.left > 0 {
		return d, nil
	}
	delete(s.open, f.batch)
	b.of.open--
	if b.of.replaced && !b.of.ended && b.of.open == 0 {
		d.over = b.of
	}
	if b.of != s.owner && s.owner != nil && s.foreign(s.owner) == 0 {
		d.free, d.slots = s.owner, s.slots
	}
	s.changed.Broadcast()
	return d, nil
}

// renumber changes the number of a frame's batch.
func renumber(r *frames, f span, batch uint64) {
	binary.LittleEndian.PutUint64(r.raw(f)[8:], batch)
}

// readOwner passes on what an owner sends, until its connection ends.
func (s *Switch) readOwner(o *owner) {
	defer s.ownerGone(o)
	r := newFrames(o.far)
	defer r.release()
	for {
		err := r.read()
		if err == nil {
			err = s.passOwner(o, r)
		}
		if err != nil {
			return
		}
	}
}

// errProtocol means that an owner has broken the protocol.
var errProtocol = errors.New("an owner broke the stage protocol")

// passOwner passes on the frames in r.
func (s *Switch) passOwner(o *owner, r *frames) error {
	out := run{frames: r, send: s.toReplica}
	for {
		f, ok, err := out.next()
		if err != nil {
			return errors.Join(err, out.flush())
		}
		if !ok {
			return out.flush()
		}
		if f.kind == FrameBatch && s.waits(o) {
			if err := out.flush(); err != nil {
				return err
			}
			s.wait(o)
		}
		a, err := s.admit(o, r, f)
		if err != nil {
			return errors.Join(err, out.flush())
		}
		if a.pass {
			err = out.add(f)
		} else {
			err = out.drop(f)
		}
		if err == nil && len(a.instead) > 0 {
			if err = out.flush(); err == nil {
				err = s.toReplica(a.instead, nil)
			}
		}
		if err != nil {
			return err
		}
		if len(a.refusal) > 0 {
			_ = o.put(a.refusal, nil)
		}
	}
}

// waits reports whether a batch of an owner has to wait.
func (s *Switch) waits(o *owner) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocked(o)
}

// blocked is waits; the caller holds s.mu.
func (s *Switch) blocked(o *owner) bool { return s.foreign(o) > 0 && !o.replaced && s.err == nil }

// wait returns when an owner's batches need not wait any more.
func (s *Switch) wait(o *owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.blocked(o) {
		s.changed.Wait()
	}
}

// admission says what happens with a frame of an owner.
type admission struct {
	pass    bool
	instead []byte // frames to the replica in its place
	refusal []byte // frames to the owner
}

// admit decides what happens with a frame of an owner, and puts in the replica's number of the
// batch.
func (s *Switch) admit(o *owner, r *frames, f span) (a admission, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.welcomed == (f.kind == FrameWelcome) {
		return a, fmt.Errorf("%w: frame %v, want one Welcome, first", errProtocol, f.kind)
	}
	switch f.kind {
	case FrameWelcome:
		w, err := DecodeWelcome(r.payload(f))
		if err != nil {
			return a, err
		}
		o.welcomed, o.view = true, int64(w.Credit)
		if s.version == 0 {
			s.version, s.credit, s.full = w.Version, o.view, o.view
			return admission{pass: true}, nil
		}
		if w.Version != s.version {
			return a, fmt.Errorf("%w: version %d, want %d", errProtocol, w.Version, s.version)
		}
		return s.topUp(o), nil
	case FrameBatch:
		n, used := binary.Uvarint(r.payload(f))
		if used <= 0 || n == 0 || n > MaxFrame {
			return a, fmt.Errorf("%w: a batch of %d calls", errProtocol, n)
		}
		if o.replaced {
			return admission{refusal: refusal(f.batch, int(n))}, nil
		}
		id := f.batch + o.offset
		if s.open[id] != nil || f.batch == 0 {
			return a, fmt.Errorf("%w: batch %d twice", errProtocol, f.batch)
		}
		s.open[id] = &unanswered{o, int(n)}
		o.open++
		s.last = max(s.last, id)
		renumber(r, f, id)
	case FrameCancel:
		if b := s.open[f.batch+o.offset]; b == nil || b.of != o {
			return a, nil
		}
		renumber(r, f, f.batch+o.offset)
	case FrameCredit:
		c, err := DecodeCredit(r.payload(f))
		if err != nil || o.replaced {
			return a, err
		}
		o.view += int64(c.Amount)
		return s.topUp(o), nil
	}
	return admission{pass: !o.replaced || f.kind == FrameCancel}, nil
}

// topUp lets the replica send as many chunks as its owner does. The caller holds s.mu.
func (s *Switch) topUp(o *owner) (a admission) {
	if more := o.view - s.credit; more > 0 && !o.replaced {
		s.credit += more
		a.instead = appendFrame(nil, Frame{Type: FrameCredit, Payload: Credit{uint64(more)}.Append(nil)})
	}
	return a
}

// refusal answers the calls of a batch that comes from an owner that was replaced.
func refusal(batch uint64, calls int) (b []byte) {
	for i := range calls {
		m := Error{Index: i, Code: task.ReplicaLost, Message: "another control plane has taken the replica over"}
		b = appendFrame(b, Frame{Type: FrameError, Batch: batch, Payload: m.Append(nil)})
	}
	return b
}

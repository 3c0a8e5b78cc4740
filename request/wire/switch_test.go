package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// long bounds waits. Tests normally need a fraction of it.
const long = time.Minute

// stand is a Switch with a replica at its near end.
type stand struct {
	*Switch
	t       *testing.T
	replica *Conn
	raw     Socket // the replica's end
}

func newStand(t *testing.T, change ...func(*SwitchConfig)) *stand {
	t.Helper()
	cfg := SwitchConfig{Keep: long, Overtaken: long, Patience: long}
	for _, f := range change {
		f(&cfg)
	}
	a, b := pair(t)
	d := &stand{Switch: NewSwitch(NewSocket(a), cfg), t: t, raw: NewSocket(b)}
	d.replica = NewConn(d.raw)
	t.Cleanup(d.Close)
	return d
}

// boss is an owner's end of its connection.
type boss struct {
	*Conn
	t    *testing.T
	raw  Socket
	gone <-chan struct{}
}

// connect connects an owner without a greeting, over a unix socket or a stream for bytes.
func (d *stand) connect(overStream bool) *boss {
	d.t.Helper()
	a, b := pair(d.t)
	near, far := NewSocket(a), NewSocket(b)
	if overStream {
		near, far = OverStream(a), OverStream(b)
	}
	gone, err := d.Connect(far)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = near.Close() })
	return &boss{NewConn(near), d.t, near, gone}
}

// greeted connects an owner that has greeted the replica. It returns the slots that the replica
// offers.
func (d *stand) greeted(overStream bool) (*boss, uint64) {
	d.t.Helper()
	o := d.connect(overStream)
	h, err := DecodeHello(o.next(FrameHello).Payload)
	if err != nil {
		d.t.Fatal(err)
	}
	if h.Replica != "r" || h.Oldest != Version && h.Oldest != OldestVersion {
		d.t.Fatalf("Hello %+v", h)
	}
	o.send(FrameWelcome, 0, Welcome{Version: Version, Credit: 100}.Append(nil))
	return o, o.credit()
}

// first connects the first owner.
func (d *stand) first(overStream bool) *boss {
	d.t.Helper()
	o := d.connect(overStream)
	d.say(FrameHello, 0, Hello{Oldest: OldestVersion, Newest: Version, Replica: "r", Slots: 2, MaxBatch: 4}.Append(nil))
	o.next(FrameHello)
	o.send(FrameWelcome, 0, Welcome{Version: Version, Credit: 100}.Append(nil))
	d.hear(FrameWelcome)
	return o
}

func read(t *testing.T, what string, c *Conn, want FrameType) Frame {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(long))
	f, err := c.Read()
	if err != nil {
		t.Fatalf("%s: %v, want %v", what, err, want)
	}
	if f.Type != want {
		t.Fatalf("%s gets %v of batch %d, want %v", what, f.Type, f.Batch, want)
	}
	return f
}

func (o *boss) next(want FrameType) Frame { o.t.Helper(); return read(o.t, "the owner", o.Conn, want) }

func (o *boss) send(kind FrameType, batch uint64, payload []byte) {
	o.t.Helper()
	if err := o.Write(Frame{Type: kind, Batch: batch, Payload: payload}); err != nil {
		o.t.Fatal(err)
	}
}

func (o *boss) credit() uint64 {
	o.t.Helper()
	c, err := DecodeCredit(o.next(FrameCredit).Payload)
	if err != nil {
		o.t.Fatal(err)
	}
	return c.Amount
}

// lost waits until the Switch has noticed the owner's end.
func (o *boss) lost() {
	o.t.Helper()
	_ = o.Close()
	select {
	case <-o.gone:
	case <-time.After(long):
		o.t.Fatal("the end of an owner is not noticed")
	}
}

// batch sends a batch of n calls.
func (o *boss) batch(id uint64, n int) {
	o.t.Helper()
	o.send(FrameBatch, id, Batch{Calls: make([]Call, n)}.Append(nil))
}

func (d *stand) hear(want FrameType) Frame {
	d.t.Helper()
	return read(d.t, "the replica", d.replica, want)
}

func (d *stand) say(kind FrameType, batch uint64, payload []byte) {
	d.t.Helper()
	if err := d.replica.Write(Frame{Type: kind, Batch: batch, Payload: payload}); err != nil {
		d.t.Fatal(err)
	}
}

func (d *stand) answer(batch uint64, call int) {
	d.t.Helper()
	d.say(FrameResult, batch, Result{Index: call}.Append(nil))
}

// ended waits for the end of the replica's socket, and returns the cause.
func (d *stand) ended() error {
	d.t.Helper()
	select {
	case <-d.Done():
	case <-time.After(long):
		d.t.Fatal("the Switch goes on")
	}
	return d.Err()
}

// TestSwitchIsTransparent passes frames and files between one owner and a replica.
func TestSwitchIsTransparent(t *testing.T) {
	for _, overStream := range []bool{false, true} {
		d := newStand(t)
		o := d.first(overStream)
		f, err := sealed([]byte("in a file"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		payload := Batch{Calls: []Call{{Traceparent: strings.Repeat("large ", 100_000)}, {}}}.Append(nil)
		if err := o.Write(Frame{Type: FrameBatch, Batch: 1, Payload: payload, Files: []*os.File{f}}); err != nil {
			t.Fatal(err)
		}
		got := d.hear(FrameBatch)
		if got.Batch != 1 || !bytes.Equal(got.Payload, payload) || len(got.Files) != 1 || string(content(t, got.Files[0])) != "in a file" {
			t.Errorf("batch %d with %d bytes, %d files", got.Batch, len(got.Payload), len(got.Files))
		}
		closeAll(got.Files)
		o.send(FrameCancel, 1, Cancel{1}.Append(nil))
		d.hear(FrameCancel)
		o.send(FrameThreads, 0, Threads{3}.Append(nil))
		d.hear(FrameThreads)
		d.say(FrameChunk, 1, Chunk{Data: []byte("12345")}.Append(nil))
		o.next(FrameChunk)
		o.send(FrameCredit, 0, Credit{5}.Append(nil))
		if c, _ := DecodeCredit(d.hear(FrameCredit).Payload); c.Amount != 5 {
			t.Errorf("credit for %d bytes, want 5", c.Amount)
		}
		if err := d.replica.Write(Frame{Type: FrameResult, Batch: 1, Payload: Result{}.Append(nil), Files: []*os.File{f}}); err != nil {
			t.Fatal(err)
		}
		d.say(FrameError, 1, Error{Index: 1, Code: task.Failed}.Append(nil))
		got = o.next(FrameResult)
		if len(got.Files) != 1 {
			t.Errorf("result with %d files", len(got.Files))
		}
		closeAll(got.Files)
		o.next(FrameError)
		d.say(FrameCredit, 0, Credit{0}.Append(nil))
		if n := o.credit(); n != 0 {
			t.Errorf("%d slots, want 0", n)
		}
		o.send(FrameDrain, 0, nil)
		d.hear(FrameDrain)
		_ = d.replica.Close()
		_ = o.SetReadDeadline(time.Now().Add(long))
		if _, err := o.Read(); !errors.Is(err, io.EOF) {
			t.Errorf("after the replica's end: %v, want EOF", err)
		}
		if err := d.ended(); err != nil {
			t.Errorf("the Switch ended: %v", err)
		}
	}
}

// TestSwitchCancelsCallsOfALostOwner loses an owner with two calls. The replica is told to cancel
// them. The next owner gets slots when both are answered, and none of the answers.
func TestSwitchCancelsCallsOfALostOwner(t *testing.T) {
	for _, overStream := range []bool{false, true} {
		d := newStand(t)
		o := d.first(overStream)
		o.batch(1, 1)
		o.batch(2, 2)
		d.hear(FrameBatch)
		d.hear(FrameBatch)
		d.say(FrameChunk, 2, Chunk{Data: make([]byte, 60)}.Append(nil)) // of the credit of 100
		o.next(FrameChunk)
		o.lost()
		if c, _ := DecodeCredit(d.hear(FrameCredit).Payload); c.Amount != 60 {
			t.Errorf("the replica may send %d bytes more, want 60", c.Amount)
		}
		canceled := map[uint64]bool{}
		for range 2 {
			f := d.hear(FrameCancel)
			if c, err := DecodeCancelFrame(f.Payload); err != nil || c.Index != CancelAll {
				t.Errorf("cancel of call %d, %v", c.Index, err)
			}
			canceled[f.Batch] = true
		}
		if !canceled[1] || !canceled[2] {
			t.Errorf("canceled %v, want batches 1 and 2", canceled)
		}
		d.answer(1, 0) // nobody gets it
		p, slots := d.greeted(overStream)
		if slots != 0 {
			t.Errorf("%d slots for the next owner while the replica is busy", slots)
		}
		p.batch(1, 1) // sent too early: it waits
		d.say(FrameChunk, 2, Chunk{Data: make([]byte, 7)}.Append(nil))
		if c, _ := DecodeCredit(d.hear(FrameCredit).Payload); c.Amount != 7 {
			t.Errorf("a dropped chunk gives credit for %d bytes, want 7", c.Amount)
		}
		d.answer(2, 1)
		d.say(FrameError, 2, Error{Index: 0, Code: task.Canceled}.Append(nil))
		if n := p.credit(); n != 2 {
			t.Errorf("%d slots after the last answer, want 2", n)
		}
		if f := d.hear(FrameBatch); f.Batch != 3 {
			t.Errorf("the replica gets batch %d, want 3: numbers are used once", f.Batch)
		}
		p.send(FrameCancel, 1, Cancel{0}.Append(nil))
		if f := d.hear(FrameCancel); f.Batch != 3 {
			t.Errorf("cancel of batch %d, want 3", f.Batch)
		}
		d.say(FrameChunk, 3, Chunk{Data: []byte("x")}.Append(nil))
		d.answer(3, 0)
		if f := p.next(FrameChunk); f.Batch != 1 {
			t.Errorf("a chunk of batch %d, want 1", f.Batch)
		}
		if f := p.next(FrameResult); f.Batch != 1 {
			t.Errorf("a result of batch %d, want 1", f.Batch)
		}
		d.Close()
	}
}

// TestSwitchPassesWholeFramesOnly breaks an owner's connection within a frame, in both directions.
// The next owner and the replica see frames only.
func TestSwitchPassesWholeFramesOnly(t *testing.T) {
	for _, overStream := range []bool{false, true} {
		d := newStand(t)
		o := d.first(overStream)
		// From the owner: one whole frame, and a part of the next.
		whole := appendFrame(nil, Frame{Type: FrameBatch, Batch: 1, Payload: Batch{Calls: make([]Call, 1)}.Append(nil)})
		part := appendHeader(nil, Frame{Type: FrameBatch, Batch: 2, Payload: make([]byte, 1<<20)})
		if _, err := o.raw.Write(append(append(whole, part...), make([]byte, 1<<19)...)); err != nil {
			t.Fatal(err)
		}
		d.hear(FrameBatch)
		// To the owner: more than fits into its socket, so the Switch is within a frame.
		d.say(FrameChunk, 1, Chunk{Data: make([]byte, 64)}.Append(nil))
		big := make(chan error, 1)
		go func() {
			big <- d.replica.Write(Frame{Type: FrameResult, Batch: 1, Payload: Result{Header: []task.Header{{Value: strings.Repeat("v", 8<<20)}}}.Append(nil)})
		}()
		o.next(FrameChunk)
		if _, _, err := o.raw.ReceiveFiles(make([]byte, 10)); err != nil { // a part of its header
			t.Fatal(err)
		}
		o.lost()
		if err := <-big; err != nil {
			t.Fatal(err)
		}
		d.hear(FrameCredit)
		p, slots := d.greeted(overStream)
		if slots == 0 {
			slots = p.credit()
		}
		if slots != 2 {
			t.Errorf("%d slots, want 2", slots)
		}
		p.batch(1, 1)
		f := d.hear2(FrameCancel, FrameBatch) // a Cancel comes unless the result was read before
		if f.Type == FrameCancel {
			f = d.hear(FrameBatch)
		}
		if f.Batch != 2 {
			t.Errorf("batch %d, want 2", f.Batch)
		}
		d.answer(f.Batch, 0)
		if f := p.next(FrameResult); f.Batch != 1 {
			t.Errorf("result of batch %d, want 1", f.Batch)
		}
		d.Close()
	}
}

// hear2 reads a frame of one of two types.
func (d *stand) hear2(a, b FrameType) Frame {
	d.t.Helper()
	_ = d.replica.SetReadDeadline(time.Now().Add(long))
	f, err := d.replica.Read()
	if err != nil || f.Type != a && f.Type != b {
		d.t.Fatalf("the replica gets %v, %v, want %v or %v", f.Type, err, a, b)
	}
	return f
}

// TestSwitchReplacesAnOwner connects an owner while the one before it has a call. The earlier one
// gets the answer and no more slots. Its Drain and its batches do not reach the replica.
func TestSwitchReplacesAnOwner(t *testing.T) {
	d := newStand(t)
	o := d.first(false)
	o.batch(5, 1)
	d.hear(FrameBatch)
	p, slots := d.greeted(true)
	if slots != 0 {
		t.Errorf("%d slots while the earlier owner's call runs", slots)
	}
	if n := o.credit(); n != 0 {
		t.Errorf("%d slots for the replaced owner", n)
	}
	o.batch(6, 2)
	for i := range 2 {
		m, err := DecodeError(o.next(FrameError).Payload)
		if err != nil || m.Index != i || m.Code != task.ReplicaLost {
			t.Errorf("%+v, %v, want call %d to be lost", m, err, i)
		}
	}
	o.send(FrameDrain, 0, nil)
	o.send(FrameCancel, 5, Cancel{0}.Append(nil))
	d.hear(FrameCancel)
	p.batch(1, 1)
	d.say(FrameChunk, 5, Chunk{Data: []byte("abc")}.Append(nil))
	if f := o.next(FrameChunk); f.Batch != 5 {
		t.Errorf("a chunk of batch %d, want 5", f.Batch)
	}
	d.hear(FrameCredit)
	d.answer(5, 0)
	if f := o.next(FrameResult); f.Batch != 5 {
		t.Errorf("result of batch %d, want 5", f.Batch)
	}
	_ = o.SetReadDeadline(time.Now().Add(long))
	if _, err := o.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("after its last answer: %v, want EOF", err)
	}
	if n := p.credit(); n != 2 {
		t.Errorf("%d slots, want 2", n)
	}
	if f := d.hear(FrameBatch); f.Batch != 6 {
		t.Errorf("batch %d, want 6", f.Batch)
	}
	q, slots := d.greeted(false) // p has a call, too
	if slots != 0 {
		t.Errorf("%d slots", slots)
	}
	p.credit()
	d.answer(6, 0)
	p.next(FrameResult)
	if n := q.credit(); n != 2 {
		t.Errorf("%d slots, want 2", n)
	}
}

// TestSwitchWaitsForNoOwner replaces an owner that does not read, and one that does not get its
// answer in time.
func TestSwitchWaitsForNoOwner(t *testing.T) {
	d := newStand(t, func(c *SwitchConfig) { c.Overtaken = 10 * time.Millisecond })
	o := d.first(false)
	o.batch(1, 1)
	o.batch(2, 1)
	d.hear(FrameBatch)
	d.hear(FrameBatch)
	said := make(chan error, 1)
	go func() {
		said <- d.replica.Write(Frame{Type: FrameResult, Batch: 1, Payload: Result{Header: []task.Header{{Value: strings.Repeat("v", 8<<20)}}}.Append(nil)})
	}()
	p, _ := d.greeted(false)
	<-o.gone
	if err := <-said; err != nil {
		t.Fatal(err)
	}
	if f := d.hear(FrameCancel); f.Batch != 2 {
		if f = d.hear(FrameCancel); f.Batch != 2 {
			t.Errorf("cancel of batch %d, want 2", f.Batch)
		}
	}
	d.answer(2, 0)
	if n := p.credit(); n != 2 {
		t.Errorf("%d slots, want 2", n)
	}
}

// TestSwitchEndsReplicas checks when a Switch ends a replica by itself.
func TestSwitchEndsReplicas(t *testing.T) {
	d := newStand(t, func(c *SwitchConfig) { c.Keep = time.Millisecond })
	if err := d.ended(); !errors.Is(err, errUnowned) {
		t.Errorf("never owned: %v", err)
	}
	if _, err := d.Connect(OverStream(new(net.UnixConn))); !errors.Is(err, errUnowned) {
		t.Errorf("connected after the end: %v", err)
	}
	d = newStand(t, func(c *SwitchConfig) { c.Keep = 3 * time.Second })
	o := d.first(false)
	o.lost()
	if err := d.ended(); !errors.Is(err, errUnowned) {
		t.Errorf("its owner has gone: %v", err)
	}
	d = newStand(t, func(c *SwitchConfig) { c.Patience = time.Millisecond })
	o = d.first(false)
	o.batch(1, 1)
	d.hear(FrameBatch)
	o.lost()
	if err := d.ended(); !errors.Is(err, errRunsOn) {
		t.Errorf("a call runs on: %v", err)
	}
	d = newStand(t, func(c *SwitchConfig) { c.Patience = time.Millisecond })
	o = d.first(false)
	o.batch(1, 1)
	d.hear(FrameBatch)
	d.answer(1, 0)
	o.next(FrameResult)
	o.lost()
	d.greeted(false)
	select {
	case <-d.Done():
		t.Errorf("no call runs on: %v", d.Err())
	case <-time.After(20 * time.Millisecond):
	}
}

// TestSwitchJudgesReplicas checks that a replica that ends is not blamed, even within a frame, and
// that one that breaks the protocol is.
func TestSwitchJudgesReplicas(t *testing.T) {
	d := newStand(t)
	o := d.first(false)
	o.batch(1, 1) // it is not read, so the connection is reset
	if _, err := d.raw.Write(appendHeader(nil, Frame{Type: FrameResult, Batch: 1, Payload: make([]byte, 9)})); err != nil {
		t.Fatal(err)
	}
	_ = d.raw.Close()
	if err := d.ended(); err != nil {
		t.Errorf("a replica that was killed: %v", err)
	}
	d = newStand(t)
	d.first(false)
	d.say(FrameCredit, 0, nil)
	if err := d.ended(); err == nil || !strings.Contains(err.Error(), "replica: credit") {
		t.Errorf("a replica that breaks the protocol: %v", err)
	}
}

// TestSwitchDropsOwnersThatBreakTheProtocol sends frames that an owner must not send. The replica
// gets none of them, and the next owner can have it.
func TestSwitchDropsOwnersThatBreakTheProtocol(t *testing.T) {
	d := newStand(t)
	d.first(false).lost()
	welcome := Frame{Type: FrameWelcome, Payload: Welcome{Version: Version, Credit: 100}.Append(nil)}
	batch := Frame{Type: FrameBatch, Batch: 1, Payload: Batch{Calls: make([]Call, 1)}.Append(nil)}
	for name, frames := range map[string][]Frame{
		"no welcome":      {batch},
		"two of them":     {welcome, welcome},
		"another version": {{Type: FrameWelcome, Payload: Welcome{Version: Version - 1}.Append(nil)}},
		"batch 0":         {welcome, {Type: FrameBatch, Payload: batch.Payload}},
		"no calls":        {welcome, {Type: FrameBatch, Batch: 1, Payload: []byte{0}}},
		"a bad welcome":   {{Type: FrameWelcome}},
		"a bad credit":    {welcome, {Type: FrameCredit}},
	} {
		o := d.connect(false)
		o.next(FrameHello)
		for _, f := range frames {
			if err := o.Write(f); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		select {
		case <-o.gone:
		case <-time.After(long):
			t.Fatalf("%s: the owner is still there", name)
		}
	}
	o, _ := d.greeted(false)
	o.batch(1, 1)
	d.hear(FrameBatch)
}

// BenchmarkSwitch sends a call of 1 KB to a replica and its answer back, directly and through a
// Switch over another pair of sockets, in turns.
func BenchmarkSwitch(b *testing.B) {
	for _, way := range []string{"direct", "switch"} {
		b.Run(way, func(b *testing.B) {
			near, far := pair(b)
			dispatcher, replica := NewConn(NewSocket(near)), NewConn(NewSocket(far))
			if way == "switch" {
				s := NewSwitch(NewSocket(near), SwitchConfig{Keep: long, Overtaken: long, Patience: long})
				b.Cleanup(s.Close)
				ours, theirs := pair(b)
				if _, err := s.Connect(NewSocket(theirs)); err != nil {
					b.Fatal(err)
				}
				dispatcher = NewConn(NewSocket(ours))
			}
			go func() {
				for {
					f, err := replica.Read()
					if err != nil {
						return
					}
					if f.Type == FrameBatch {
						_ = replica.Write(Frame{Type: FrameResult, Batch: f.Batch, Payload: append(Result{}.Append(nil), f.Payload...)})
					}
				}
			}()
			if err := dispatcher.Write(Frame{Type: FrameWelcome, Payload: Welcome{Version: Version}.Append(nil)}); err != nil {
				b.Fatal(err)
			}
			payload := Batch{Calls: []Call{{Traceparent: strings.Repeat("x", 1<<10)}}}.Append(nil)
			for i := range b.N {
				if err := dispatcher.Write(Frame{Type: FrameBatch, Batch: uint64(i) + 1, Payload: payload}); err != nil {
					b.Fatal(err)
				}
				if _, err := dispatcher.Read(); err != nil {
					b.Fatal(err)
				}
			}
			_ = dispatcher.Close()
			_ = replica.Close()
		})
	}
}

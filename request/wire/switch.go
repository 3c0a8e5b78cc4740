package wire

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// SwitchConfig configures a [Switch].
type SwitchConfig struct {
	Keep time.Duration // how long the replica may be without an owner
	// How long an owner that was replaced may take to get the answers of its calls.
	Overtaken time.Duration
	// How long a call may run on after its owner has gone and the replica was told to cancel it.
	Patience time.Duration
}

// Errors of a [Switch].
var (
	errUnowned = errors.New("no control plane has taken the replica over")
	errRunsOn  = errors.New("a call of a control plane that has gone does not end")
	errEnded   = errors.New("the replica has ended")
)

// Switch connects a replica to one dispatcher after another, its owners. Each owner gets the
// replica's Hello and sends a Welcome, as if it were the first one. The replica notices nothing.
//
//   - Both sides get whole frames only, wherever the connection of an owner breaks.
//   - An answer goes to the owner that has sent the call. If that owner has gone, the replica is
//     told to cancel the call, and the answer is dropped.
//   - While the replica works on calls of other owners, the present owner has no slots, and its
//     batches wait. So a replica never has more calls than it takes.
//   - If a new owner comes while another one is there, the earlier one gets a Credit of 0. It has
//     SwitchConfig.Overtaken to get the answers of its calls.
//
// Owners number their batches as they like. The replica gets other numbers, which are not used
// twice. Its methods are safe for concurrent use.
type Switch struct {
	cfg  SwitchConfig
	near Socket
	nmu  sync.Mutex    // held while something is written to near
	done chan struct{} // closed when nothing is read from near any more
	ends sync.WaitGroup

	mu      sync.Mutex // never held while something is read or written
	changed *sync.Cond // calls of other owners, an owner, or the replica have ended
	hello   []byte     // the frame; nil: it has not come yet
	version byte       // that the first owner has agreed on; 0: none yet
	slots   uint64     // batches that the replica takes now
	owner   *owner     // nil: there is none
	owners  map[*owner]bool
	open    map[uint64]*unanswered // batches by the replica's number
	last    uint64                 // highest number of a batch
	credit  int64                  // bytes of chunks that the replica may send
	full    int64                  // credit at first
	unowned *time.Timer            // ends the replica; nil: it has an owner
	err     error                  // why the replica's socket was closed; nil: it is open
}

// owner is a dispatcher's connection. Its fields below wmu are guarded by Switch.mu.
type owner struct {
	far  Socket
	wmu  sync.Mutex    // held while something is written to far
	gone chan struct{} // closed at its end

	offset   uint64 // of the replica's numbers of its batches
	welcomed bool   // it has answered the Hello
	view     int64  // bytes of chunks that it lets the replica send
	open     int    // its batches that are not answered
	replaced bool
	ended    bool
}

// unanswered is a batch that the replica has.
type unanswered struct {
	of   *owner
	left int // calls
}

// NewSwitch returns a Switch over a replica's socket, which it owns from now on. No frame has been
// read from it.
func NewSwitch(near Socket, cfg SwitchConfig) *Switch {
	s := &Switch{cfg: cfg, near: near, done: make(chan struct{}), owners: map[*owner]bool{}, open: map[uint64]*unanswered{}, slots: 1}
	s.changed = sync.NewCond(&s.mu)
	s.mu.Lock()
	s.alone()
	s.mu.Unlock()
	go s.readReplica()
	return s
}

// Connect makes a dispatcher the replica's owner, in place of the present one. The Switch owns far
// from now on. gone is closed when far was closed.
func (s *Switch) Connect(far Socket) (gone <-chan struct{}, err error) {
	o := &owner{far: far, gone: make(chan struct{})}
	o.wmu.Lock() // the Hello is its first frame
	defer o.wmu.Unlock()
	s.mu.Lock()
	if err := s.err; err != nil {
		s.mu.Unlock()
		return nil, errors.Join(err, far.Close())
	}
	if s.unowned != nil {
		s.unowned.Stop()
		s.unowned = nil
	}
	before := s.owner
	s.owner, s.owners[o], o.offset = o, true, s.last
	if before != nil {
		before.replaced = true
		s.changed.Broadcast()
		idle := before.open == 0
		s.ends.Go(func() { s.replace(before, idle) })
	}
	first := s.greeting(o)
	s.ends.Go(func() { s.readOwner(o) })
	s.mu.Unlock()
	if len(first) > 0 {
		if _, err := far.Write(first); err != nil {
			_ = far.Close() // its reader notices
		}
	}
	return o.gone, nil
}

// greeting returns what a new owner gets first: the Hello with the version that was agreed on, and
// how many batches it may send. The caller holds s.mu.
func (s *Switch) greeting(o *owner) []byte {
	if s.hello == nil {
		return nil
	}
	b := append([]byte{}, s.hello...)
	if s.version > 0 {
		b[headerSize], b[headerSize+1] = s.version, s.version
	}
	if s.foreign(o) > 0 {
		b = appendFrame(b, Frame{Type: FrameCredit, Payload: Credit{}.Append(nil)})
	} else if s.version > 0 {
		b = appendFrame(b, Frame{Type: FrameCredit, Payload: Credit{s.slots}.Append(nil)})
	}
	return b
}

func appendFrame(b []byte, f Frame) []byte { return append(appendHeader(b, f), f.Payload...) }

// foreign returns how many batches of other owners the replica has. The caller holds s.mu.
func (s *Switch) foreign(o *owner) int { return len(s.open) - o.open }

// replace tells an owner that another one has taken the replica over. If it is idle, it has no
// calls, and replace closes its connection.
func (s *Switch) replace(o *owner, idle bool) {
	if idle {
		_ = o.far.Close()
		return
	}
	_ = o.far.SetDeadline(time.Now().Add(s.cfg.Overtaken)) // fails if it is closed
	_ = o.put(appendFrame(nil, Frame{Type: FrameCredit, Payload: Credit{}.Append(nil)}), nil)
}

// Close closes the sockets of the replica and of its owners. It returns when nothing of the Switch
// runs any more.
func (s *Switch) Close() {
	s.end(net.ErrClosed)
	<-s.done
	s.ends.Wait()
}

// Done returns a channel that is closed when the replica's socket was closed, by the replica or by
// the Switch.
func (s *Switch) Done() <-chan struct{} { return s.done }

// Err returns why the Switch has closed the replica's socket, or nil if the replica has.
func (s *Switch) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(s.err, errEnded) {
		return nil
	}
	return s.err
}

// end closes the sockets.
func (s *Switch) end(cause error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = cause
	if s.unowned != nil {
		s.unowned.Stop()
	}
	owners := slices.Collect(maps.Keys(s.owners))
	s.changed.Broadcast()
	s.mu.Unlock()
	_ = s.near.Close()
	for _, o := range owners {
		_ = o.far.Close() // what was sent arrives
	}
}

// alone starts the time after which a replica without an owner is ended. The caller holds s.mu.
func (s *Switch) alone() {
	var t *time.Timer
	t = time.AfterFunc(s.cfg.Keep, func() {
		s.mu.Lock()
		late := s.unowned == t
		s.mu.Unlock()
		if late {
			s.end(fmt.Errorf("%w within %v", errUnowned, s.cfg.Keep))
		}
	})
	s.unowned = t
}

// put writes frames to an owner. After an error, its connection is closed: it may have got a part
// of a frame.
func (o *owner) put(b []byte, files []*os.File) error {
	o.wmu.Lock()
	defer o.wmu.Unlock()
	err := put(o.far, b, files)
	if err != nil {
		_ = o.far.Close()
	}
	return err
}

// toReplica writes whole frames to the replica.
func (s *Switch) toReplica(b []byte, files []*os.File) error {
	s.nmu.Lock()
	defer s.nmu.Unlock()
	return put(s.near, b, files)
}

// ownerGone forgets an owner whose connection has ended, and cancels its calls.
func (s *Switch) ownerGone(o *owner) {
	s.mu.Lock()
	o.ended = true
	delete(s.owners, o)
	if s.owner == o && s.err == nil {
		s.owner = nil
		s.alone()
	}
	var cancels []byte
	var left []uint64
	if more := s.full - s.credit; s.owner == nil && more > 0 {
		s.credit = s.full
		cancels = appendFrame(cancels, Frame{Type: FrameCredit, Payload: Credit{uint64(more)}.Append(nil)})
	}
	for id, b := range s.open {
		if b.of == o {
			left = append(left, id)
			cancels = appendFrame(cancels, Frame{Type: FrameCancel, Batch: id, Payload: Cancel{CancelAll}.Append(nil)})
		}
	}
	s.changed.Broadcast()
	s.mu.Unlock()
	_ = o.far.Close()
	if len(cancels) > 0 {
		_ = s.toReplica(cancels, nil) // fails if the replica has ended
	}
	if len(left) > 0 {
		time.AfterFunc(s.cfg.Patience, func() { s.lookAt(left) })
	}
	close(o.gone)
}

// lookAt ends the replica if one of these batches still runs.
func (s *Switch) lookAt(ids []uint64) {
	s.mu.Lock()
	runs := false
	for _, id := range ids {
		runs = runs || s.open[id] != nil
	}
	s.mu.Unlock()
	if runs {
		s.end(fmt.Errorf("%w within %v", errRunsOn, s.cfg.Patience))
	}
}

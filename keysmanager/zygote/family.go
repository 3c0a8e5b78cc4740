package zygote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Replica is what a child becomes. Its methods must not wait for anything, nor call the Zygote.
type Replica interface {
	// Take takes over the cgroup of the child that is about to become the replica.
	Take(child *resources.Reservation)
	// Began says which process the replica is, and by which id its zygote knows it: the same, or of
	// a worker the id of a thread.
	Began(pid, id int)
	// End reports how the replica has ended. Only the first call counts.
	End(e resources.Ending)
	// Abandon stops to listen to what it prints: it is left to the warden.
	Abandon()
}

// Family is a zygote's children. Each is, one after the other, ordered (pending), at its gate
// (waiting), and a replica. Of memory it is the replicas that map it. Its methods are safe for
// concurrent use.
type Family struct {
	of *Zygote

	mu       sync.Mutex // guards what follows; the daemon's locks are taken before it
	nextID   uint32     // of orders
	pending  map[uint32]*forkOrder
	waiting  map[uint32]*child  // by id; nil: the zygote has ended, or is left
	berths   berths             // of the waiting, those that nobody has ordered yet
	limits   resources.Limits   // of the next spare's cgroup: those of the latest replica
	replicas map[uint32]Replica // by id
	lie      error              // for which the zygote was ended; nil: none
	died     error              // why the zygote ended; nil: it lives
	replaced bool               // its parameters have been invalidated
	// Closed when an adopted one has said which children it has; nil: it has, or is not.
	listed   chan struct{}
	unlisted map[uint32]bool // children of an adopted one that it has not yet said to live
}

func newFamily(z *Zygote) *Family {
	return &Family{of: z, berths: berths{}, pending: map[uint32]*forkOrder{}, waiting: map[uint32]*child{}, replicas: map[uint32]Replica{}}
}

// forkOrder is an order on its way.
type forkOrder struct {
	child *child
	spare bool
	// Has room for the one that comes when the order leaves pending by the other side's doing.
	reply chan error
}

// ForkOrder is what a replica gets that is forked.
type ForkOrder struct {
	Replica Replica
	Limits  resources.Limits // of its cgroup
	Device  string           // UUIDs of its devices, by commas; empty: none
	Message []byte           // of Beginning
	Files   []*os.File       // its stage socket, stdout and stderr; they stay the caller's to close
}

// Fork makes a child the replica of an order: one that waits on the order's device or is spare, or
// else a new one. parked says that it waited on the device. The caller calls it in a goroutine that
// the daemon waits for before it waits for Host.Tasks.
func (f *Family) Fork(ctx context.Context, o ForkOrder) (parked bool, err error) {
	c := f.claim(o.Limits, o.Device)
	parked = c != nil && o.Device != ""
	if c == nil && o.Device != "" {
		c = f.claim(o.Limits, "")
	}
	for spare := c != nil; ; spare, parked = false, false {
		if !spare {
			if c, err = f.order(ctx, o.Limits, false); err != nil {
				return false, err
			}
		}
		o.Replica.Take(c.held)
		if err = f.begin(c, o); err == nil {
			return parked, nil
		}
		c.dispose()
		if !spare || !errors.Is(err, errChildEnded) {
			return false, err
		}
	}
}

// order has a zygote fork a child, which waits at its gate, in a cgroup with these limits.
func (f *Family) order(ctx context.Context, limits resources.Limits, spare bool) (*child, error) {
	gate, theirs, err := Socketpair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	c := &child{gate: gate, held: f.of.host.Pool.New()}
	var groups []*os.File
	if !f.of.Works() { // whose threads are in its own
		groups, err = c.held.Enter(NewEntry("child"), f.of.Function, limits)
		defer resources.CloseFiles(groups)
	}
	if err == nil {
		if err = f.fork(ctx, c, theirs, spare); err == nil && !f.of.Works() {
			err = f.admit(c, groups)
		}
	}
	if err != nil {
		f.dismiss(c)
		return nil, err
	}
	return c, nil
}

// fork orders a child and waits until it is there, at its gate, whose other end stays the caller's
// to close. If ctx ends first, a child that comes later is killed.
func (f *Family) fork(ctx context.Context, c *child, gate *os.File, spare bool) error {
	order := wire.Order{Kind: wire.OrderFork, Version: wire.OrderVersion}
	o := &forkOrder{child: c, spare: spare, reply: make(chan error, 1)}
	f.mu.Lock()
	if f.pending == nil {
		defer f.mu.Unlock()
		return f.died
	}
	f.nextID++
	order.ID = f.nextID
	f.pending[order.ID] = o
	f.mu.Unlock()
	f.of.control.owed.Add(answers)
	failed := f.of.control.send(order, gate)
	if failed == nil || errors.Is(failed, unix.EPIPE) || errors.Is(failed, unix.ECONNRESET) || errors.Is(failed, net.ErrClosed) {
		// Sent, or the zygote has ended: then read answers why.
		select {
		case err := <-o.reply:
			return err
		case <-ctx.Done():
			failed = fmt.Errorf("fork order not answered: %w", context.Cause(ctx))
		}
	}
	f.mu.Lock()
	waits := f.take(order.ID) != nil
	f.mu.Unlock()
	if !waits { // the answer came meanwhile
		return <-o.reply
	}
	return failed
}

// take takes an order that waits for its answer out, with f.mu held; nil: none of this id waits.
func (f *Family) take(id uint32) *forkOrder {
	o := f.pending[id]
	delete(f.pending, id)
	return o
}

// handle takes a message of the zygote. It must not wait for the zygote.
func (f *Family) handle(o wire.Order) {
	switch o.Kind {
	case wire.ChildLives, wire.OrderList:
		f.lives(o)
	case wire.ChildForked:
		f.forked(o)
	case wire.ZygoteError:
		f.mu.Lock()
		order := f.take(o.ID)
		f.mu.Unlock()
		if order != nil {
			order.reply <- fmt.Errorf("zygote refused to fork: %w", resources.Printed(o.Text))
		}
	case wire.ChildExited:
		f.mu.Lock()
		r, spare := f.replicas[o.PID], f.berths.lost(f.waiting[o.PID])
		delete(f.replicas, o.PID)
		delete(f.waiting, o.PID)
		f.mu.Unlock()
		if spare != nil { // the next start has another forked
			f.of.host.Tasks.Go(spare.dispose)
		}
		if r != nil {
			e := warden.Exit{Status: unix.WaitStatus(o.Status)}
			r.End(resources.EndingOf(e))
		}
	}
}

// forked takes the answer that a child is at its gate.
func (f *Family) forked(o wire.Order) {
	f.mu.Lock()
	order, twice := f.take(o.ID), f.waiting[o.PID] != nil || f.replicas[o.PID] != nil
	if order != nil && !twice {
		order.child.id = int(o.PID)
		f.waiting[o.PID] = order.child
	}
	f.mu.Unlock()
	switch {
	case order == nil: // it was given up
		f.killUnwanted(o.PID)
	case twice:
		order.reply <- f.of.Lied(fmt.Errorf("it says that process %d is its child, and said so before", o.PID))
	default:
		order.reply <- nil
	}
}

// end reports that all children have ended with the zygote. how is the zygote's own end. fault is
// what the zygote said that is not understood; nil: nothing.
func (f *Family) end(how resources.Ending, fault error) {
	f.mu.Lock()
	if f.lie != nil {
		fault = f.lie
	}
	end := task.EndShared
	if f.of.Works() && f.lie == nil {
		end = task.EndUnclear // what a replica does ends its whole worker
	}
	e := how.Of("its "+f.of.Key.What(), end).Saying(f.of.output)
	if fault != nil {
		e = resources.Ending{Cause: "its " + f.of.Key.What() + " was ended: " + fault.Error(), End: end}
	}
	f.died = e
	replicas, pending, spares := f.replicas, f.pending, f.berths.clear()
	f.replicas, f.pending, f.waiting = nil, nil, nil
	f.mu.Unlock()
	for _, o := range pending {
		o.reply <- e
	}
	for _, r := range replicas {
		r.End(e)
	}
	for _, c := range spares {
		c.dispose()
	}
}

// leave stops to listen to the children: they are left to the warden.
func (f *Family) leave() {
	f.mu.Lock()
	spares := f.berths.clear()
	f.waiting = nil
	for _, r := range f.replicas {
		r.Abandon()
	}
	f.mu.Unlock()
	for _, c := range spares {
		c.dispose() // the next daemon has it make others
	}
}

// Replicas returns how many replicas a zygote has or is about to have. A child that is about to be
// forked as a spare is none.
func (f *Family) Replicas() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.replicas)
	for _, o := range f.pending {
		if !o.spare {
			n++
		}
	}
	return n
}

// Unmap notes that a replica that maps the memory has ended.
func (f *Family) Unmap(pid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.replicas, uint32(pid))
}

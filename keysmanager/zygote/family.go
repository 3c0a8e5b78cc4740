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
	// Began records the replica's pid, and the id by which its zygote knows it. The id is the pid, or
	// in a worker the id of a thread.
	Began(pid, id int)
	// End reports how the replica has ended. Only the first call counts.
	End(e resources.Ending)
	// Abandon stops reading the replica's output: the replica is left to the warden.
	Abandon()
}

// Family manages the children of a zygote. A child is first ordered (pending), then at its gate
// (waiting), then a replica (replicas). If the zygote is sealed memory, its family is the replicas
// that map it. The methods are safe for concurrent use.
type Family struct {
	of *Zygote

	mu         sync.Mutex // guards the fields below; the daemon's locks are taken before it
	nextID     uint32     // of the next order
	pending    map[uint32]*forkOrder
	waiting    map[uint32]*child  // by id; nil: the zygote has ended, or is left to the warden
	spareSlots spareSlots         // the waiting children that no order has claimed yet
	limits     resources.Limits   // of the next spare's cgroup: those of the latest replica
	replicas   map[uint32]Replica // by id, as in the zygote's messages
	lie        error              // protocol violation for which the zygote was ended; nil: none
	died       error              // why the zygote ended; nil: it lives
	replaced   bool               // its parameters were invalidated
	// Closed when an adopted zygote has listed its children; nil: it has listed them, or was not
	// asked.
	listed   chan struct{}
	unlisted map[uint32]bool // children of an adopted zygote that it has not listed yet
}

func newFamily(z *Zygote) *Family {
	return &Family{of: z, spareSlots: spareSlots{}, pending: map[uint32]*forkOrder{}, waiting: map[uint32]*child{}, replicas: map[uint32]Replica{}}
}

// forkOrder is an order on its way.
type forkOrder struct {
	child *child
	spare bool
	// Buffered for one answer, so the sender never waits, also if the order was given up.
	reply chan error
}

// ForkOrder is what a forked replica gets.
type ForkOrder struct {
	Replica Replica
	Limits  resources.Limits // of its cgroup
	Device  string           // UUIDs of its devices, separated by commas; empty: none
	Message []byte           // made by Beginning
	Files   []*os.File       // its stage socket, stdout and stderr; the caller closes them
}

// Fork makes a child the replica of an order. It takes the child that is parked on the order's
// device, or else the spare child, or else forks a new one. parked reports that the child was
// parked. Fork may add to Host.Tasks. So when the daemon ends, it must wait until all calls of Fork
// have returned, and only then for Host.Tasks.
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

// order makes a zygote fork a child in a cgroup with these limits. The child waits at its gate.
func (f *Family) order(ctx context.Context, limits resources.Limits, spare bool) (*child, error) {
	gate, theirs, err := Socketpair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	c := &child{gate: gate, held: f.of.host.Pool.New()}
	var groups []*os.File
	if !f.of.Works() { // the threads of a worker are in the worker's cgroup
		groups, err = c.held.Enter(childGroup(f.of.held.Group().ID()), f.of.Function, limits)
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

// fork orders a child and waits until it is at its gate. The caller closes the other end of the
// gate. If ctx ends first, a child that comes later is killed.
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
		// Sent, or the zygote has ended: then read reports why.
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

// take removes an order that waits for its answer; nil: no order of this id waits. The caller holds
// f.mu.
func (f *Family) take(id uint32) *forkOrder {
	o := f.pending[id]
	delete(f.pending, id)
	return o
}

// handle handles a message of the zygote. It must not wait for the zygote.
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
		r, spare := f.replicas[o.PID], f.spareSlots.lost(f.waiting[o.PID])
		delete(f.replicas, o.PID)
		delete(f.waiting, o.PID)
		f.mu.Unlock()
		if spare != nil { // the next start forks another one
			f.of.host.Tasks.Go(spare.dispose)
		}
		if r != nil {
			e := warden.Exit{Status: unix.WaitStatus(o.Status)}
			r.End(resources.EndingOf(e))
		}
	}
}

// forked handles the answer that a child is at its gate.
func (f *Family) forked(o wire.Order) {
	f.mu.Lock()
	order, twice := f.take(o.ID), f.waiting[o.PID] != nil || f.replicas[o.PID] != nil
	if order != nil && !twice {
		order.child.id = int(o.PID)
		f.waiting[o.PID] = order.child
	}
	f.mu.Unlock()
	switch {
	case order == nil: // the order was given up
		f.killUnwanted(o.PID)
	case twice:
		order.reply <- f.of.Lied(fmt.Errorf("it says that process %d is its child, and said so before", o.PID))
	default:
		order.reply <- nil
	}
}

// end reports that all children have ended with the zygote. how is the zygote's own end. fault is
// the message of the zygote that the daemon did not understand; nil: none.
func (f *Family) end(how resources.Ending, fault error) {
	f.mu.Lock()
	if f.lie != nil {
		fault = f.lie
	}
	end := task.EndShared
	if f.of.Works() && f.lie == nil {
		end = task.EndUnclear // the end of one thread ends the whole worker
	}
	e := how.Of("its "+f.of.Key.What(), end).Saying(f.of.output)
	if fault != nil {
		e = resources.Ending{Cause: "its " + f.of.Key.What() + " was ended: " + fault.Error(), End: end}
	}
	f.died = e
	replicas, pending, spares := f.replicas, f.pending, f.spareSlots.clear()
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

// leave stops reading from the children: they are left to the warden.
func (f *Family) leave() {
	f.mu.Lock()
	spares := f.spareSlots.clear()
	f.waiting = nil
	for _, r := range f.replicas {
		r.Abandon()
	}
	f.mu.Unlock()
	for _, c := range spares {
		c.dispose() // the next daemon orders others
	}
}

// Replicas returns how many replicas a zygote has or is about to have. It does not count a spare
// child, nor one that is being forked.
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

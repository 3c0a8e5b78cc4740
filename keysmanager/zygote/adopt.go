package zygote

import (
	"fmt"
	"math/rand/v2"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Away says when what cannot be told any more has happened.
const Away = "while no KeysManager ran"

// Adopt makes a Zygote of what an earlier daemon has left to the warden. Nothing is read from it
// until Resume, so that its replicas can be adopted before.
func Adopt(h *Host, k warden.Kept, held *resources.Reservation, d Description) (*Zygote, error) {
	z := newZygote(h, d.Key(), k.Name, d.Function)
	z.held = held
	z.Prepacked, z.Bytes, z.Loaded, z.Load, z.Family.replaced = d.Prepacked, d.Bytes, d.Loaded, d.Load, d.Replaced
	if d.Form == Map && len(k.Files) == 2 {
		z.memory = k.Files
		return z, nil
	}
	if len(k.Files) != 3 || k.PID == 0 {
		return nil, fmt.Errorf("zygote of %q: process %d and %d descriptors, want 3: control socket, stdout, stderr", d.Function, k.PID, len(k.Files))
	}
	conn, err := unixConn(k.Files[0])
	if err != nil {
		return nil, fmt.Errorf("zygote of %q: %w", d.Function, err)
	}
	_ = k.Files[0].Close() // conn has its own
	z.control.conn, z.PID = conn, k.PID
	z.ended = h.Exits.Await(k.Name)
	f := z.Family
	f.nextID = rand.Uint32() // answers to an earlier daemon's orders may still come
	f.unlisted, f.listed, f.limits = map[uint32]bool{}, make(chan struct{}), d.Limits
	z.output = sandbox.ResumeOutput(k.Files[1], k.Files[2], z.prints)
	z.measureShared()
	z.held.AdoptGroup(k.Name, d.Function, "", h.Limits, 0, d.Loaded.Add(-d.Load))
	return z, nil
}

// Replaced reports whether the parameters were invalidated under an earlier daemon.
func (z *Zygote) Replaced() bool {
	z.Family.mu.Lock()
	defer z.Family.mu.Unlock()
	return z.Family.replaced
}

// Resume begins to read from an adopted zygote, and asks it which children it has.
func (z *Zygote) Resume() {
	if z.memory != nil {
		return
	}
	list := wire.Order{Kind: wire.OrderList, Version: wire.OrderVersion, ID: z.Family.nextID}
	go z.read()                   // ends with the process, or with Leave; gone says so
	_ = z.control.send(list, nil) // fails when the zygote has ended; it may first have much to tell
}

// Add makes a replica a child by its process or thread: one that maps memory, or one that the
// zygote has forked for an earlier daemon. In the latter case, Resume is called later.
func (f *Family) Add(id int, r Replica) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replicas[uint32(id)] = r
	if f.unlisted != nil {
		f.unlisted[uint32(id)] = true
	}
}

// Listed is closed once an adopted zygote has said which children it has; nil: it has, or was not
// asked.
func (f *Family) Listed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.listed
}

// lives takes the answers to Resume's question: one per child that lives, and then the list's end.
func (f *Family) lives(o wire.Order) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listed == nil {
		return // nobody has asked
	}
	if o.Kind == wire.ChildLives {
		delete(f.unlisted, o.PID)
		if f.replicas[o.PID] == nil { // forked in the daemon's last instant
			f.killUnwanted(o.PID)
		}
		return
	}
	for id := range f.unlisted {
		if r := f.replicas[id]; r != nil {
			delete(f.replicas, id)
			r.End(resources.Ending{Cause: "ended " + Away, End: task.EndUnclear})
		}
	}
	close(f.listed)
	f.listed, f.unlisted = nil, nil
}

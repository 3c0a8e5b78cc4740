package zygote

import (
	"cmp"
	"fmt"
	"math/rand/v2"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Away says when an event happened that the daemon cannot date.
const Away = "while no KeysManager ran"

// Adopt makes a Zygote of a process that an earlier daemon has left to the warden. Nothing is read
// from it until Resume, so that its replicas can be adopted before.
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
	z.control.conn, z.PID, z.pids = conn, k.PID, sandbox.PIDsOf(k.PID)
	z.ended = h.Exits.Await(k.Name)
	f := z.Family
	f.nextID = rand.Uint32() // the zygote may still answer orders of an earlier daemon
	f.unlisted, f.listed, f.limits = map[uint32]bool{}, make(chan struct{}), d.Limits
	z.output = sandbox.ResumeOutput(k.Files[1], k.Files[2], z.prints)
	z.measureShared()
	z.held.AdoptGroup(cmp.Or(d.Group, k.Name), d.Function, "", h.Limits, 0, d.Loaded.Add(-d.Load))
	return z, nil
}

// Replaced reports whether the parameters were invalidated under an earlier daemon.
func (z *Zygote) Replaced() bool {
	z.Family.mu.Lock()
	defer z.Family.mu.Unlock()
	return z.Family.replaced
}

// Resume begins to read from an adopted zygote, and asks it to list its children.
func (z *Zygote) Resume() {
	if z.memory != nil {
		return
	}
	list := wire.Order{Kind: wire.OrderList, Version: wire.OrderVersion, ID: z.Family.nextID}
	go z.read() // ends with the process, or with Leave; gone is closed then
	// Fails if the zygote has ended. The zygote may send other messages first.
	_ = z.control.send(list, nil)
}

// Add adds a replica to the family by its process or thread. The replica maps memory, or the zygote
// has forked it for an earlier daemon. In the latter case, Resume is called later.
func (f *Family) Add(id int, r Replica) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replicas[uint32(id)] = r
	if f.unlisted != nil {
		f.unlisted[uint32(id)] = true
	}
}

// Listed returns a channel that is closed once an adopted zygote has listed its children. It is nil
// if the zygote has listed them already, or was not asked.
func (f *Family) Listed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.listed
}

// lives handles the answers to Resume's question: one per child that lives, and then the end of the
// list.
func (f *Family) lives(o wire.Order) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listed == nil {
		return // nobody has asked
	}
	if o.Kind == wire.ChildLives {
		delete(f.unlisted, o.PID)
		if f.replicas[o.PID] == nil { // forked in the daemon's last moment
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

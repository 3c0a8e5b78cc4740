package keysmanager

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// listTimeout bounds how long all adopted zygotes together may take to list their children.
const listTimeout = 5 * time.Second

// adoption takes over the processes that an earlier daemon left to the warden. It needs no lock of
// its own, because New runs the adoption before other goroutines use the Manager. To change the
// store, it takes the store's mutex.
type adoption struct {
	m        *Manager
	byEntry  map[string]*zygote.Zygote
	zygotes  []*zygote.Zygote
	replicas []leftReplica
	loading  []<-chan struct{} // closed when loads of the earlier daemon have ended
}

// leftReplica is a replica that the warden kept, and its description.
type leftReplica struct {
	k    warden.Kept
	held *resources.Reservation
	d    replicaMeta
}

// adopt takes over the zygotes and replicas that an earlier daemon left. It reports ends that have
// not been reported yet. Processes that were only partly started are ended.
func (m *Manager) adopt() error {
	a := adoption{m: m, byEntry: map[string]*zygote.Zygote{}}
	m.exits.BeginAdoption()
	kept, err := m.warden.Attach(m.exits.Tell)
	if err != nil {
		return err
	}
	m.exits.Left(kept)
	for _, k := range kept {
		a.sort(k)
	}
	a.adoptReplicas()
	slices.SortFunc(a.zygotes, func(x, y *zygote.Zygote) int { return x.Loaded.Compare(y.Loaded) })
	for _, z := range a.zygotes { // the latest comes last: it is the current one of its function
		a.install(z)
	}
	m.exits.EndAdoption()
	a.awaitLists()
	m.loader.disk.sweepHalfPacked(a.loading)
	if len(kept) > 0 {
		m.cfg.Log.Info("adopted the processes of an earlier KeysManager", "zygotes", len(a.zygotes), "replicas", len(a.replicas))
	}
	return nil
}

// sort handles an entry of the warden. It adopts a zygote at once, and notes a replica for later.
// It ends the process of any other entry.
func (a *adoption) sort(k warden.Kept) {
	held := a.m.pool.Adopt(k)
	switch d, err := decode(k.Meta); {
	case err != nil:
		a.discard(k, held, err)
	case d.Spare:
		a.discard(k, held, errLeftSpare)
	case d.Replica != nil:
		a.replicas = append(a.replicas, leftReplica{k, held, *d.Replica})
	case d.Zygote.Loaded.IsZero():
		a.loading = append(a.loading, a.discard(k, held, fmt.Errorf("zygote of %q had not loaded", d.Zygote.Function)))
	default:
		z, err := zygote.Adopt(a.m.host, k, held, *d.Zygote)
		if err != nil {
			a.discard(k, held, err)
			return
		}
		if z.Memory() == nil {
			a.missed(k, d.Zygote.Function, z.Key.What())
		}
		a.byEntry[k.Name] = z
		a.zygotes = append(a.zygotes, z)
	}
}

// adoptReplicas adopts the replicas. The zygotes have been adopted before.
func (a *adoption) adoptReplicas() {
	slices.SortFunc(a.replicas, func(x, y leftReplica) int { return x.d.Started.Compare(y.d.Started) })
	for i, r := range a.replicas {
		// If several entries have one replica name, the latest is the replica.
		if slices.ContainsFunc(a.replicas[i+1:], func(next leftReplica) bool { return next.d.Replica == r.d.Replica }) {
			a.discard(r.k, r.held, errSucceeded)
			continue
		}
		if err := a.adoptReplica(r, a.byEntry[cmp.Or(r.d.Zygote, r.d.Mapped)]); err != nil {
			a.discard(r.k, r.held, err)
		}
	}
}

// errLeftSpare means that a process had been made ahead of a start that has not come.
var errLeftSpare = errors.New("it waited for a start, and another one is made when it is needed")

// errSucceeded means that a newer entry has the replica's name. The older replica has ended, and
// its end was reported.
var errSucceeded = errors.New("another replica has its name since")

// adoptReplica adopts a replica that started from z. If the zygote in the replica's description is
// unknown, z is nil and the replica has ended with its zygote.
func (a *adoption) adoptReplica(r leftReplica, z *zygote.Zygote) error {
	m := a.m
	k, d := r.k, r.d
	if own := d.Zygote == ""; len(k.Files) != 2 || own != (k.PID != 0) || !own && d.PID == 0 {
		return fmt.Errorf("replica %q: process %d and %d descriptors, want 2: stdout, stderr", d.Replica, max(k.PID, d.PID), len(k.Files))
	}
	p := &process{
		replica: d.Replica, function: d.Function, pid: max(k.PID, d.PID), task: cmp.Or(d.Task, d.Inside, k.PID, d.PID), path: d.Path, device: d.Device, held: r.held,
		timing: timing{phases: d.Phases, started: d.Started}, running: true, owner: m, entry: k.Name,
		placed: make(chan struct{}), gone: make(chan struct{}),
	}
	close(p.placed)
	p.output = sandbox.ResumeOutput(k.Files[0], k.Files[1], func(stream, line string) { m.cfg.Output(d.Function, d.Replica, stream, line) })
	p.held.AdoptDevices(d.Replica, d.Function, d.Reserved)
	p.held.Runs(p.pid)
	if d.Task == 0 {
		p.held.AdoptGroup(d.Group, d.Function, d.Replica, d.Limits, d.CPUMilli, d.Started)
	} else if z != nil { // a worker's replicas are in its group
		m.pool.Began(d.Function)
	}
	a.missed(k, d.Function, d.Replica)
	if z != nil {
		if p.mapped = z; d.Zygote != "" {
			p.zygote, p.mapped = z, nil
		}
		z.Family.Add(p.task, p)
	}
	m.store.mu.Lock()
	m.store.processes[d.Replica] = p
	m.store.mu.Unlock()
	switch {
	case d.Zygote == "":
		ended := m.exits.Await(k.Name)
		m.ends.Go(func() { p.reportEnd(ended) })
	case z == nil:
		how := task.EndShared
		if d.Task != 0 {
			how = task.EndUnclear // the end of one thread ends the whole worker
		}
		p.End(resources.Ending{Cause: "its zygote or worker ended " + zygote.Away, End: how})
	}
	return nil
}

// install makes an adopted zygote the current one of its slot, and begins to read from it.
func (a *adoption) install(z *zygote.Zygote) {
	m := a.m
	m.store.mu.Lock()
	s := m.store.hold(z.Key)
	before := s.zygote
	m.store.fill(z.Key, s, z)
	variant, next := z.Key.Variant(), z.Key.Generation
	if z.Replaced() {
		next++ // its own generation is outdated
		m.store.retiring(z.Key, s)
	} else {
		its := func(function string) { m.store.uses[function] = z.Key }
		if z.Works() {
			its = func(function string) { m.store.slots.visit(z.Key, function) }
		}
		its(z.Function)
		for _, function := range m.store.processes.functionsOf(z) {
			its(function)
		}
	}
	if next > 0 {
		m.store.generations[variant] = max(m.store.generations[variant], next)
	}
	if z.Key.Form == zygote.Map {
		m.store.instead[variant] = zygote.Map
	}
	m.store.release(z.Key)
	m.store.mu.Unlock()
	if before != nil {
		before.Kill() // it had been given up
	}
	z.Resume()
	m.watchers.Go(func() { m.loader.watch(z.Key, s, z) })
}

// awaitLists waits until each adopted zygote has listed its living children, or until listTimeout
// has passed.
func (a *adoption) awaitLists() {
	m := a.m
	timeout := time.After(listTimeout)
	for _, z := range a.zygotes {
		listed := z.Family.Listed()
		if listed == nil {
			continue
		}
		select {
		case <-listed:
		case <-z.Gone():
		case <-timeout:
			m.cfg.Log.Warn("zygote does not list its children", "model", z.Key.Model, "pid", z.PID, "waited", listTimeout)
			return
		}
	}
}

// missed writes to a function's log that output was lost.
func (a *adoption) missed(k warden.Kept, function, replica string) {
	m := a.m
	if k.Lost > 0 {
		m.cfg.Output(function, replica, "stderr", fmt.Sprintf("%d bytes of output were lost %s", k.Lost, zygote.Away))
	}
}

// discard ends an entry that cannot be adopted. It returns a channel that is closed when the
// process has ended.
func (a *adoption) discard(k warden.Kept, held *resources.Reservation, why error) <-chan struct{} {
	m := a.m
	m.cfg.Log.Warn("process of an earlier KeysManager is not adopted and ends", "entry", k.Name, "pid", k.PID, "why", why)
	for _, f := range k.Files {
		_ = f.Close() // nothing was written through it
	}
	if k.PID == 0 {
		held.Release()
		m.pool.Drop(k.Name)
		return nothing()
	}
	ended, gone := m.exits.Await(k.Name), make(chan struct{})
	m.ends.Go(func() {
		defer close(gone)
		// This fails only if the warden is gone, and then the process is gone, too.
		_ = m.warden.Signal(k.Name, unix.SIGKILL)
		select {
		case <-ended:
			held.Release()
			m.pool.Drop(k.Name)
		case <-m.detached:
		}
	})
	return gone
}

// Detach ends the Manager, but leaves its processes to the warden, so that the next Manager can
// adopt them. It cancels the starts and loads that are under way, and returns when the Manager's
// goroutines have ended. After Close it does nothing.
func (m *Manager) Detach() { m.over.Do(m.detach) }

func (m *Manager) detach() {
	m.store.mu.Lock()
	m.store.closed = true
	m.store.mu.Unlock()
	m.cancel(ErrClosed)
	m.spares.close()
	m.starts.Wait()
	close(m.detached)
	m.store.mu.Lock()
	for _, s := range m.store.slots.Values() {
		if s.zygote != nil {
			s.zygote.Leave()
		}
	}
	m.store.mu.Unlock()
	m.watchers.Wait()
	m.ends.Wait()
	m.release()
}

// release detaches from the warden.
func (m *Manager) release() {
	if m.cfg.Warden == nil {
		m.warden.Close()
		return
	}
	if err := m.warden.Release(); err != nil {
		m.cfg.Log.Warn("warden is not released", "error", err)
	}
}

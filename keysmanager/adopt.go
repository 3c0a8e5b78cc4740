package keysmanager

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// await returns where the end of a process will be told.
func (m *Manager) await(entry string) <-chan warden.Exit {
	ch := make(chan warden.Exit, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, ok := m.early[entry]; ok {
		ch <- e
	} else {
		m.awaited[entry] = ch
	}
	return ch
}

// forgo says that nobody awaits the end of a process any more.
func (m *Manager) forgo(entry string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.awaited, entry)
}

// ended takes the end of a process from the warden, which must not be called with m.mu held: it may wait for this.
func (m *Manager) ended(e warden.Exit) {
	m.mu.Lock()
	ch := m.awaited[e.Name]
	delete(m.awaited, e.Name)
	if ch == nil && m.early != nil {
		m.early[e.Name] = e
	}
	m.mu.Unlock()
	if ch != nil {
		ch <- e // has room for the only one
	}
}

// mourned reports the end of a process of the warden's own once it has come, unless it is left to the warden.
func (m *Manager) mourned(p *process, ended <-chan warden.Exit) {
	select {
	case e := <-ended:
		p.end(endingOf(e))
	case <-m.detached:
		p.output.Abandon()
	}
}

// drop has the warden forget an entry.
func (m *Manager) drop(entry string) {
	m.vacate(entry)
	if err := m.warden.Drop(entry); err != nil {
		m.cfg.Log.Warn("warden keeps what has ended", "error", err)
	}
}

// away says when what cannot be told any more has happened.
const away = "while no KeysManager ran"

// listTimeout is how long zygotes may take, all together, to say which children they have.
const listTimeout = 5 * time.Second

// adopt takes over what an earlier daemon has left to the warden: zygotes, replicas, and ends that nobody has heard of. What
// was half made is ended.
func (m *Manager) adopt() error {
	m.early = map[string]warden.Exit{}
	kept, err := m.warden.Attach(m.ended)
	if err != nil {
		return err
	}
	for _, k := range kept {
		if k.Ended {
			m.mu.Lock()
			m.early[k.Name] = warden.Exit{Name: k.Name, PID: k.PID, Status: k.Status}
			m.mu.Unlock()
		}
	}
	zygotes := map[string]*zygote{} // by entry
	var replicas []leftReplica
	var order []*zygote
	var loading []<-chan struct{} // closed when they have ended
	for _, k := range kept {
		m.adoptAccount(k)
		switch d, err := decode(k.Meta); {
		case err != nil:
			m.discard(k, err)
		case d.Replica != nil:
			replicas = append(replicas, leftReplica{k, *d.Replica})
		case d.Zygote.Loaded.IsZero():
			loading = append(loading, m.discard(k, fmt.Errorf("zygote of %q had not loaded", d.Zygote.Function)))
		default:
			z, err := m.adoptZygote(k, *d.Zygote)
			if err != nil {
				m.discard(k, err)
				continue
			}
			zygotes[k.Name] = z
			order = append(order, z)
		}
	}
	m.adoptReplicas(replicas, zygotes)
	slices.SortFunc(order, func(a, b *zygote) int { return a.loaded.Compare(b.loaded) })
	for _, z := range order { // the latest comes last: it is the present one of its function
		m.install(z)
	}
	m.mu.Lock()
	m.early = nil
	m.mu.Unlock()
	m.awaitLists(order)
	m.sweepHalfPacked(loading)
	if len(kept) > 0 {
		m.cfg.Log.Info("adopted what an earlier KeysManager has left", "zygotes", len(order), "replicas", len(replicas))
	}
	return nil
}

// leftReplica is what was kept of a replica.
type leftReplica struct {
	k warden.Kept
	d replicaMeta
}

// adoptReplicas adopts replicas, whose zygotes were, by entry.
func (m *Manager) adoptReplicas(replicas []leftReplica, zygotes map[string]*zygote) {
	slices.SortFunc(replicas, func(a, b leftReplica) int { return a.d.Started.Compare(b.d.Started) })
	for i, r := range replicas {
		// Of one name, the latest is it.
		if slices.ContainsFunc(replicas[i+1:], func(next leftReplica) bool { return next.d.Replica == r.d.Replica }) {
			m.discard(r.k, errSucceeded)
			continue
		}
		if err := m.adoptReplica(r.k, r.d, zygotes[cmp.Or(r.d.Zygote, r.d.Mapped)]); err != nil {
			m.discard(r.k, err)
		}
	}
}

// errSucceeded says that an entry's replica has ended, and was reported.
var errSucceeded = errors.New("another replica has its name since")

// adoptZygote makes a zygote of what was kept of it. Nothing is read from it yet.
func (m *Manager) adoptZygote(k warden.Kept, d zygoteMeta) (*zygote, error) {
	if d.Form == formMap && len(k.Files) == 2 {
		z := m.newZygote(d.key(), k.Name, d.Function)
		z.memory, z.bytes, z.loaded, z.load, z.replaced = k.Files, d.Bytes, d.Loaded, d.Load, d.Replaced
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
	z := m.newZygote(d.key(), k.Name, d.Function)
	z.conn, z.pid, z.prepacked, z.bytes, z.loaded, z.load, z.replaced = conn, k.PID, d.Prepacked, d.Bytes, d.Loaded, d.Load, d.Replaced
	z.nextID = rand.Uint32() // answers to an earlier daemon's orders may still come
	z.ended = m.await(k.Name)
	z.unlisted, z.listed = map[uint32]bool{}, make(chan struct{})
	z.output = sandbox.ResumeOutput(k.Files[1], k.Files[2], m.zygoteOutput(z.key, d.Function))
	z.measureShared()
	z.limits = d.Limits
	z.group = m.adoptGroup(k.Name, d.Function, "", m.zygoteLimits(), 0, d.Loaded.Add(-d.Load))
	m.missed(k, d.Function, z.key.what())
	return z, nil
}

func (d zygoteMeta) key() zygoteKey {
	return zygoteKey{
		namespace: d.Namespace, digest: d.Digest, model: d.Model, process: d.Process, form: d.Form, engineName: d.Runtime, environment: d.Seen,
		generation: d.Generation, worker: d.Worker, device: d.Device, network: cmp.Or(d.Network, networkHost), secrets: d.Secrets,
	}
}

// adoptReplica makes a replica of what was kept of it, which started from z. One whose zygote is unknown has ended with that.
func (m *Manager) adoptReplica(k warden.Kept, d replicaMeta, z *zygote) error {
	if own := d.Zygote == ""; len(k.Files) != 2 || own != (k.PID != 0) || !own && d.PID == 0 {
		return fmt.Errorf("replica %q: process %d and %d descriptors, want 2: stdout, stderr", d.Replica, max(k.PID, d.PID), len(k.Files))
	}
	p := &process{
		replica: d.Replica, function: d.Function, pid: max(k.PID, d.PID), task: cmp.Or(d.Task, k.PID, d.PID), path: d.Path, device: d.Device, reserved: d.Reserved,
		phases: d.Phases, started: d.Started, running: true, owner: m, entry: k.Name,
		placed: make(chan struct{}), gone: make(chan struct{}),
	}
	close(p.placed)
	p.output = sandbox.ResumeOutput(k.Files[0], k.Files[1], func(stream, line string) { m.cfg.Output(d.Function, d.Replica, stream, line) })
	if d.Task == 0 {
		p.group = m.adoptGroup(d.Group, d.Function, d.Replica, d.Limits, d.CPUMilli, d.Started)
	} else if z != nil { // a worker's replicas are in its group
		m.totals.began(d.Function)
	}
	m.missed(k, d.Function, d.Replica)
	if z != nil {
		z.mu.Lock()
		z.children[uint32(p.task)] = p
		if p.mapped = z; d.Zygote != "" {
			p.zygote, p.mapped, z.unlisted[uint32(p.task)] = z, nil, true
		}
		z.mu.Unlock()
	}
	m.mu.Lock()
	m.processes[d.Replica] = p
	m.mu.Unlock()
	switch {
	case d.Zygote == "":
		ended := m.await(k.Name)
		m.ends.Go(func() { m.mourned(p, ended) })
	case z == nil:
		how := task.EndShared
		if d.Task != 0 {
			how = task.EndUnclear // what a replica does ends its whole worker
		}
		p.end(ending{cause: "its zygote or worker ended " + away, end: how})
	}
	return nil
}

// install puts an adopted zygote into its place and begins to read from it.
func (m *Manager) install(z *zygote) {
	m.mu.Lock()
	s, ok := m.slots.Get(z.key)
	if !ok {
		s = &slot{}
		m.slots.Add(z.key, s)
	}
	before := s.zygote
	s.zygote = z
	variant, next := z.key.variant(), z.key.generation
	if z.replaced {
		next++ // its own is not wanted any more
		m.retiring(s)
	} else {
		its := func(function string) { m.uses[function] = z.key }
		if z.works() {
			its = func(function string) { m.visit(z.key, function) }
		}
		its(z.function)
		z.mu.Lock()
		for _, p := range z.children {
			its(p.function)
		}
		z.mu.Unlock()
	}
	if next > 0 {
		m.generations[variant] = max(m.generations[variant], next)
	}
	if z.key.form == formMap {
		m.instead[variant] = formMap
	}
	m.mu.Unlock()
	if before != nil {
		before.kill() // it had been given up
	}
	if z.memory == nil {
		list := wire.Order{Kind: wire.OrderList, Version: wire.OrderVersion, ID: z.nextID}
		go z.read()                                  // ends with the process, or with Detach; gone says so
		_ = z.send(wire.AppendOrder(nil, list), nil) // fails when the zygote has ended; it may first have much to tell
	}
	m.watchers.Go(func() { m.watch(z.key, s, z) })
}

// lives takes the answers to an adoption's question: one a child that lives, and then the list's end.
func (z *zygote) lives(o wire.Order) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.listed == nil {
		return // nobody has asked
	}
	if o.Kind == wire.ChildLives {
		delete(z.unlisted, o.PID)
		if z.children[o.PID] == nil { // forked in the daemon's last instant
			z.disown(o.PID)
		}
		return
	}
	for pid := range z.unlisted {
		if p := z.children[pid]; p != nil {
			delete(z.children, pid)
			p.end(ending{cause: "ended " + away, end: task.EndUnclear})
		}
	}
	close(z.listed)
	z.listed, z.unlisted = nil, nil
}

// awaitLists waits until it is known which replicas live.
func (m *Manager) awaitLists(all []*zygote) {
	timeout := time.After(listTimeout)
	for _, z := range all {
		z.mu.Lock()
		listed := z.listed
		z.mu.Unlock()
		if listed == nil {
			continue
		}
		select {
		case <-listed:
		case <-z.gone:
		case <-timeout:
			m.cfg.Log.Warn("zygote does not say which children it has", "model", z.key.model, "pid", z.pid, "waited", listTimeout)
			return
		}
	}
}

// missed says that output was lost.
func (m *Manager) missed(k warden.Kept, function, replica string) {
	if k.Lost > 0 {
		m.cfg.Output(function, replica, "stderr", fmt.Sprintf("%d bytes of output were lost %s", k.Lost, away))
	}
}

// discard ends what cannot be adopted. What it returns is closed when it has ended.
func (m *Manager) discard(k warden.Kept, why error) <-chan struct{} {
	m.cfg.Log.Warn("left by an earlier KeysManager and not adopted", "entry", k.Name, "pid", k.PID, "why", why)
	for _, f := range k.Files {
		_ = f.Close() // nothing was written through it
	}
	if k.PID == 0 {
		m.drop(k.Name)
		return nothing()
	}
	ended, gone := m.await(k.Name), make(chan struct{})
	m.ends.Go(func() {
		defer close(gone)
		_ = m.warden.Signal(k.Name, unix.SIGKILL) // fails when the warden is gone, and the process with it
		select {
		case <-ended:
			m.drop(k.Name)
		case <-m.detached:
		}
	})
	return gone
}

// Detach leaves all processes to the warden, for the next Manager to adopt, and returns when nothing of this one runs any
// more. What is being started or loaded is ended. After Close it does nothing.
func (m *Manager) Detach() { m.over.Do(m.detach) }

func (m *Manager) detach() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel(ErrClosed)
	m.starts.Wait()
	close(m.detached)
	m.mu.Lock()
	for _, s := range m.slots.Values() {
		if s.zygote != nil {
			s.zygote.leave()
		}
	}
	m.mu.Unlock()
	m.watchers.Wait()
	m.ends.Wait()
	m.release()
}

// release leaves the warden.
func (m *Manager) release() {
	if m.cfg.Warden == nil {
		m.warden.Close()
		return
	}
	if err := m.warden.Release(); err != nil {
		m.cfg.Log.Warn("warden is not released", "error", err)
	}
}

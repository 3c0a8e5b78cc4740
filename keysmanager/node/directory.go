package node

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// DirectoryConfig configures a Directory. Its functions must not block for long. They are called
// one at a time, except Line.
type DirectoryConfig struct {
	Bus  Bus
	Boot string // of this machine, see BootID
	// Of the program, for [Probe].
	Version string
	// A node's name that no daemon may have, because this process has it; empty: none.
	Own   string
	Codes Codes // of daemons' errors
	Dial  Dial  // to nodes on other machines; nil: they cannot join
	// Prepare is called before an order to start or load a function is given to a node of another
	// machine. It may be called concurrently, and may block. nil: there is nothing to prepare.
	Prepare func(ctx context.Context, c *Client, kind OrderKind, spec Spec) error
	// Epoch returns the epoch of this control plane, which all orders carry. It returns an error
	// while this process may not give orders, and ErrOldEpoch if it never may again. 0 means that it
	// has no epoch; only nodes that have never seen one obey it. nil: 0.
	Epoch func() (uint64, error)
	Log   *slog.Logger

	Joined func(*Client)              // a node has come, or is back
	Left   func(node, cause string)   // it is silent or out of reach, or has said that it goes
	Heard  func(*Client)              // it has announced itself; after Joined
	Event  func(node string, e Event) // each once, in order
	// Gets what replicas print. Line may be called concurrently with the other functions. nil: the
	// Directory does not read lines.
	Line func(node string, line Line)

	Silence time.Duration // silence after which a node has left; 0: 2.5 s
	// A node on another machine has left if it is heard and was not reached for this long after the
	// loss of its connection; 0: 3 s.
	Reach time.Duration
	Keep  bool // replicas outlive this process, and another one may take them over
	// Latest announcements of nodes, which a [Listener] has heard while this process stood by. So
	// their nodes join at once.
	First map[string][]byte
}

// Directory knows the nodes whose daemons announce themselves.
type Directory struct {
	cfg    DirectoryConfig
	inbox  chan func() // what happens, for run
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	stops  []func()
	faults map[string]fault // of announcements, by node; only run uses them

	mu      sync.Mutex
	nodes   map[string]*member // written by run alone
	arrived map[string]arrival // by node: its latest announcement
}

// arrival is an announcement that has arrived.
type arrival struct {
	data []byte // nil: run has taken it
	at   time.Time
}

// member is a node that was heard. Only the goroutine run uses its fields, except client, joined,
// refused and removed, which change while Directory.mu is held.
type member struct {
	client  *Client
	heard   time.Time
	joined  bool
	told    bool               // Joined and Heard have been called; changes like joined
	leave   context.CancelFunc // ends what follows the node's lines; nil: nothing does
	seen    uint64             // number of the latest event of this daemon
	asking  bool               // for events that were missed
	refused string             // id of the daemon whose refusal was logged, until it is used
	removed string             // id of the daemon that was removed for a cause
	cause   string
	away    *Absence // written while Directory.mu is held; nil: it has never left

	lines heardLines
}

// Bounds of a Directory.
const (
	inboxLength = 4096
	maxNodes    = 2048
	lookEvery   = 100 * time.Millisecond  // how often silence is noticed
	lostDaemon  = 1500 * time.Millisecond // of silence, after which another may have its name
)

// OpenDirectory listens to announcements until Close.
func OpenDirectory(cfg DirectoryConfig) (*Directory, error) {
	if cfg.Silence == 0 {
		cfg.Silence = 2500 * time.Millisecond
	}
	cfg.Reach = cmp.Or(cfg.Reach, 3*time.Second)
	d := &Directory{
		cfg: cfg, inbox: make(chan func(), inboxLength), nodes: map[string]*member{}, arrived: map[string]arrival{},
		faults: map[string]fault{},
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.group.Go(d.run)
	for kind, f := range map[string]func(string, string, []byte){
		kindInventory: func(name, _ string, data []byte) { d.arrive(name, data) },
		kindEvent:     func(name, _ string, data []byte) { d.post(func() { d.told(name, data) }) },
	} {
		stop, err := cfg.Bus.Listen("", kind, f)
		if err != nil {
			d.Close()
			return nil, fmt.Errorf("nodes: %w", err)
		}
		d.stops = append(d.stops, stop)
	}
	stop, err := AnswerProbes(cfg.Bus, cfg.Boot, cfg.Version)
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("nodes: %w", err)
	}
	d.stops = append(d.stops, stop)
	d.begin()
	return d, nil
}

// Close stops listening. After it returns, no function of the configuration runs.
func (d *Directory) Close() {
	d.cancel()
	for _, stop := range d.stops {
		stop()
	}
	d.group.Wait()
	for _, m := range d.nodes {
		m.client.stop()
	}
}

// Clients returns those of the nodes that are heard, by name.
func (d *Directory) Clients() []*Client {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []*Client
	for _, name := range slices.Sorted(maps.Keys(d.nodes)) {
		if m := d.nodes[name]; m.joined {
			out = append(out, m.client)
		}
	}
	return out
}

// post has f run in turn.
func (d *Directory) post(f func()) {
	select {
	case d.inbox <- f:
	case <-d.ctx.Done():
	}
}

func (d *Directory) run() {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	last := time.Now()
	for {
		select {
		case <-d.ctx.Done():
			return
		case f := <-d.inbox:
			f()
		case <-look.C:
			now := time.Now()
			// This process was stopped for a while, and messages of that time arrive only now.
			late := now.Sub(last) - lookEvery
			last = now
			for name, m := range d.nodes {
				if late > lookEvery && now.Sub(m.heard) > late {
					m.heard = m.heard.Add(late)
				}
				if silent := now.Sub(d.lastHeard(name, m)); m.leave != nil && silent > d.cfg.Silence {
					d.left(name, m, Absence{Cause: fmt.Sprintf("its daemon is silent for %v", silent.Round(lookEvery))})
				}
			}
		}
	}
}

// arrive queues an announcement for run. An announcement that still waits is replaced by the node's
// next one, which has the whole state again. So at most one per node waits. The last one of a
// daemon that ends is always taken.
func (d *Directory) arrive(name string, data []byte) {
	d.mu.Lock()
	a := d.arrived[name]
	waits := a.data != nil
	if waits && bytes.Contains(a.data, gone) {
		d.mu.Unlock()
		d.post(func() { d.announced(name, data) })
		return
	}
	d.arrived[name] = arrival{data, time.Now()}
	d.mu.Unlock()
	if waits {
		return
	}
	d.post(func() {
		d.mu.Lock()
		a := d.arrived[name]
		d.arrived[name] = arrival{nil, a.at}
		d.mu.Unlock()
		d.announced(name, a.data)
		if d.nodes[name] == nil { // it cannot join
			d.mu.Lock()
			delete(d.arrived, name)
			d.mu.Unlock()
		}
	})
}

// gone is in the last announcement of a daemon.
var gone = []byte(`"gone":true`)

// lastHeard returns when a node's daemon was heard for the last time. Its announcements count
// although they wait for run, because a burst of them must not make their nodes look silent.
func (d *Directory) lastHeard(name string, m *member) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if a := d.arrived[name]; a.data != nil && a.at.After(m.heard) {
		return a.at
	}
	return m.heard
}

// announced takes an announcement.
func (d *Directory) announced(name string, data []byte) {
	inv, err := DecodeInventory(data)
	if err == nil && inv.Name != name {
		err = fmt.Errorf("inventory of %q", inv.Name)
	}
	m := d.nodes[name]
	if err == nil && m == nil {
		m, err = d.meet(name)
	}
	if err != nil {
		d.distrust(name, data, err)
		return
	}
	delete(d.faults, name)
	was := m.client.Inventory()
	now := time.Now()
	switch {
	case inv.ID == m.removed:
		if !inv.Gone {
			refuse(d.cfg, inv.Identity, m.cause)
		}
		return
	case inv.Gone && inv.ID == was.ID:
		m.heard = time.Time{} // another may have the name now
		if m.leave != nil {
			d.left(name, m, Absence{Since: now, Cause: "its daemon has ended", Ended: true})
		}
		return
	case inv.Gone:
		return
	case d.behind(inv.Epoch):
		if m.refused != inv.ID {
			refuses(d, m, inv.ID)
			d.cfg.Log.Error("node not used: it follows another control plane, whose epoch is higher", "node", name, "epoch", inv.Epoch)
		}
		return
	case d.unfit(inv) != "":
		if m.refused != inv.ID && refuse(d.cfg, inv.Identity, d.unfit(inv)) {
			refuses(d, m, inv.ID)
			d.cfg.Log.Error("node refused", "node", name, "error", d.unfit(inv))
		}
		return
	case was.ID != "" && inv.ID != was.ID:
		if now.Sub(m.heard) < lostDaemon {
			return // two daemons have the name; one gives up
		}
		m.seen, m.asking = 0, false
	}
	m.heard = now
	if m.refused == inv.ID {
		refuses(d, m, "")
	}
	m.client.mu.Lock()
	m.client.inv = inv
	m.client.mu.Unlock()
	switch {
	case m.joined:
		d.cfg.Heard(m.client)
	case m.leave == nil:
		d.follow(m)
	}
	if inv.Events > m.seen && !m.asking {
		d.catchUp(m)
	}
}

// behind reports whether a node has seen a higher epoch than that of this process.
func (d *Directory) behind(epoch uint64) bool {
	mine, err := epochFunc(d.cfg.Epoch).now()
	return err == nil && mine > 0 && epoch > mine
}

// unfit says why a node cannot be used; empty: it can.
func (d *Directory) unfit(inv Inventory) string {
	switch {
	case inv.Name == d.cfg.Own:
		return fmt.Sprintf("node %q is a part of `stagecoach up` itself; choose another --name, or run `stagecoach up --no-node`", inv.Name)
	case inv.Boot != d.cfg.Boot && (inv.Address == "" || d.cfg.Dial == nil):
		return fmt.Sprintf("node %q is on another machine (host %s, boot %s, want %s) and announces no address for replicas' sockets; "+
			"start its KeysManager with --listen", inv.Name, inv.Host, inv.Boot, d.cfg.Boot)
	}
	return ""
}

// meet makes the member for a new name.
func (d *Directory) meet(name string) (*member, error) {
	if len(d.nodes) >= maxNodes && !d.dropAway() {
		return nil, fmt.Errorf("%d nodes have joined, want at most %d", len(d.nodes), maxNodes)
	}
	c, err := newClient(d.cfg.Bus, name, d.cfg.Codes, d.cfg.Epoch, reach{d.cfg.Boot, d.cfg.Dial, d.cfg.Keep, d.cfg.Prepare})
	if err != nil {
		return nil, err
	}
	m := &member{client: c}
	d.mu.Lock()
	d.nodes[name] = m
	d.mu.Unlock()
	return m, nil
}

// dropAway forgets the node that has been away for the longest time.
func (d *Directory) dropAway() bool {
	var oldest *member
	for _, m := range d.nodes {
		if m.leave == nil && (oldest == nil || m.heard.Before(oldest.heard)) {
			oldest = m
		}
	}
	if oldest == nil {
		return false
	}
	oldest.client.stop()
	d.mu.Lock()
	delete(d.nodes, oldest.client.name)
	delete(d.arrived, oldest.client.name)
	d.mu.Unlock()
	return true
}

// joined makes a node part of the cluster after its socket has answered.
func (d *Directory) joined(m *member) {
	if m.joined || m.leave == nil {
		return
	}
	d.mu.Lock()
	m.joined = true
	d.mu.Unlock()
	d.cfg.Log.Debug("daemon joined", "node", m.client.name, "daemon", m.client.Inventory().String())
	d.cfg.Joined(m.client)
	d.cfg.Heard(m.client)
	d.mu.Lock()
	m.told = true
	d.mu.Unlock()
}

// left takes a node out of the cluster. If a has no Since, the node was last heard at m.heard.
func (d *Directory) left(name string, m *member, a Absence) {
	m.leave()
	m.leave = nil
	if a.Since.IsZero() {
		a.Since = m.heard
	}
	if !m.joined { // its socket does not answer
		if m.away != nil && m.away.Heard {
			d.mu.Lock()
			m.away = &a
			d.mu.Unlock()
		}
		return
	}
	d.mu.Lock()
	m.joined, m.told, m.away = false, false, &a
	d.mu.Unlock()
	d.cfg.Log.Debug("daemon left", "node", name, "cause", a.Cause)
	d.cfg.Left(name, a.Cause)
}

// told takes an event.
func (d *Directory) told(name string, data []byte) {
	e, err := DecodeEvent(data)
	m := d.nodes[name]
	if err != nil || m == nil || e.ID != m.client.Inventory().ID || d.behind(e.Epoch) {
		return
	}
	switch {
	case e.Number == m.seen+1:
		m.seen++
		d.cfg.Event(name, e)
	case e.Number > m.seen && !m.asking:
		d.catchUp(m)
	}
}

// catchUp asks for missed events.
func (d *Directory) catchUp(m *member) {
	m.asking = true
	id, since := m.client.Inventory().ID, m.seen
	d.group.Go(func() {
		ctx, cancel := context.WithTimeout(d.ctx, socketTimeout)
		defer cancel()
		events, err := m.client.missed(ctx, since)
		d.post(func() {
			if m.client.Inventory().ID != id {
				return
			}
			m.asking = false
			if err != nil {
				return // the next announcement asks again
			}
			for _, e := range events {
				if e.Number > m.seen {
					m.seen = e.Number
					d.cfg.Event(m.client.name, e)
				}
			}
		})
	})
}

// Inventories returns the latest announcements of the nodes that are heard, by name.
func (d *Directory) Inventories() []Inventory {
	var out []Inventory
	for _, c := range d.Clients() {
		out = append(out, c.Inventory())
	}
	slices.SortFunc(out, func(a, b Inventory) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

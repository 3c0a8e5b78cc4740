package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/learn"
	"github.com/stagecoach-serving/stagecoach/control/lease"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// leading has the work that only the holder of the lease of control does: it runs the control loop,
// owns the lines of all functions, gives orders to nodes and runs async requests. With NATS inside,
// this process is the only control plane, and leads from its start.
type leading struct {
	u       *up
	me      string        // id of this process; empty: NATS is inside
	reign   atomic.Uint64 // the latest epoch of this process; 0: it has not led yet
	keeper  *lease.Keeper
	lease   *lease.Lease
	owners  *queue.Owners
	bus     *queue.Bus
	forward *forwarder

	journal atomic.Pointer[queue.Journal] // nil: this process does not lead
	active  atomic.Bool                   // the parts of a leader run
	ended   atomic.Bool                   // this process never leads again
	// Of the lease, when the parts of a leader were opened; only run uses it.
	since   uint64
	changes sync.Mutex // held while lines follow a deploy, or all are opened

	secretGate

	states  chan lease.State // the latest, for run
	deposed chan error       // gets why this process must begin again
	running sync.WaitGroup   // run
	cancel  context.CancelFunc
	closers []func() // of what lead has opened
	async   func()   // stops the work on async requests; nil: none is done
}

// controlLease is the name of the lease of control, and of all functions' lines.
const controlLease = "control"

// errAgain means that this process must close all parts and begin again, to stand by.
var errAgain = errors.New("this control plane cannot lead any more")

// errNoLease means that this process does not hold the lease of control now.
var errNoLease = errors.New("this control plane does not hold the lease of control now")

// outside reports whether other control planes may lead.
func (l *leading) outside() bool { return l.me != "" }

// leads reports whether the parts of a leader run.
func (l *leading) leads() bool { return l.active.Load() }

// acts reports whether this process leads and may act now. It reads the lease only while the
// process leads, because there may be no lease before.
func (l *leading) acts() bool {
	if !l.leads() {
		return false
	}
	_, err := l.epoch()
	return err == nil
}

// epoch returns the epoch of orders. Only the holder of the lease may give any.
func (l *leading) epoch() (uint64, error) {
	if !l.outside() {
		return l.reign.Load(), nil
	}
	if l.ended.Load() {
		return 0, node.ErrOldEpoch
	}
	if epoch, ok := l.lease.Epoch(); ok {
		return epoch, nil
	}
	return 0, errNoLease
}

// Owner is of flow.Remote, see remoteOwners. All functions have one owner now.
func (l *leading) Owner(string) string { return l.lease.State().Holder }

// Send is of flow.Remote.
func (l *leading) Send(owner, function, tag string, msg []byte) error {
	return l.owners.Send(owner, function, tag, msg)
}

// Most is of flow.Remote.
func (l *leading) Most() int { return l.owners.Most() }

// remoteOwners implements flow.Remote.
type remoteOwners struct{ *leading }

// Understands implements flow.Remote. The lease says what its holder understands.
func (o remoteOwners) Understands(owner, feature string) bool {
	s := o.lease.State()
	return s.Holder == owner && s.Understands(feature)
}

// Reaches implements flow.Remote.
func (o remoteOwners) Reaches() bool { return o.u.nodes.far.reachesAll() }

// openID chooses the id of this process, if NATS is outside.
func (l *leading) openID() {
	l.states, l.deposed = make(chan lease.State, 1), make(chan error, 1)
	if l.u.cfg.NATS.outside() {
		l.me = l.u.cfg.Node.Name + "-" + rand.Text()[:10]
	}
}

// openInside sets the epoch of a process with NATS inside: higher than that of any earlier process
// on the same state, and than that of processes whose state was deleted.
func (l *leading) openInside(ctx context.Context) error {
	nc, err := l.u.nats.Connect("epoch")
	if err != nil {
		return err
	}
	defer nc.Close()
	kv, err := queue.OpenKV(ctx, nc, l.u.nats.Disk(), "owners")
	if err != nil {
		return err
	}
	b, _, err := kv.Get(ctx, "epoch")
	if err != nil && !errors.Is(err, queue.ErrNotFound) {
		return err
	}
	before, _ := strconv.ParseUint(string(b), 10, 64) // 0: there was none
	epoch := max(before+1, uint64(max(time.Now().Unix(), 1)))
	l.reign.Store(epoch)
	_, err = kv.Mark(ctx, "epoch", strconv.AppendUint(nil, epoch, 10)) // also works on a full disk
	return err
}

// openOutside opens the connection over which tasks and requests go to other control planes.
func (l *leading) openOutside() error {
	nc, err := l.u.nats.Connect("owners")
	if err != nil {
		return err
	}
	l.u.onClose(func() error { nc.Close(); return nil })
	l.bus = queue.NewBus(nc)
	l.owners, err = queue.OpenOwners(nc, l.me, func(tag string) { l.u.flow.Nobody(tag) })
	if err != nil {
		return err
	}
	l.u.onClose(func() error { l.owners.Close(); return nil })
	return nil
}

// open begins to take the lease, or leads at once if NATS is inside.
func (l *leading) open(ctx context.Context) error {
	l.u.metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "stagecoach", Subsystem: "control", Name: "leading", Help: "1 while this control plane leads, 0 while it stands by or may not act.",
	}, func() float64 {
		if l.acts() {
			return 1
		}
		return 0
	}))
	if !l.outside() {
		l.active.Store(true)
		stop := l.kube.startObjects()
		l.u.onClose(func() error { stop(); return nil })
		return nil
	}
	nc, err := l.u.nats.Connect("leases")
	if err != nil {
		return err
	}
	l.u.onClose(func() error { nc.Close(); return nil })
	kv, err := queue.OpenKV(ctx, nc, l.u.nats.Disk(), "leases")
	if err != nil {
		return err
	}
	l.keeper, err = lease.Open(ctx, lease.KeeperConfig{Store: ownErrors{kv, lease.ErrNone, lease.ErrConflict}, Me: l.me, Where: l.u.cfg.Node.Name + " at " + l.u.cfg.Listen, Knows: flow.ItemsFeature, Log: l.u.log})
	if err != nil {
		return err
	}
	run, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.standing.Lock()
	l.lease = l.keeper.Lease(controlLease, lease.Options{Changed: l.post, Passive: l.passive})
	l.standing.Unlock()
	l.running.Go(func() { l.run(run) })
	l.u.onClose(l.close)
	l.u.background(l.controls.run)
	return nil
}

// post passes the latest state to run.
func (l *leading) post(s lease.State) {
	select {
	case <-l.states:
	default:
	}
	l.states <- s
}

// close ends the parts of a leader, and releases the lease.
func (l *leading) close() error {
	l.cancel()
	l.running.Wait()
	l.stopAsync()
	l.u.demand.Save() // while the lease is held
	l.ended.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), 2*lease.Beat)
	defer cancel()
	l.keeper.Close(ctx)
	for i := len(l.closers) - 1; i >= 0; i-- {
		l.closers[i]()
	}
	return nil
}

// run follows the lease until ctx ends.
func (l *leading) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-l.states:
			if err := l.follow(ctx, s); err != nil {
				l.deposed <- err
				return
			}
		case err := <-l.controls.resigns:
			if l.leads() {
				l.ended.Store(true)
				l.stopAsync()
				l.deposed <- err
				return
			}
		}
	}
}

// follow acts on a change of the lease.
func (l *leading) follow(ctx context.Context, s lease.State) error {
	switch {
	case s.Holds && !l.leads():
		begun := time.Now()
		err := l.lead(ctx, s.Epoch)
		if errors.Is(err, errNoLease) {
			l.u.log.Warn("this control plane could not take over while it held the lease of control", "epoch", s.Epoch, "error", err)
			return nil // the next state says who holds it
		}
		if err != nil {
			return fmt.Errorf("%w: take over the control of the cluster: %w", errAgain, err)
		}
		l.since = s.Since
		l.u.log.Info("this control plane leads", "epoch", s.Epoch, "took", time.Since(begun))
	case s.Holds && s.Since != l.since: // what was read from the streams may be out of date
		l.ended.Store(true)
		l.stopAsync()
		return fmt.Errorf("%w: another one has led meanwhile, before epoch %d", errAgain, s.Epoch)
	case s.Holds:
		l.reign.Store(s.Epoch)
		l.startAsync()
		l.u.loop.Poke()
	case l.leads() && s.Holder != "" && s.Holder != l.me:
		l.ended.Store(true)
		l.stopAsync()
		return fmt.Errorf("%w: another one has taken over: %s, with epoch %d", errAgain, s.Where, s.Epoch)
	case l.leads():
		l.u.log.Warn("the lease of control could not be renewed in time; nothing is started or stopped until it is", "epoch", s.Epoch)
		l.stopAsync()
	default:
		l.u.log.Info("this control plane stands by", "holder", s.Where, "epoch", s.Epoch)
	}
	l.u.flow.OwnersChanged()
	return nil
}

// lead opens the parts of a leader.
func (l *leading) lead(ctx context.Context, epoch uint64) error {
	u := l.u
	nc, err := u.nats.Connect("journal")
	if err != nil {
		return err
	}
	j, err := takeOverShared(ctx, l, func() (*queue.Journal, error) {
		return queue.OpenJournal(ctx, nc, u.journalConfig(), u.log)
	})
	if err != nil {
		nc.Close()
		return err
	}
	l.closers = append(l.closers, nc.Close)
	if err := u.metrics.Register(queue.NewJournalMetrics(j)); err != nil {
		return err
	}
	l.journal.Store(j)
	l.reign.Store(epoch)
	l.changes.Lock()
	l.active.Store(true)
	for _, f := range u.registry.Functions() {
		if err := u.lines.Ensure(lineOf(f, u.kinds.of(f.Key))); err != nil {
			u.log.Error("function has no line", "function", f.Key, "error", err)
		}
	}
	l.changes.Unlock()
	if err := u.joinNodes(); err != nil {
		return err
	}
	stop, err := serveAuthority(u)
	if err != nil {
		return err
	}
	l.closers = append(l.closers, stop)
	if stop, err = l.forward.serve(l.me); err != nil {
		return err
	}
	l.closers = append(l.closers, stop)
	run, cancel := context.WithCancel(context.Background())
	var loop sync.WaitGroup
	loop.Go(func() {
		u.nodes.await(run)
		_ = u.loop.Run(run) // ends with its context
	})
	l.closers = append(l.closers, func() { cancel(); loop.Wait() }, l.kube.startObjects())
	l.startAsync()
	return nil
}

// front returns a handler that forwards some requests while another control plane leads.
func (l *leading) front(h http.Handler) http.Handler {
	if !l.outside() {
		return h
	}
	l.forward = &forwarder{Handler: h, leads: l.leads, holder: func() string { return l.Owner("") }, bus: l.bus, most: l.owners.Most(), log: l.u.log, why: l.why}
	return l.forward
}

// hasLine reports whether tasks for a function can be sent: to its line in this process, or to the
// control plane that leads.
func (l *leading) hasLine(key pipeline.Key) bool {
	return l.outside() && !l.leads() || l.u.lines.Owns(key)
}

// startAsync begins to work on async requests, unless it has begun already.
func (l *leading) startAsync() {
	if l.async != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = l.u.async(ctx) }) // has no errors
	l.async = func() { cancel(); work.Wait() }
}

// stopAsync stops the work on async requests. The interrupted ones run again, here or elsewhere.
func (l *leading) stopAsync() {
	if l.async != nil {
		l.async()
		l.async = nil
	}
}

// openJournal opens the journal of a process with NATS inside.
func (l *leading) openJournal(ctx context.Context) error {
	nc, err := l.u.nats.Connect("journal")
	if err != nil {
		return err
	}
	l.u.onClose(func() error { nc.Close(); return nil })
	j, err := queue.OpenJournal(ctx, nc, l.u.journalConfig(), l.u.log)
	if err != nil {
		return err
	}
	l.journal.Store(j)
	return l.u.metrics.Register(queue.NewJournalMetrics(j))
}

// heldObserver observes while this process holds the lease. So the loop makes no plans without it.
type heldObserver struct {
	control.Observer
	epoch func() (uint64, error)
}

// Observe implements control.Observer.
func (o heldObserver) Observe(ctx context.Context) (plan.Snapshot, error) {
	if _, err := o.epoch(); err != nil {
		return plan.Snapshot{}, err
	}
	return o.Observer.Observe(ctx)
}

// leadersStore writes what was learned only while this process leads and may act, so that control
// planes do not overwrite each other's. What a process that stands by has learned stays in memory.
type leadersStore struct {
	learn.Store
	leads func() bool
	epoch func() (uint64, error)
}

// Put implements learn.Store.
func (s leadersStore) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	if !s.leads() {
		return 0, nil
	}
	if _, err := s.epoch(); err != nil {
		return 0, err // the next save tries again
	}
	return s.Store.Put(ctx, key, value)
}

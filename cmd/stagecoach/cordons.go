package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/control/machines"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// cordonBucket is the bucket of NATS with the records of nodes that take no new replicas.
const cordonBucket = "cordons"

// machineBucket is the bucket of NATS with the records of machines that take no new work.
const machineBucket = "machines"

// cordonVersion is that of records. A record of another version closes its node.
const cordonVersion = 1

// cordon is the record of a node that takes no new replicas.
type cordon struct {
	V              int       `json:"v"`
	Draining       bool      `json:"draining,omitempty"` // its replicas go elsewhere
	KeepParameters bool      `json:"keepParameters,omitempty"`
	Since          time.Time `json:"since"`

	unknown string // why the record could not be read; empty: it could
	// What its machine is closed for, with the name of the machine. The record is then Draining, and
	// an operator may have stored none.
	machine, cause string
}

// closes returns what the record means for plans.
func (c cordon) closes() cluster.Cordon {
	switch {
	case c.unknown != "":
		return cluster.Cordon{Cause: c.unknown}
	case c.Draining:
		return cluster.Cordon{Cause: "an operator drains it", Moving: true}
	}
	return cluster.Cordon{Cause: "it is cordoned"}
}

// cordons are the nodes that take no new replicas. Their records are in NATS, so they survive
// restarts of this process and of daemons. Every change comes through the bucket's watch, so other
// processes may change it, too.
type cordons struct {
	kv       *queue.KV
	machines *machines.Machines // nil: machines are not followed
	closed   cluster.Cordons
	log      *slog.Logger

	mu      sync.Mutex
	by      map[string]cordon
	changed func()
	next    chan struct{} // closed and replaced with each change
}

// openCordons reads the records, and follows them until stop is called. If follow is set, it does
// the same with the records of machines.
func openCordons(ctx context.Context, nats queue.Broker, follow bool, log *slog.Logger) (c *cordons, stop func(), err error) {
	nc, err := nats.Connect("cordons")
	if err != nil {
		return nil, nil, err
	}
	c = &cordons{changed: func() {}, log: log, by: map[string]cordon{}, next: make(chan struct{})}
	var unwatch func()
	if c.kv, err = queue.OpenKV(ctx, nc, nats.Disk(), cordonBucket); err == nil {
		unwatch, err = c.kv.Watch(context.WithoutCancel(ctx), c.apply)
	}
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	stop = func() { unwatch(); nc.Close() }
	if !follow {
		return c, stop, nil
	}
	unfollow, err := c.followMachines(ctx, nats)
	if err != nil {
		stop()
		return nil, nil, err
	}
	return c, func() { unfollow(); stop() }, nil
}

// tell has f called after each change. It must not block.
func (c *cordons) tell(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed = f
}

// followMachines also closes nodes whose machines take no new work, until stop is called.
func (c *cordons) followMachines(ctx context.Context, nats queue.Broker) (stop func(), err error) {
	nc, err := nats.Connect("machines")
	if err != nil {
		return nil, err
	}
	var unwatch func()
	kv, err := queue.OpenKV(ctx, nc, nats.Disk(), machineBucket)
	if err == nil {
		c.machines, unwatch, err = machines.Open(ctx, kv, c.poke, c.log)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	c.closed.Machines = func(node string) (cluster.Cordon, bool) {
		_, r, closed := c.machines.Of(node)
		return cluster.Cordon{Cause: r.Cause, Moving: true}, closed
	}
	return func() { unwatch(); nc.Close() }, nil
}

// poke tells that a machine has changed.
func (c *cordons) poke() {
	c.mu.Lock()
	changed := c.changed
	c.mu.Unlock()
	changed()
}

// apply takes a change of the bucket.
func (c *cordons) apply(e queue.Entry) {
	c.mu.Lock()
	if e.Deleted {
		delete(c.by, e.Key)
		c.closed.Lift(e.Key)
	} else {
		record := decodeCordon(e.Value)
		if record.unknown != "" {
			c.log.Error("a node takes no replicas, because its record cannot be read; `stagecoach node uncordon` removes the record", "node", e.Key, "error", record.unknown)
		}
		c.by[e.Key] = record
		c.closed.Set(e.Key, record.closes())
	}
	close(c.next)
	c.next = make(chan struct{})
	changed := c.changed
	c.mu.Unlock()
	changed()
}

func decodeCordon(b []byte) cordon {
	var record cordon
	if err := json.Unmarshal(b, &record); err != nil {
		return cordon{unknown: fmt.Sprintf("its record of %d bytes is no JSON object: %v", len(b), err)}
	}
	if record.V != cordonVersion {
		return cordon{unknown: fmt.Sprintf("its record has version %d, want %d: run the same release of stagecoach everywhere", record.V, cordonVersion)}
	}
	return record
}

// of returns how a node is closed: by the record of an operator, by its machine, or by both.
func (c *cordons) of(node string) (cordon, bool) {
	if c == nil {
		return cordon{}, false
	}
	record, ok := c.stored(node)
	machine, r, closed := c.machines.Of(node)
	if !closed {
		return record, ok
	}
	if !ok {
		record.Since = r.Since
	}
	record.Draining, record.machine, record.cause = true, machine, r.Cause
	return record, true
}

// stored returns a node's record, if an operator has stored one.
func (c *cordons) stored(node string) (cordon, bool) {
	if c == nil {
		return cordon{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	record, ok := c.by[node]
	return record, ok
}

// all returns the records of operators, by node.
func (c *cordons) all() map[string]cordon {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.by)
}

// any reports whether any node is closed.
func (c *cordons) any() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.by) > 0 || c.machines.Any()
}

// set stores a record, unless the node has one that means the same. It returns when the record
// holds.
func (c *cordons) set(ctx context.Context, node string, record cordon) error {
	same := func() bool {
		is, ok := c.stored(node)
		return ok && is.Draining == record.Draining && is.KeepParameters == record.KeepParameters && is.unknown == ""
	}
	if same() {
		return nil
	}
	record.V, record.Since = cordonVersion, time.Now().UTC()
	b, err := json.Marshal(record)
	if err == nil {
		_, err = c.kv.Mark(ctx, node, b) // also works on a full disk
	}
	if err != nil {
		return fmt.Errorf("node %q: %w", node, err)
	}
	return c.await(ctx, node, same)
}

// lift removes a node's record. It returns when the node takes replicas again.
func (c *cordons) lift(ctx context.Context, node string) error {
	gone := func() bool { _, ok := c.stored(node); return !ok }
	if gone() {
		return nil
	}
	if err := c.kv.Delete(ctx, node); err != nil {
		return fmt.Errorf("node %q: %w", node, err)
	}
	return c.await(ctx, node, gone)
}

// await waits until the watch has shown a change.
func (c *cordons) await(ctx context.Context, node string, done func() bool) error {
	for {
		c.mu.Lock()
		next := c.next
		c.mu.Unlock()
		if done() {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return fmt.Errorf("node %q: its record is stored, but it does not hold yet: %w", node, context.Cause(ctx))
		}
	}
}

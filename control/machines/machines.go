// Package machines knows which machines of Kubernetes take no new work, so that the nodes on them
// are drained. The control plane that leads asks the API server, and keeps a record per such
// machine in NATS KV. So the next leader knows them even if it does not reach the API server.
package machines

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// Version is that of records. A record of another version closes its machine.
const Version = 1

// Record says that a machine takes no new work.
type Record struct {
	V     int       `json:"v"`
	Cause string    `json:"cause"`
	Since time.Time `json:"since"`
}

// Store has the records, by machine. *queue.KV implements it.
type Store interface {
	Mark(ctx context.Context, key string, value []byte) (rev uint64, err error)
	Delete(ctx context.Context, key string) error
	Watch(ctx context.Context, f func(queue.Entry)) (stop func(), err error)
}

// Machines are the machines that take no new work. Every change comes through the store's watch, so
// all control planes know the same.
type Machines struct {
	store   Store
	changed func()
	log     *slog.Logger

	mu   sync.Mutex
	by   map[string]Record
	news chan struct{} // closed by the next change
}

// Open reads the records, and follows them until stop is called. changed is called after each
// change. It must not block.
func Open(ctx context.Context, store Store, changed func(), log *slog.Logger) (m *Machines, stop func(), err error) {
	m = &Machines{store: store, changed: changed, log: log, by: map[string]Record{}, news: make(chan struct{})}
	if stop, err = store.Watch(context.WithoutCancel(ctx), m.apply); err != nil {
		return nil, nil, err
	}
	return m, stop, nil
}

// apply takes a change of a record.
func (m *Machines) apply(e queue.Entry) {
	m.mu.Lock()
	if e.Deleted {
		delete(m.by, e.Key)
	} else {
		m.by[e.Key] = decode(e.Value)
	}
	close(m.news)
	m.news = make(chan struct{})
	m.mu.Unlock()
	m.changed()
}

func decode(b []byte) Record {
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return Record{Cause: fmt.Sprintf("the record of its machine, of %d bytes, is no JSON object: %v", len(b), err)}
	}
	if r.V != Version {
		return Record{Cause: fmt.Sprintf("the record of its machine has version %d, want %d: run the same release of stagecoach everywhere", r.V, Version)}
	}
	return r
}

// Of returns the machine of a node, and its record, if the machine takes no new work. A nil
// *Machines knows no machine.
func (m *Machines) Of(node string) (machine string, r Record, closed bool) {
	machine = machineOf(node)
	if m == nil || machine == "" {
		return "", Record{}, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r, closed = m.by[machine]
	return machine, r, closed
}

// suffix is the length of what the name of a node in a pod has after its machine's name: a hyphen
// and five characters.
const suffix = 6

// machineOf returns the machine of a node, or "" if the node's name is not that of a node in a pod.
func machineOf(node string) string {
	at := len(node) - suffix
	if at < 1 || node[at] != '-' {
		return ""
	}
	for _, c := range []byte(node[at+1:]) {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return ""
		}
	}
	return node[:at]
}

// Any reports whether any machine takes no new work.
func (m *Machines) Any() bool {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.by) > 0
}

// set makes the records those of the machines in want, with their causes. It returns when the watch
// has shown all changes, so that the next call knows them.
func (m *Machines) set(ctx context.Context, want map[string]string) error {
	m.mu.Lock()
	have := maps.Clone(m.by)
	m.mu.Unlock()
	for _, machine := range slices.Sorted(maps.Keys(want)) {
		if have[machine].says(want[machine]) {
			continue
		}
		b, err := json.Marshal(Record{V: Version, Cause: want[machine], Since: time.Now().UTC()})
		if err == nil {
			_, err = m.store.Mark(ctx, machine, b) // also works on a full disk
		}
		if err != nil {
			return fmt.Errorf("machine %q: %w", machine, err)
		}
		m.log.Info("the nodes of a machine are drained", "machine", machine, "cause", want[machine])
	}
	for _, machine := range slices.Sorted(maps.Keys(have)) {
		if _, closed := want[machine]; closed {
			continue
		}
		if err := m.store.Delete(ctx, machine); err != nil {
			return fmt.Errorf("machine %q: %w", machine, err)
		}
		m.log.Info("the nodes of a machine take new replicas", "machine", machine)
	}
	return m.await(ctx, want)
}

// says reports whether a record has this cause. The zero Record has none.
func (r Record) says(cause string) bool { return r.V == Version && r.Cause == cause }

// shown bounds how long a change of a record takes until the watch shows it.
const shown = 10 * time.Second

// await waits until the records are those of the machines in want.
func (m *Machines) await(ctx context.Context, want map[string]string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, shown, fmt.Errorf("the watch of the records has not shown a change within %v", shown))
	defer cancel()
	for {
		m.mu.Lock()
		same := maps.EqualFunc(m.by, want, Record.says)
		news := m.news
		m.mu.Unlock()
		if same {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// again is how long Follow waits after a source has ended, or has failed.
const again = time.Second

// A Source tells f which machines take no new work, and why, until ctx ends or it fails. It ends
// with an error of f. After any end, Follow calls it again.
type Source func(ctx context.Context, f func(closed map[string]string) error) error

// Follow keeps the records as source says, until ctx ends. While source fails, the records stay.
func (m *Machines) Follow(ctx context.Context, source Source) {
	logged := ""
	for ctx.Err() == nil {
		cause := ""
		err := source(ctx, func(closed map[string]string) error {
			err := m.set(ctx, closed)
			if err == nil {
				logged = ""
			}
			return err
		})
		if err != nil {
			cause = err.Error()
		}
		if cause != "" && cause != logged && ctx.Err() == nil {
			m.log.Error("cannot watch the machines of Kubernetes: cordoned ones are not drained, and drained ones stay drained; retrying", "error", cause)
			logged = cause
		}
		select {
		case <-ctx.Done():
		case <-time.After(again):
		}
	}
}

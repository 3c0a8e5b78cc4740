// Package copies keeps the secrets of several control planes alike, so that each of them can lead.
//
// A list that all control planes share has the name, the version and a keyed hash of each secret,
// and no value. Values travel between control planes alone, over connections that the caller
// secures. A control plane that lacks the listed version of a secret asks the others for it.
package copies

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/keylock"
)

// Entry is a change of a [List].
type Entry = struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// Errors of a [List].
var (
	ErrConflict = errors.New("copies: the record has another revision")
	ErrNone     = errors.New("copies: no record")
)

// List is the list of secrets. queue.KV is one, with an adapter for its errors.
type List interface {
	// Get returns a record and its revision. The error wraps ErrNone if there is none.
	Get(ctx context.Context, key string) ([]byte, uint64, error)
	// Replace stores a record if the key has revision rev, or none if rev is 0. Otherwise the error
	// wraps ErrConflict.
	Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error)
	// Watch calls f with all records and then with each change, until stop is called. It returns once
	// f has seen all records.
	Watch(ctx context.Context, f func(Entry)) (stop func(), err error)
}

// Store holds values. secret.Store is one.
type Store interface {
	// All returns the names of the secrets of each namespace.
	All() (map[string][]string, error)
	Read(namespace, name string) ([]byte, error)
	Put(namespace, name string, value []byte) error
	Delete(namespace, name string) error
}

// Peer is another control plane that is alive.
type Peer struct{ Name, Address string }

// Config configures Copies. All fields are required.
type Config struct {
	Store Store
	File  string // that keeps the versions of the values in Store
	List  List
	// Key is a secret of all control planes. It keeps those who can read the list from guessing
	// values.
	Key   []byte
	Peers func() []Peer
	// Dial opens a connection to a peer. Both sides have proved that they are control planes.
	Dial func(ctx context.Context, p Peer) (net.Conn, error)
	// Stored is called after this process has stored a value of another control plane. It is also
	// called after a change of this process is listed, if the first attempt to list it has failed.
	Stored func(namespace, name string)
	// Leads reports whether this process leads now.
	Leads func() bool
	// Changed is called when the set of lacking secrets changes, once after the other. It gets
	// their names, sorted.
	Changed func(lacking []string)
	Log     *slog.Logger

	patience time.Duration // how long another control plane may take for a value; 0: askTimeout
}

// record is the stored form of an entry of the list.
type record struct {
	V       int    `json:"v"` // 1
	Version uint64 `json:"version"`
	Sum     string `json:"sum,omitempty"`
	Deleted bool   `json:"deleted,omitempty"`

	revision uint64
}

// held is a value in the store of this process.
type held struct {
	version uint64 // 0: it came before there was a list, or by hand
	sum     string
}

// Copies keeps the secrets of this process as the list has them. Its methods are safe for
// concurrent use.
type Copies struct {
	exchange

	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	unsee  func() // ends the watch
	wake   chan struct{}

	// order has a lock per secret, by namespace/name. The lock is held while this process changes the
	// secret on all control planes, which may take seconds. It is locked before changing.
	order    keylock.Locks
	slots    chan struct{} // full while mostChanges values are sent to others
	changing sync.Mutex    // held while values change on the disk; locked before mu

	mu     sync.Mutex
	listed map[string]record // by namespace/name
	held   map[string]held   // by namespace/name
	said   []string          // what Changed was told
	tries  map[string]string // why a secret did not come, by name, as it was logged
}

// Times of the exchange.
const (
	lookEvery   = 2 * time.Second  // between two looks at what is lacking
	askTimeout  = 5 * time.Second  // of one value
	listTimeout = 10 * time.Second // of a change of the list
)

// mostChanges bounds how many values are sent to other control planes at the same time.
const mostChanges = 32

// Open reads the list, and begins to get what this process lacks. It lists the secrets of this
// process that the list does not know, which are from before there was a list.
func Open(ctx context.Context, cfg Config) (*Copies, error) {
	c := &Copies{
		exchange: exchange{cfg.Peers, cfg.Dial, cfg.Log, cmp.Or(cfg.patience, askTimeout)}, cfg: cfg, wake: make(chan struct{}, 1), slots: make(chan struct{}, mostChanges),
		listed: map[string]record{}, held: map[string]held{}, tries: map[string]string{},
	}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := c.load(); err != nil {
		return nil, fmt.Errorf("copies of secrets: %w", err)
	}
	var err error
	if c.unsee, err = cfg.List.Watch(c.ctx, c.watched); err != nil {
		return nil, fmt.Errorf("copies of secrets: %w", err)
	}
	if _, err := c.list(ctx, c.order.Lock, func(_ held, r record) bool { return r.V == 0 }); err != nil {
		c.unsee()
		return nil, fmt.Errorf("copies of secrets: %w", err)
	}
	c.look()
	c.group.Go(c.run)
	return c, nil
}

// Close ends the exchange. The values stay.
func (c *Copies) Close() {
	c.cancel()
	c.unsee()
	c.group.Wait()
}

// load reads the values of this process.
func (c *Copies) load() error {
	versions, err := readVersions(c.cfg.File)
	if err != nil {
		return err
	}
	all, err := c.cfg.Store.All()
	if err != nil {
		return err
	}
	for namespace, names := range all {
		for _, name := range names {
			value, err := c.cfg.Store.Read(namespace, name)
			if err != nil {
				return err
			}
			key := namespace + "/" + name
			c.held[key] = held{versions[key], keyedHash(c.cfg.Key, key, value)}
		}
	}
	return nil
}

// keyedHash returns the hash of a secret's value, with a key that no reader of the list has.
func keyedHash(with []byte, key string, value []byte) string {
	h := hmac.New(sha256.New, with)
	h.Write([]byte(key + "\n"))
	h.Write(value)
	return hex.EncodeToString(h.Sum(nil))
}

// watched takes a change of the list.
func (c *Copies) watched(e Entry) {
	r, err := decode(e.Value)
	if e.Deleted {
		r, err = record{}, nil
	}
	if err != nil {
		c.cfg.Log.Error("list of secrets: a record cannot be read", "secret", e.Key, "error", err)
		return
	}
	r.revision = e.Revision
	c.mu.Lock()
	if e.Deleted {
		delete(c.listed, e.Key)
	} else {
		c.listed[e.Key] = r
	}
	c.mu.Unlock()
	c.Poke()
}

func decode(b []byte) (record, error) {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, fmt.Errorf("record of %d bytes: %w", len(b), err)
	}
	if r.V != 1 {
		return record{}, fmt.Errorf("record of version %d, want 1: run the same release of stagecoach everywhere", r.V)
	}
	return r, nil
}

// Poke starts a look for what is lacking soon, for example because another control plane has come.
func (c *Copies) Poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// lacks reports whether this process lacks the listed value. The caller holds c.mu. A value of a
// later version counts as well: its change was under way when the leader ended.
func (c *Copies) lacks(key string, r record) bool {
	is, there := c.held[key]
	return !r.Deleted && !(there && (is.sum == r.Sum || is.version > r.Version))
}

// Lacking returns the secrets that this process lacks, as namespace/name, sorted.
func (c *Copies) Lacking() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lacking()
}

func (c *Copies) lacking() (out []string) {
	for key, r := range c.listed {
		if c.lacks(key, r) {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}

// run gets what is lacking until Close.
func (c *Copies) run() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var failed string // as it was logged
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.wake:
		case <-tick.C:
		}
		c.drop()
		failed = c.again(failed)
		lacking := c.look()
		for _, key := range lacking {
			if c.ctx.Err() != nil {
				return
			}
			c.get(key)
		}
		if len(lacking) > 0 {
			c.look()
		}
	}
}

// look tells Changed what is lacking, if that has changed.
func (c *Copies) look() []string {
	c.mu.Lock()
	now := c.lacking()
	changed := !slices.Equal(now, c.said)
	c.said = now
	c.mu.Unlock()
	if changed {
		c.cfg.Changed(now)
	}
	return now
}

// drop deletes the values that were deleted from the list.
func (c *Copies) drop() {
	c.changing.Lock()
	defer c.changing.Unlock()
	c.mu.Lock()
	var gone []string
	for key, is := range c.held {
		if r, known := c.listed[key]; known && r.Deleted && is.version <= r.Version {
			gone = append(gone, key)
		}
	}
	c.mu.Unlock()
	for _, key := range gone {
		if err := c.remove(key); err != nil {
			c.cfg.Log.Warn("a secret that was deleted elsewhere is left", "secret", key, "error", err)
		}
	}
}

// get asks the other control planes for a value.
func (c *Copies) get(key string) {
	c.mu.Lock()
	want := c.listed[key]
	c.mu.Unlock()
	err := errors.New("no other control plane is alive")
	for _, p := range c.cfg.Peers() {
		var value []byte
		var version uint64
		if value, version, err = c.ask(c.ctx, p, key); err == nil {
			err = c.take(key, value, version, want)
		}
		if err == nil {
			break
		}
		err = fmt.Errorf("control plane %q: %w", p.Name, err)
	}
	c.mu.Lock()
	said := c.tries[key]
	if delete(c.tries, key); err != nil {
		c.tries[key] = err.Error()
	}
	c.mu.Unlock()
	if err != nil && err.Error() != said && c.ctx.Err() == nil {
		c.cfg.Log.Warn("this control plane lacks a secret, and tries again", "secret", key, "error", err)
	}
}

// take stores a value that another control plane has sent.
func (c *Copies) take(key string, value []byte, version uint64, want record) error {
	if sum := keyedHash(c.cfg.Key, key, value); sum != want.Sum && version <= want.Version {
		return fmt.Errorf("it has version %d with other content than version %d in the list", version, want.Version)
	}
	if version < want.Version {
		version = want.Version // the same content
	}
	stored, err := c.put(key, value, func(held uint64) uint64 {
		if held > version {
			return 0 // it has come meanwhile
		}
		return version
	})
	if stored > 0 {
		c.cfg.Stored(split(key))
	}
	return err
}

func split(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}

// put stores a value in this process. next returns the version of the value, given the version that
// this process has. If next returns 0, nothing is stored.
//
// The version is stored first. If this process ends before it stores the value, it has the earlier
// value with a later version than the list has. So it can lead, and lists that value. In the other
// order, it would have another value than the list, with the same version: it could not lead, and
// perhaps nobody could.
func (c *Copies) put(key string, value []byte, next func(held uint64) uint64) (version uint64, err error) {
	namespace, name := split(key)
	c.changing.Lock()
	defer c.changing.Unlock()
	c.mu.Lock()
	version = next(c.held[key].version)
	c.mu.Unlock()
	if version == 0 {
		return 0, nil
	}
	if err := c.save(key, version); err != nil {
		return 0, err
	}
	if err := c.cfg.Store.Put(namespace, name, value); err != nil {
		return 0, errors.Join(err, c.save("", 0))
	}
	c.mu.Lock()
	c.held[key] = held{version, keyedHash(c.cfg.Key, key, value)}
	c.mu.Unlock()
	return version, nil
}

// remove deletes a value of this process. The caller holds c.changing.
func (c *Copies) remove(key string) error {
	if err := c.cfg.Store.Delete(split(key)); err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.held, key)
	c.mu.Unlock()
	return c.save("", 0)
}

// save writes the versions, with this one of the key unless the key is empty. The caller holds
// c.changing.
func (c *Copies) save(key string, version uint64) error {
	c.mu.Lock()
	versions := map[string]uint64{}
	for key, is := range c.held {
		versions[key] = is.version
	}
	c.mu.Unlock()
	if key != "" {
		versions[key] = version
	}
	return writeVersions(c.cfg.File, versions)
}

// Put stores a value here and on the other control planes that are alive, and lists it. Only the
// leader may call it. It returns how many other control planes have the value, and how many are
// alive. A control plane that did not take the value asks for it later. Changes of one secret
// happen one after another, and changes of different secrets do not wait for each other.
func (c *Copies) Put(ctx context.Context, namespace, name string, value []byte) (have, alive int, err error) {
	key := namespace + "/" + name
	unlock, err := c.order.Lock(ctx, key)
	if err != nil {
		return 0, 0, fmt.Errorf("secret %q of %q: an earlier change is still running: %w", name, namespace, err)
	}
	defer unlock()
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return 0, 0, fmt.Errorf("secret %q of %q: %d changes of other secrets are still running: %w", name, namespace, mostChanges, ctx.Err())
	}
	r, err := latest(ctx, c.cfg.List, key)
	if err != nil {
		return 0, 0, err
	}
	if r.Version, err = c.put(key, value, func(held uint64) uint64 { return max(r.Version, held) + 1 }); err != nil {
		return 0, 0, err
	}
	have, alive = c.push(ctx, key, value, r.Version)
	r.V, r.Sum, r.Deleted = 1, keyedHash(c.cfg.Key, key, value), false
	if err := c.write(ctx, key, r); err != nil {
		return have, alive, fmt.Errorf("secret %q of %q is stored, but not yet in the list of all control planes: %w", name, namespace, err)
	}
	return have, alive, nil
}

// Delete deletes a secret on all control planes. Only the leader may call it.
func (c *Copies) Delete(ctx context.Context, namespace, name string) error {
	key := namespace + "/" + name
	unlock, err := c.order.Lock(ctx, key)
	if err != nil {
		return fmt.Errorf("secret %q of %q: an earlier change is still running: %w", name, namespace, err)
	}
	defer unlock()
	r, err := latest(ctx, c.cfg.List, key)
	if err != nil {
		return err
	}
	c.mu.Lock()
	r.Version = max(r.Version, c.held[key].version) + 1
	c.mu.Unlock()
	// The record stays, so that a control plane that is away deletes its copy when it is back.
	r.V, r.Sum, r.Deleted = 1, "", true
	if err := c.write(ctx, key, r); err != nil {
		return fmt.Errorf("secret %q of %q is not deleted: %w", name, namespace, err)
	}
	c.changing.Lock()
	defer c.changing.Unlock()
	c.mu.Lock()
	again := c.held[key].version > r.Version // another control plane has created it again
	c.mu.Unlock()
	if again {
		return nil
	}
	return c.remove(key)
}

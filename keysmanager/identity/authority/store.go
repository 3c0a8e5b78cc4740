package authority

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Errors of a [Store].
var (
	ErrConflict = errors.New("authority: another control plane has changed the state")
	ErrNone     = errors.New("authority: nothing is stored")
)

// Store keeps values that several control planes share. A key has a revision, which grows with each
// change.
type Store interface {
	// Get returns a value and its revision, or ErrNone.
	Get(ctx context.Context, key string) (value []byte, revision uint64, err error)
	// Replace stores a value if the key still has a revision; 0: no value. Otherwise it returns
	// ErrConflict. After any other error, the value may be stored, now or soon.
	Replace(ctx context.Context, key string, value []byte, revision uint64) (uint64, error)
	// Watch calls f with each value and then with each change, until stop is called.
	Watch(ctx context.Context, f func(Entry)) (stop func(), err error)
}

// Entry is a change of a key.
type Entry = struct {
	Key      string
	Value    []byte // empty if Deleted
	Revision uint64
	Deleted  bool
}

// Shared makes several control planes one authority.
type Shared struct {
	Key   ClusterKey
	Store Store
}

// stateStore keeps the text of a state.
type stateStore interface {
	// load returns the text and its revision. The text is empty if nothing is stored.
	load() (b []byte, revision uint64, err error)
	// save replaces the text if its revision is still the given one. Otherwise it returns
	// ErrConflict.
	save(b []byte, revision uint64) (uint64, error)
}

// stateFile is a file that only this process writes.
type stateFile string

func (f stateFile) load() ([]byte, uint64, error) {
	b, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return b, 0, err
}

func (f stateFile) save(b []byte, revision uint64) (uint64, error) {
	return revision + 1, identity.WriteSecret(string(f), b)
}

// stateKey is the key of the state in a [Store].
const stateKey = "state"

// storeTimeout bounds a question to a [Store].
const storeTimeout = 5 * time.Second

// sealed is a state in a Store. It is encrypted, so that whoever reads or writes the store without
// the cluster key can neither see it nor make one.
type sealed struct{ Shared }

// String implements fmt.Stringer.
func (*sealed) String() string { return "the stored list of who may join" }

func (s *sealed) load() ([]byte, uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	b, revision, err := s.Store.Get(ctx, stateKey)
	if errors.Is(err, ErrNone) {
		return nil, 0, nil
	}
	if err == nil {
		b, err = s.Key.Unseal(stateKey, b)
	}
	return b, revision, err
}

func (s *sealed) save(b []byte, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	return s.Store.Replace(ctx, stateKey, s.Key.Seal(stateKey, b), revision)
}

// follow follows the changes of other control planes. If nothing is stored, it stores a state, so
// that a control plane with another key is refused.
func (a *Authority) follow() error {
	if a.revision == 0 {
		a.mu.Lock()
		err := a.change(func(*state) error { return nil })
		a.mu.Unlock()
		if err != nil {
			return err
		}
	}
	stop, err := a.cfg.Shared.Store.Watch(context.Background(), a.changed)
	if err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	a.stop = stop
	return nil
}

// changed takes over a state that is stored.
func (a *Authority) changed(e Entry) {
	if e.Key != stateKey || e.Deleted {
		return
	}
	a.mu.Lock()
	known := e.Revision <= a.revision // its own change, or one that it has read
	a.mu.Unlock()
	var s state
	if !known {
		b, err := a.cfg.Shared.Key.Unseal(stateKey, e.Value)
		if err == nil {
			s, err = decodeState(b)
		}
		if err != nil {
			a.cfg.Log.Error("a change of who may join cannot be read; this control plane goes on with what it knows", "error", err)
			return
		}
	}
	a.mu.Lock()
	if !known && e.Revision > a.revision {
		a.state, a.revision = s, e.Revision
	}
	revoked, same := a.state.Revoked, maps.Equal(a.followed, a.state.Users)
	a.followed = a.state.Users
	cut := a.cut
	a.mu.Unlock()
	a.source.Revoke(revoked)
	if cut != nil && !same {
		a.cuts.Go(func() {
			if err := cut(a.RevokedUsers()); err != nil {
				a.cfg.Log.Error("failed to cut off revoked nodes", "error", err)
			}
		})
	}
}

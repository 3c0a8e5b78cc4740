package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Get asks at most mostGets times, with pauses of getPause.
const (
	mostGets = 5
	getPause = 250 * time.Millisecond
)

// KV is a bucket of small values on disk. Its users watch it and derive their state from it.
type KV struct {
	kv   jetstream.KeyValue
	disk *Disk
}

// Entry is one change of a key. It is an alias, so that a KV is a store of package provider without
// an adapter.
type Entry = struct {
	Key      string
	Value    []byte // empty if Deleted
	Revision uint64 // grows with every change of the bucket
	Deleted  bool
}

// OpenKV opens the bucket. It creates the bucket if it does not exist. d is the disk of the server
// that nc is connected to.
func OpenKV(ctx context.Context, nc *nats.Conn, d *Disk, bucket string) (*KV, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("bucket %q: %w", bucket, err)
	}
	copies, err := d.copies(ctx, js, "KV_"+bucket)
	if err != nil {
		return nil, fmt.Errorf("bucket %q: %w", bucket, err)
	}
	kv, err := js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: bucket, History: 1, Storage: jetstream.FileStorage, Replicas: copies})
	if err != nil {
		return nil, fmt.Errorf("bucket %q: %w", bucket, err)
	}
	return &KV{kv: kv, disk: d}, nil
}

// Put stores value and returns its revision. On a full disk it fails at once, and the error names
// the disk.
func (k *KV) Put(ctx context.Context, key string, value []byte) (rev uint64, err error) {
	if err = k.disk.room(int64(len(value)), changeRoom); err == nil {
		err = k.disk.writing(ctx, func(ctx context.Context) (err error) {
			rev, err = k.kv.Put(ctx, Token(key), value)
			return err
		})
	}
	if err != nil {
		return 0, fmt.Errorf("put %q: %w", key, err)
	}
	return rev, nil
}

// ErrConflict means that a key has another revision than was expected.
var ErrConflict = errors.New("queue: the key was changed by someone else")

// wrongSequence reports whether a write was refused because it expected another revision. Streams
// with several copies have a code of their own for it, while another write is under way.
func wrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// Replace stores value if the key still has revision rev; 0: if it has no value. Otherwise it
// returns ErrConflict. It waits for the answer until ctx ends. After any other error, the value may
// be stored, now or soon.
func (k *KV) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	var err error
	if rev == 0 {
		rev, err = k.kv.Create(ctx, Token(key), value)
	} else {
		rev, err = k.kv.Update(ctx, Token(key), value, rev)
	}
	if errors.Is(err, jetstream.ErrKeyExists) || wrongSequence(err) {
		return 0, fmt.Errorf("replace %q: %w", key, ErrConflict)
	}
	if err != nil {
		return 0, fmt.Errorf("replace %q: %w", key, k.disk.explain(err))
	}
	return rev, nil
}

// Get returns the value and its revision, or ErrNotFound. If no server answers, Get asks again for
// about a second. The servers may be choosing a leader for the bucket, or a server may not know yet
// which server has the bucket.
func (k *KV) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	e, err := k.kv.Get(ctx, Token(key))
	for tries := 1; errors.Is(err, nats.ErrNoResponders) && tries < mostGets && pause(ctx, getPause); tries++ {
		e, err = k.kv.Get(ctx, Token(key))
	}
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, 0, fmt.Errorf("get %q: %w", key, ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("get %q: %w", key, err)
	}
	return e.Value(), e.Revision(), nil
}

// Delete removes the key. It is no error if the key does not exist. On a full disk, Delete uses the
// reserve.
func (k *KV) Delete(ctx context.Context, key string) error {
	if err := k.retry(ctx, func(ctx context.Context) error { return k.kv.Purge(ctx, Token(key)) }); err != nil {
		return fmt.Errorf("delete %q: %w", key, err)
	}
	return nil
}

// Mark stores a value of a few bytes and returns its revision. On a full disk, it uses the reserve,
// like Delete.
func (k *KV) Mark(ctx context.Context, key string, value []byte) (rev uint64, err error) {
	if err := k.retry(ctx, func(ctx context.Context) (err error) {
		rev, err = k.kv.Put(ctx, Token(key), value)
		return err
	}); err != nil {
		return 0, fmt.Errorf("put %q: %w", key, err)
	}
	return rev, nil
}

// retry runs f, which writes a few bytes, until f succeeds, there is no room, or ctx ends.
func (k *KV) retry(ctx context.Context, f func(context.Context) error) error {
	for {
		if err := k.disk.prepareDeletion(ctx); err != nil {
			return err
		}
		stopped := k.disk.stops()
		err := k.disk.writing(ctx, f)
		if err == nil {
			return nil
		}
		select {
		case <-stopped: // stopped by this write or a concurrent one
		default:
			return err
		}
	}
}

// lagMost bounds how long Watch waits for a copy of a bucket that is behind.
const lagMost = 5 * time.Second

// Watch calls f with every key's latest value and then with every change, until stop is called or
// ctx ends. Calls of f do not overlap. Watch returns once f has seen all values that existed at the
// call. If the copy that Watch reads is behind, Watch waits for these values for up to five
// seconds. When stop returns, f does not run and will not be called again.
func (k *KV) Watch(ctx context.Context, f func(Entry)) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	opened := k.disk.opens()
	latest, err := k.latest(ctx)
	var w jetstream.KeyWatcher
	if err == nil {
		w, err = k.kv.WatchAll(ctx)
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch bucket: %w", err)
	}
	var wg sync.WaitGroup
	synced, ended := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		defer close(ended)
		follow := follower{f: f, synced: synced, latest: latest, lagMost: lagMost}
		for w != nil {
			again := follow.updates(ctx, w.Updates(), opened)
			// Stop fails only if the connection is closed or the streams were opened again. Then there is
			// nothing to stop.
			_ = w.Stop()
			for range w.Updates() {
				continue // drains the channel, so that its sender ends
			}
			if w = nil; again {
				w, opened = k.watchAgain(ctx, follow.ended)
			}
		}
	})
	stop = func() {
		cancel()
		wg.Wait()
	}
	select {
	case <-synced:
		return stop, nil
	case <-ended:
		err := cmp.Or(ctx.Err(), nats.ErrConnectionClosed)
		stop()
		return nil, fmt.Errorf("watch bucket: %w", err)
	}
}

// watchAgain watches a bucket again, after a pause if later is set. It returns nil if ctx has ended
// or the connection is closed.
func (k *KV) watchAgain(ctx context.Context, later bool) (jetstream.KeyWatcher, <-chan struct{}) {
	for {
		if !later {
			opened := k.disk.opens()
			w, err := k.kv.WatchAll(ctx)
			if err == nil {
				return w, opened
			}
			if errors.Is(err, nats.ErrConnectionClosed) { // permanently
				return nil, nil
			}
		}
		later = false
		if !pause(ctx, diskTick) {
			return nil, nil
		}
	}
}

// pause waits for d. It returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// latest returns the revision of the bucket's latest change. The leader of the stream answers.
func (k *KV) latest(ctx context.Context) (uint64, error) {
	s, err := k.kv.Status(ctx)
	if err != nil {
		return 0, err
	}
	b, ok := s.(*jetstream.KeyValueBucketStatus)
	if !ok {
		return 0, fmt.Errorf("status of type %T, want that of JetStream", s)
	}
	return b.StreamInfo().State.LastSeq, nil
}

// follower passes each change of a bucket to f once, even if the bucket is watched again.
type follower struct {
	f       func(Entry)
	seen    uint64        // latest revision seen
	synced  chan struct{} // closed once f has seen all values that existed at the start; then nil
	latest  uint64        // revision of the latest of these values
	lagMost time.Duration // how long to wait for a copy that lacks that value
	ended   bool          // the last watcher ended by itself
}

// updates passes a watcher's changes to f. It returns when ctx ends, when the streams were opened
// again, or when the watcher has ended by itself. In the last two cases, again is true: the bucket
// must be watched again. A watcher ends by itself if it misses heartbeats and its stream does not
// exist, for example while the streams are being opened.
func (f *follower) updates(ctx context.Context, from <-chan jetstream.KeyValueEntry, opened <-chan struct{}) (again bool) {
	f.ended = false
	var late <-chan time.Time // set once the copy has sent all of its values
	for {
		select {
		case <-ctx.Done():
			return false
		case <-opened:
			return true
		case <-late:
			f.latest = 0
			f.sync()
		case e, ok := <-from:
			switch {
			case !ok:
				f.ended = true
				return ctx.Err() == nil
			case e == nil:
				late = time.After(f.lagMost)
				f.sync()
			case e.Revision() > f.seen:
				f.seen = e.Revision()
				if entry, ok := entryOf(e); ok {
					f.f(entry)
				}
				if late != nil {
					f.sync()
				}
			}
		}
	}
}

// sync closes synced if f has seen the latest value that existed at the start.
func (f *follower) sync() {
	if f.synced != nil && f.seen >= f.latest {
		close(f.synced)
		f.synced = nil
	}
}

// entryOf returns a change, or false if this program did not write it.
func entryOf(e jetstream.KeyValueEntry) (Entry, bool) {
	name, err := Name(e.Key())
	if err != nil {
		return Entry{}, false
	}
	out := Entry{Key: name, Revision: e.Revision()}
	if e.Operation() == jetstream.KeyValuePut {
		out.Value = e.Value()
	} else {
		out.Deleted = true
	}
	return out, true
}

package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// KV is a bucket of small values on disk, watched by whoever derives state from it.
type KV struct {
	kv jetstream.KeyValue
}

// Entry is one change of a key.
type Entry struct {
	Key      string
	Value    []byte // empty when Deleted
	Revision uint64 // grows with every change of the bucket
	Deleted  bool
}

// OpenKV opens the bucket, which is made if it does not exist.
func OpenKV(ctx context.Context, nc *nats.Conn, bucket string) (*KV, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("bucket %q: %w", bucket, err)
	}
	kv, err := js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: bucket, History: 1, Storage: jetstream.FileStorage})
	if err != nil {
		return nil, fmt.Errorf("bucket %q: %w", bucket, err)
	}
	return &KV{kv: kv}, nil
}

// Put stores value and returns its revision.
func (k *KV) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	rev, err := k.kv.Put(ctx, Token(key), value)
	if err != nil {
		return 0, fmt.Errorf("put %q: %w", key, err)
	}
	return rev, nil
}

// Get returns the value and its revision, or ErrNotFound.
func (k *KV) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	e, err := k.kv.Get(ctx, Token(key))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, 0, fmt.Errorf("get %q: %w", key, ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("get %q: %w", key, err)
	}
	return e.Value(), e.Revision(), nil
}

// Delete removes the key. Removing what is not there is no error.
func (k *KV) Delete(ctx context.Context, key string) error {
	if err := k.kv.Purge(ctx, Token(key)); err != nil {
		return fmt.Errorf("delete %q: %w", key, err)
	}
	return nil
}

// Watch calls f with every key's latest value and then with every change, one at a time, until stop is called or ctx
// ends. It returns once f has seen all that was there. When stop returns, f is not running and will not be called again.
func (k *KV) Watch(ctx context.Context, f func(Entry)) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	w, err := k.kv.WatchAll(ctx)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch bucket: %w", err)
	}
	var wg sync.WaitGroup
	synced, ended := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		defer close(ended)
		first := true
		for {
			select {
			case <-ctx.Done():
				return
			case e, ok := <-w.Updates():
				switch {
				case !ok:
					return
				case e == nil && first:
					first = false
					close(synced)
				case e != nil:
					deliver(e, f)
				}
			}
		}
	})
	stop = func() {
		_ = w.Stop() // fails only when the connection is gone, and then nothing is left to stop
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

func deliver(e jetstream.KeyValueEntry, f func(Entry)) {
	name, err := Name(e.Key())
	if err != nil {
		return // not written by us
	}
	out := Entry{Key: name, Revision: e.Revision()}
	if e.Operation() == jetstream.KeyValuePut {
		out.Value = e.Value()
	} else {
		out.Deleted = true
	}
	f(out)
}

package queue

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"
)

// watched is a bucket that remembers its last watcher, so that a test can end it.
type watched struct {
	jetstream.KeyValue
	mu      sync.Mutex
	last    jetstream.KeyWatcher
	watches int
}

func (b *watched) WatchAll(ctx context.Context, o ...jetstream.WatchOpt) (jetstream.KeyWatcher, error) {
	w, err := b.KeyValue.WatchAll(ctx, o...)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = w
	b.watches++
	return w, err
}

func (b *watched) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.watches
}

// TestWatchOutlivesItsWatcher checks a watcher that ends because the client cannot create its
// consumer again. The bucket must be watched again, and each change must be seen once.
func TestWatchOutlivesItsWatcher(t *testing.T) {
	nc := start(t, t.TempDir())
	kv, err := OpenKV(t.Context(), nc, diskOf(t, nc), "functions")
	if err != nil {
		t.Fatal(err)
	}
	bucket := &watched{KeyValue: kv.kv}
	kv.kv = bucket
	var mu sync.Mutex
	seen := map[string]int{}
	stop, err := kv.Watch(t.Context(), func(e Entry) {
		mu.Lock()
		defer mu.Unlock()
		seen[string(e.Value)]++
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for i, value := range []string{"a", "b", "c"} {
		if _, err := kv.Put(t.Context(), "key", []byte(value)); err != nil {
			t.Fatal(err)
		}
		until(t, "a change", func() bool { mu.Lock(); defer mu.Unlock(); return seen[value] > 0 })
		bucket.mu.Lock()
		err := bucket.last.Stop()
		bucket.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		until(t, "another watcher", func() bool { return bucket.count() == i+2 })
	}
	mu.Lock()
	if len(seen) != 3 || seen["a"] != 1 || seen["b"] != 1 || seen["c"] != 1 {
		t.Errorf("saw %v, want a, b and c once", seen)
	}
	mu.Unlock()
	nc.Close()
	if _, err := bucket.WatchAll(t.Context()); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Errorf("watch over a closed connection: %v, want the error that ends the watch", err)
	}
}

// TestOtherStreamsWorkIfOneStaysClosed checks that if one stream cannot be opened again, the others
// take writes, as they would after a restart.
func TestOtherStreamsWorkIfOneStaysClosed(t *testing.T) {
	dir := t.TempDir()
	nc := start(t, dir)
	d := diskOf(t, nc)
	kv, err := OpenKV(t.Context(), nc, d, "functions")
	if err != nil {
		t.Fatal(err)
	}
	streams, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams"))
	if err != nil || len(streams) != 1 {
		t.Fatalf("folders of streams %v, %v, want one", streams, err)
	}
	// Looks like a stream whose files are lost.
	if err := os.Mkdir(filepath.Join(streams[0], "BROKEN"), 0o700); err != nil {
		t.Fatal(err)
	}
	d.report(errors.New("write error"))
	until(t, "the streams", func() bool { return !d.Stats().Stopped })
	if _, err := kv.Put(t.Context(), "key", []byte("x")); err != nil {
		t.Error(err)
	}
}

// TestStreamsAreCheckedMoreOftenDuringWrites checks that the streams are checked four times per
// second while something is written, and once per second otherwise.
func TestStreamsAreCheckedMoreOftenDuringWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(nil, t.TempDir(), slog.New(slog.DiscardHandler))
		looks := func(writes bool) (n int) {
			for range 40 { // 10 s
				if writes {
					d.stops()
				}
				time.Sleep(diskTick)
				if d.lookDue(time.Now()) {
					n++
				}
			}
			return n
		}
		if n := looks(true); n != 40 {
			t.Errorf("%d looks in 10 s of writes, want 40", n)
		}
		if n := looks(false); n < 10 || n > 14 { // the first second counts as one with writes
			t.Errorf("%d looks in 10 s without, want 10 or a few more", n)
		}
		d.report(errors.New("full"))
		if n := looks(true); n != 0 {
			t.Errorf("%d looks for what is known, want none", n)
		}
	})
}

// TestFailedDeletionStopsWrites checks that writes stop at once if the answer to a deletion says
// that the disk is full.
func TestFailedDeletionStopsWrites(t *testing.T) {
	j := &Journal{cfg: JournalConfig{Disk: newDisk(nil, t.TempDir(), slog.New(slog.DiscardHandler))}}
	for _, err := range []error{nil, unix.ENOSPC, &jetstream.APIError{Description: "bad"}} {
		if got := j.reported(err); !errors.Is(got, err) || j.cfg.Disk.Stats().Stopped {
			t.Errorf("after %v: %v, stopped %v, want the error alone", err, got, j.cfg.Disk.Stats().Stopped)
		}
	}
	full := &jetstream.APIError{Description: "purge: " + unix.ENOSPC.Error()}
	if err := j.reported(full); !errors.Is(err, full) || !j.cfg.Disk.Stats().Stopped {
		t.Errorf("after %v: %v, stopped %v, want that they are", full, err, j.cfg.Disk.Stats().Stopped)
	}
}

package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestNearlyFullDiskRefusesNewRequestsOnly checks a journal whose disk is nearly full of other
// data:
//
//   - New requests are refused at once and leave no files.
//   - Accepted requests run after a restart, are tried again, and have their results delivered.
//   - Once the disk has room, new requests are accepted.
func TestNearlyFullDiskRefusesNewRequestsOnly(t *testing.T) {
	small := proctest.Disk(t, "160m")
	cfg := JournalConfig{Blobs: filepath.Join(small, "blobs")}
	nc := start(t, filepath.Join(small, "nats"))
	j := openJournal(t, nc, cfg)
	for i := range 100 {
		enter(t, j, "f", fmt.Sprint("r", i), strings.Repeat("x", 1000))
	}
	large := strings.Repeat("y", 2*blobAbove)
	enter(t, j, "f", "large", large)

	free := proctest.Fill(t, small, acceptRoom-1<<20)
	for _, data := range []string{"x", large} {
		if err := j.Append("f", "refused", []byte(data)); !disk.IsFull(err) || !strings.Contains(err.Error(), small) {
			t.Fatalf("%d bytes on a full disk: %v, want the full disk and its name", len(data), err)
		}
	}
	if files, err := os.ReadDir(cfg.Blobs); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v, want that of the large record", files, err)
	}
	j = openJournal(t, nc, cfg)
	var mu sync.Mutex
	done := map[string]int{}
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case r.Kind == Callback:
			done[r.ID]++
			return End{}
		case r.Attempt == 1:
			return End{Err: errors.New("again"), Again: true}
		default:
			return End{Callback: r.Data, To: "host"}
		}
	})
	empty(t, j)
	if n := len(letters(t, j)); len(done) != 101 || n != 0 {
		t.Errorf("%d told and %d dead letters, want 101 and none", len(done), n)
	}
	free()
	enter(t, j, "f", "small again", "x")
	enter(t, j, "f", "large again", large)
	empty(t, j)
}

// smallServer starts a server on a disk of 160 MiB, with its streams and its reserve.
func smallServer(t *testing.T) (s *Server, dir string) {
	t.Helper()
	dir = proctest.Disk(t, "160m")
	s, err := StartServer(ServerConfig{Dir: filepath.Join(dir, "nats"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	until(t, "the reserve", func() bool {
		f, err := os.Stat(s.disk.reserve)
		return err == nil && f.Size() == reserveBytes
	})
	return s, dir
}

// breakStream makes a stream keep a write error, as a write on a full disk does.
func breakStream(t *testing.T, s *Server, kv *KV) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped := s.disk.stops()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		select {
		case <-stopped:
		case <-time.After(time.Minute):
			t.Error("a failed write is not noticed")
		}
	})
	for ctx.Err() == nil { // bypasses KV.Put, which would refuse
		_, _ = kv.kv.Put(ctx, "ballast", make([]byte, 64<<10))
	}
	wg.Wait()
}

// TestStreamsAreOpenedAgain fills the disk until a stream has a write error. Until there is room,
// writes are refused at once with the cause, and core NATS messages are delivered. When there is
// room, the stream takes writes without a restart. Watchers of a bucket see each change once.
func TestStreamsAreOpenedAgain(t *testing.T) {
	s, dir := smallServer(t)
	nc := connect(t, s)
	kv, err := OpenKV(t.Context(), nc, s.Disk(), "functions")
	if err != nil {
		t.Fatal(err)
	}
	messages := connect(t, s)
	core, err := messages.SubscribeSync("core")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	seen := map[string]int{}
	stop, err := kv.Watch(t.Context(), func(e Entry) {
		mu.Lock()
		defer mu.Unlock()
		seen[fmt.Sprint(e.Key, "=", string(e.Value), e.Deleted)]++
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	put := func(key, value string) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := kv.Put(ctx, key, []byte(value))
		return err
	}
	for _, key := range []string{"a", "b", "c"} {
		if err := put(key, "1"); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 2 {
		free := proctest.Fill(t, dir, 0)
		breakStream(t, s, kv)
		var full *disk.FullError
		if err := put("a", "refused"); !errors.As(err, &full) || !strings.HasPrefix(full.Path, dir) || full.Want < changeRoom || full.Free >= changeRoom {
			t.Errorf("put on a full disk: %v, want the disk, and the bytes that it has and should have", err)
		}
		if err := s.Disk().Degraded(); !errors.As(err, &full) {
			t.Errorf("degraded by %v, want the full disk", err)
		}
		if st := s.Disk().Stats(); !st.Stopped || !st.Low || st.Free >= changeRoom || st.Reopened != uint64(round) {
			t.Errorf("%+v, want a disk that has stopped", st)
		}
		if err := messages.Publish("core", nil); err != nil {
			t.Error(err)
		}
		// Sync requests go on, over their old connections.
		if m, err := core.NextMsg(time.Minute); err != nil || m == nil {
			t.Errorf("a message that no stream keeps: %v", err)
		}
		free()
		until(t, "the streams", func() bool { return s.Disk().Degraded() == nil })
		if err := put("a", fmt.Sprint("again", round)); err != nil {
			t.Fatal(err)
		}
		until(t, "the change to be seen", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return seen[fmt.Sprint("a=again", round, "false")] == 1
		})
	}
	mu.Lock()
	defer mu.Unlock()
	for what, n := range seen {
		if n != 1 && !strings.HasPrefix(what, "ballast=") {
			t.Errorf("%s was seen %d times, want once", what, n)
		}
	}
	if got := seen["a=refusedfalse"]; got != 0 {
		t.Error("a refused change was seen")
	}
}

// TestDeletionWorksOnAFullDisk checks that keys and dead letters can be deleted with no free byte,
// whether or not the streams take writes.
func TestDeletionWorksOnAFullDisk(t *testing.T) {
	for _, broken := range []bool{false, true} {
		t.Run(fmt.Sprint("broken ", broken), func(t *testing.T) {
			s, dir := smallServer(t)
			nc := connect(t, s)
			kv, err := OpenKV(t.Context(), nc, s.Disk(), "functions")
			if err != nil {
				t.Fatal(err)
			}
			for i := range 20 {
				if _, err := kv.Put(t.Context(), fmt.Sprint(i), []byte("x")); err != nil {
					t.Fatal(err)
				}
			}
			j := openJournal(t, nc, JournalConfig{Blobs: filepath.Join(dir, "blobs")})
			enter(t, j, "f", "dead", "x")
			stop := work(t, j, func(context.Context, Record) End { return End{Err: errors.New("bad")} })
			empty(t, j)
			stop()
			free := proctest.Fill(t, dir, 0)
			if broken {
				breakStream(t, s, kv)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for i := range 20 {
				if err := kv.Delete(ctx, fmt.Sprint(i)); err != nil {
					t.Fatal(err)
				}
				if _, _, err := kv.Get(ctx, fmt.Sprint(i)); !errors.Is(err, ErrNotFound) {
					t.Fatalf("key %d after its deletion: %v, want none", i, err)
				}
			}
			if err := j.DropDead("dead"); err != nil {
				t.Fatal(err)
			}
			if err := s.Disk().room(0, changeRoom); !disk.IsFull(err) {
				t.Errorf("room for others than deletions: %v, want none", err)
			}
			free()
			until(t, "the reserve", func() bool { _, err := os.Stat(s.disk.reserve); return err == nil })
			defer proctest.Fill(t, dir, 0)()
			if err := os.Remove(s.disk.reserve); err != nil {
				t.Fatal(err)
			}
			defer proctest.Fill(t, dir, 0)()
			var full *disk.FullError
			// It has passed all checks when it fails.
			if _, err := kv.Mark(ctx, "large", make([]byte, 1<<20)); !errors.As(err, &full) || ctx.Err() != nil {
				t.Errorf("a write without any room: %v, want the full disk, long before the deadline", err)
			}
		})
	}
}

// TestResultsWaitForTheDisk runs 100 requests whose results come while the disk is full and the
// streams keep a write error. Each result must be delivered once when the disk has room.
func TestResultsWaitForTheDisk(t *testing.T) {
	s, dir := smallServer(t)
	nc := connect(t, s)
	kv, err := OpenKV(t.Context(), nc, s.Disk(), "functions")
	if err != nil {
		t.Fatal(err)
	}
	cfg := JournalConfig{Blobs: filepath.Join(dir, "blobs")}
	j := openJournal(t, nc, cfg)
	for i := range 100 {
		enter(t, j, "f", fmt.Sprint("r", i), strings.Repeat("x", 1000))
	}
	var mu sync.Mutex
	runs, told, full := map[string]int{}, map[string]int{}, make(chan struct{})
	stop := work(t, j, func(ctx context.Context, r Record) End {
		if r.Kind == Run {
			select {
			case <-full:
			case <-ctx.Done():
				return End{Err: ctx.Err()}
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if r.Kind == Callback {
			told[r.ID]++
			return End{}
		}
		runs[r.ID]++
		return End{Callback: r.Data, To: "host"}
	})
	until(t, "work", func() bool { return j.Stats().Running["f"] == 64 })
	free := proctest.Fill(t, dir, 0)
	breakStream(t, s, kv)
	// Each shard keeps an error too. The message is not a record of the journal.
	for i := range j.shards {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if _, err := j.js.Publish(ctx, fmt.Sprintf("journal.%d.ballast", i), make([]byte, 64<<10)); err == nil {
			t.Error("a full disk has room")
		}
		cancel()
	}
	close(full)
	until(t, "results", func() bool { mu.Lock(); defer mu.Unlock(); return len(runs) == 64 })
	if err := j.Append("f", "refused", []byte("x")); !disk.IsFull(err) || !strings.Contains(err.Error(), dir) {
		t.Errorf("append: %v, want the full disk and its name", err)
	}
	free()
	until(t, "all to be told", func() bool { mu.Lock(); defer mu.Unlock(); return len(told) == 100 })
	until(t, "an empty journal", func() bool { return j.Stats().Pending["f"] == 0 })
	stop()
	for id, n := range told {
		if n != 1 || runs[id] != 1 {
			t.Errorf("%s ran %d times and was told %d times, want once", id, runs[id], n)
		}
	}
	if n := len(letters(t, j)); n != 0 {
		t.Errorf("%d dead letters, want none", n)
	}
	if n := openJournal(t, nc, cfg).Stats().Resumed; n != 0 {
		t.Errorf("%d records come back after they were done", n)
	}
}

// TestUnconfirmedStateIsDeletedWithItsRecord checks that if a record's next state may have been
// stored without an answer, that state is deleted with the record.
func TestUnconfirmedStateIsDeletedWithItsRecord(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{})
	for _, id := range []string{"told", "gone"} {
		enter(t, j, "f", id, "x")
		if _, err := j.js.Publish(t.Context(), j.subject("f", id), []byte("a state that nobody knows of")); err != nil {
			t.Fatal(err)
		}
		j.markUncertain(j.subject("f", id))
	}
	stop := work(t, j, func(_ context.Context, r Record) End {
		if r.Kind == Run && r.ID == "told" {
			return End{Callback: r.Data, To: "host"}
		}
		return End{}
	})
	empty(t, j)
	stop()
	if n := openJournal(t, nc, JournalConfig{}).Stats().Resumed; n != 0 || len(j.uncertain) != 0 {
		t.Errorf("%d records come back after they were done, and %d uncertain are left, want none", n, len(j.uncertain))
	}
}

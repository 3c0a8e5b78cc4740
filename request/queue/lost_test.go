package queue

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestLostRecordsAreDeleted checks lost records: Append has failed because the stream did not
// answer, but the stream has stored the record. The journal must delete such records and not run
// them. If a lost record is appended again under the same id, it must stay until it is done.
func TestLostRecordsAreDeleted(t *testing.T) {
	t.Parallel() // waits for appendTimeout
	nc := start(t, t.TempDir())
	blobs := filepath.Join(t.TempDir(), "blobs")
	j := openJournal(t, nc, JournalConfig{Blobs: blobs})
	stored := func() (n uint64) {
		for _, s := range j.shards {
			info, err := s.Info(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			n += info.State.Msgs
		}
		return n
	}
	enter(t, j, "f", "other", "x")

	refused := map[string]bool{}
	lose := func(id string, data string) bool {
		d, closed := diskOf(t, nc), make(chan struct{})
		close(closed)
		d.mu.Lock()
		was := d.stopped
		d.stopped = closed // as if the streams stopped while Append waits
		d.mu.Unlock()
		err := j.Append("f", id, []byte(data))
		d.mu.Lock()
		d.stopped = was
		d.mu.Unlock()
		if err != nil && !errors.Is(err, ErrStopped) {
			t.Fatal(err)
		}
		if err != nil {
			refused[id] = true
		}
		return err != nil
	}
	began := time.Now()
	for i := range 10 {
		data := "x"
		if i%2 == 0 {
			data = strings.Repeat("x", 2*blobAbove)
		}
		lose(fmt.Sprint("r", i), data)
	}
	if len(refused) < 2 || len(j.lost) != len(refused) {
		t.Fatalf("%d refused and %d lost, want most of 10, and as many", len(refused), len(j.lost))
	}
	until(t, "the records in the streams", func() bool { return stored() == 11 })
	if left := j.deleteLostBefore(t.Context(), began); !left || stored() != 11 {
		t.Errorf("%d records, want 11: none may be deleted that may still be on its way", stored())
	}
	again := slices.Sorted(maps.Keys(refused))[0]
	// states of the record again in the stream: lost twice, and accepted below.
	states := uint64(3)
	for !lose(again, "x") {
		// Its answer came before Append saw the stop.
		states++
	}
	if n := len(j.lost); n != len(refused) {
		t.Fatalf("%d lost, want %d, one of them twice", n, len(refused))
	}
	enter(t, j, "f", again, "x")
	// The record other, the accepted records, and the states of again.
	want := 1 + uint64(10-len(refused)) + states
	if left := j.deleteLostBefore(t.Context(), time.Now()); left || stored() != want {
		t.Errorf("%d records, and left %v, want %d and none", stored(), left, want)
	}

	for i := range 10 { // Run deletes these while it works on the others
		lose(fmt.Sprint("late", i), "x")
	}
	stop := work(t, j, func(_ context.Context, r Record) End {
		if refused[r.ID] && r.ID != again {
			t.Errorf("%s runs, which was refused", r.ID)
		}
		return End{}
	})
	until(t, "no records", func() bool { return stored() == 0 })
	// The answer to the last deletion comes a moment after the stream is empty.
	until(t, "no lost and no uncertain records", func() bool {
		j.mu.Lock()
		defer j.mu.Unlock()
		return len(j.lost) == 0 && len(j.uncertain) == 0
	})
	empty(t, j)
	stop()
	files, err := os.ReadDir(blobs)
	if err != nil || len(files) > 1 { // the first file of again may stay until the next start
		t.Errorf("files %v, %v, want at most one", files, err)
	}
}

package queue

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"
)

// TestFoundDescribesLeftRecords checks that a start calls Found for each record in the journal,
// with the number of failed attempts and the time of the next attempt. A redrive calls Found before
// the record runs.
func TestFoundDescribesLeftRecords(t *testing.T) {
	nc := start(t, t.TempDir())
	blobs := filepath.Join(t.TempDir(), "blobs")
	first := openJournal(t, nc, JournalConfig{Blobs: blobs})
	stop := work(t, first, func(_ context.Context, r Record) End {
		switch r.ID {
		case "again":
			return End{Err: errors.New("not yet"), Again: true, After: time.Hour}
		case "dies":
			return End{Err: errors.New("no luck")}
		}
		return End{Callback: []byte("result"), To: "receiver"}
	})
	for _, id := range []string{"again", "dies"} {
		enter(t, first, "f.ns", id, "x")
	}
	until(t, "a retry and a letter", func() bool { s := first.Stats(); return s.Retried == 1 && s.Dead == 1 && s.Done == 1 })
	stop()
	enter(t, first, "g.ns", "waits", "x")

	found := map[string]Found{}
	next := openJournal(t, nc, JournalConfig{Blobs: blobs, Found: func(f Found) { found[f.ID] = f }})
	if f := found["again"]; f.Function != "f.ns" || f.Kind != Run || f.Failed != 1 || time.Until(f.Next) < 50*time.Minute || time.Since(f.Accepted) > time.Hour {
		t.Errorf("the one that is tried again: %+v", f)
	}
	if f := found["waits"]; f.Function != "g.ns" || f.Failed != 0 || !f.Next.IsZero() || len(found) != 2 {
		t.Errorf("the one that waits: %+v, of %v", f, found)
	}
	if err := next.Redrive(t.Context(), "dies"); err != nil { // the journal has no workers
		t.Fatal(err)
	}
	if f, told := found["dies"]; !told || f.Function != "f.ns" || f.Failed != 0 || !f.Next.IsZero() {
		t.Errorf("the one that was dead: %+v, %v", f, told)
	}
}

package logbook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// fill writes n lines of a function, one per second, alternately by its replicas a and b.
func fill(b *Book, function string, n int) {
	for i := range n {
		b.Add(pipeline.ParseKey(function), Line{At: noon.Add(time.Duration(i) * time.Second), Replica: string(rune('a' + i%2)), Stream: "stdout", Text: fmt.Sprint(i)})
	}
}

// all reads to the end.
func all(t *testing.T, b *Book, q Query) string {
	t.Helper()
	r := b.Read(q)
	defer r.Close()
	var out []string
	for {
		lines, lost, err := r.Read(t.Context())
		if errors.Is(err, io.EOF) {
			return strings.Join(out, " ")
		}
		if err != nil || lost != 0 {
			t.Fatalf("%d lines lost, %v", lost, err)
		}
		for _, l := range lines {
			out = append(out, l.Text)
		}
	}
}

func TestReadSelectsTheLinesOfItsQuery(t *testing.T) {
	b := New(1<<20, 1<<20)
	fill(b, "f", 6)
	fill(b, "g", 1)
	for name, tc := range map[string]struct {
		q    Query
		want string
	}{
		"all":                        {Query{Function: pipeline.ParseKey("f")}, "0 1 2 3 4 5"},
		"tail of all, as the CLI":    {Query{Function: pipeline.ParseKey("f"), Tail: -1}, "0 1 2 3 4 5"},
		"tail":                       {Query{Function: pipeline.ParseKey("f"), Tail: 2}, "4 5"},
		"more than there is":         {Query{Function: pipeline.ParseKey("f"), Tail: 60}, "0 1 2 3 4 5"},
		"of a replica":               {Query{Function: pipeline.ParseKey("f"), Replica: "b"}, "1 3 5"},
		"tail of a replica":          {Query{Function: pipeline.ParseKey("f"), Replica: "a", Tail: 2}, "2 4"},
		"since":                      {Query{Function: pipeline.ParseKey("f"), Since: noon.Add(4 * time.Second)}, "4 5"},
		"since, and less of it":      {Query{Function: pipeline.ParseKey("f"), Since: noon.Add(2 * time.Second), Tail: 1}, "5"},
		"since later":                {Query{Function: pipeline.ParseKey("f"), Since: noon.Add(time.Hour)}, ""},
		"a function that is unknown": {Query{Function: pipeline.ParseKey("h")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := all(t, b, tc.q); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
	if _, there := b.functions[pipeline.ParseKey("h")]; there {
		t.Error("a question leaves something behind")
	}
}

func TestBookKeepsItsBounds(t *testing.T) {
	const line = overhead + 1
	b := New(3*line, 5*line)
	fill(b, "loud", 9)
	if got := all(t, b, Query{Function: pipeline.ParseKey("loud")}); got != "6 7 8" {
		t.Errorf("of one function %q, want the last three", got)
	}
	fill(b, "second", 2)
	fill(b, "third", 2)
	if got := all(t, b, Query{Function: pipeline.ParseKey("loud")}); got != "8" || b.bytes != 5*line || b.order.Len() != 5 {
		t.Errorf("%q left in %d bytes and %d lines, want the oldest of all to go beyond %d bytes", got, b.bytes, b.order.Len(), 5*line)
	}
	b.Add(pipeline.ParseKey("huge"), Line{Text: strings.Repeat("x", 10*line)})
	if got := all(t, b, Query{Function: pipeline.ParseKey("huge")}); got != "" {
		t.Error("a line larger than the bound is kept")
	}
	fill(b, "last", 3)
	fill(b, "other", 2)
	if len(b.functions) != 2 {
		t.Errorf("%d functions, want those two that have lines", len(b.functions))
	}
	for _, f := range []string{"loud", "second", "third", "huge", "last", "other"} {
		b.Forget(pipeline.ParseKey(f))
	}
	if b.bytes != 0 || b.order.Len() != 0 || len(b.functions) != 0 {
		t.Errorf("after all are forgotten: %d bytes, %d lines, %d functions", b.bytes, b.order.Len(), len(b.functions))
	}
}

// TestFollow checks that a reader gets the present lines, then the new ones, until it leaves, the
// function is forgotten or the book is closed.
func TestFollow(t *testing.T) {
	for name, end := range map[string]struct {
		do   func(b *Book, leave func())
		want error
	}{
		"reader leaves":      {func(_ *Book, leave func()) { leave() }, context.Canceled},
		"function forgotten": {func(b *Book, _ func()) { b.Forget(pipeline.ParseKey("f")) }, io.EOF},
		"book closed":        {func(b *Book, _ func()) { b.Close() }, io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := New(1<<20, 1<<20)
				fill(b, "f", 3)
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				var mu sync.Mutex
				var got []string
				var ended error
				go func() {
					r := b.Read(Query{Function: pipeline.ParseKey("f"), Tail: 1, Replica: "a", Follow: true})
					defer r.Close()
					for {
						lines, _, err := r.Read(ctx)
						mu.Lock()
						for _, l := range lines {
							got = append(got, l.Text)
						}
						ended = err
						mu.Unlock()
						if err != nil {
							return
						}
					}
				}()
				synctest.Wait()
				b.Add(pipeline.ParseKey("f"), Line{Replica: "b", Text: "of another"})
				b.Add(pipeline.ParseKey("g"), Line{Replica: "a", Text: "of another function"})
				synctest.Wait()
				b.Add(pipeline.ParseKey("f"), Line{Replica: "a", Text: "new"})
				synctest.Wait()
				mu.Lock()
				if text := strings.Join(got, " "); text != "2 new" || ended != nil {
					t.Errorf("%q (%v), want the last line and the new one", text, ended)
				}
				mu.Unlock()
				end.do(b, leave)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				if !errors.Is(ended, end.want) {
					t.Errorf("ended with %v, want %v", ended, end.want)
				}
			})
		})
	}
}

// TestSlowReaderLearnsHowManyLinesItMissed checks that a writer does not wait for a slow reader,
// and that the reader learns how many lines it has missed.
func TestSlowReaderLearnsHowManyLinesItMissed(t *testing.T) {
	const line = overhead + 1
	b := New(4*line, 100*line)
	r := b.Read(Query{Function: pipeline.ParseKey("f"), Follow: true})
	defer r.Close()
	fill(b, "f", 2)
	if lines, lost, err := r.Read(t.Context()); len(lines) != 2 || lost != 0 || err != nil {
		t.Fatalf("%v, %d, %v", lines, lost, err)
	}
	fill(b, "f", 9)
	if lines, lost, err := r.Read(t.Context()); len(lines) != 4 || lost != 5 || err != nil || lines[0].Text != "5" {
		t.Errorf("%v, %d lost (%v), want the last four of nine and five lost", lines, lost, err)
	}
}

// TestConcurrentWritersAndReaders runs writers, readers and calls of Forget concurrently, for the
// race detector.
func TestConcurrentWritersAndReaders(t *testing.T) {
	b := New(100*overhead, 300*overhead)
	ctx, stop := context.WithCancel(t.Context())
	var readers, writers sync.WaitGroup
	for i := range 6 {
		function := fmt.Sprint(i % 3)
		readers.Go(func() {
			for ctx.Err() == nil {
				r := b.Read(Query{Function: pipeline.ParseKey(function), Tail: i, Follow: i%2 == 0})
				for {
					if _, _, err := r.Read(ctx); err != nil {
						break
					}
				}
				r.Close()
			}
		})
		writers.Go(func() {
			for n := range 200 {
				fill(b, function, 5)
				if n%50 == 0 {
					b.Forget(pipeline.ParseKey(function))
				}
			}
		})
	}
	writers.Wait()
	stop()
	readers.Wait()
	if b.bytes > b.total || int64(b.order.Len())*overhead > b.total {
		t.Errorf("%d bytes, want at most %d", b.bytes, b.total)
	}
}

package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func openJournal(t testing.TB, nc *nats.Conn, cfg JournalConfig) *Journal {
	t.Helper()
	if cfg.Blobs == "" {
		cfg.Blobs = filepath.Join(t.TempDir(), "blobs")
	}
	cfg.Disk = diskOf(t, nc)
	j, err := OpenJournal(t.Context(), nc, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// work runs the journal until stop is called.
func work(t testing.TB, j *Journal, f func(context.Context, Record) End) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { j.Run(ctx, f) })
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

func enter(t testing.TB, j *Journal, function, id, data string) {
	t.Helper()
	if err := j.Append(function, id, []byte(data)); err != nil {
		t.Fatal(err)
	}
}

// until polls a state that the journal does not announce.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for limit := time.After(waitLimit); !done(); {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("still waiting: " + what)
		}
	}
}

// empty waits until the journal has no records.
func empty(t testing.TB, j *Journal) {
	t.Helper()
	until(t, "an empty journal", func() bool { return len(j.Stats().Pending) == 0 })
	if s := j.Stats(); s.Bytes != 0 || len(j.lines.of) != 0 || len(j.lines.delayed) != 0 {
		t.Errorf("an empty journal has %d bytes, lines %v", s.Bytes, j.lines.of)
	}
	for i, s := range j.shards {
		if info, err := s.Info(t.Context()); err != nil || info.State.Msgs != 0 {
			t.Errorf("shard %d has %d messages, %v", i, info.State.Msgs, err)
		}
	}
}

func letters(t testing.TB, j *Journal) []DeadLetter {
	t.Helper()
	all, more, err := j.Dead(nil, "", 1000)
	if err != nil || more {
		t.Fatal(more, err)
	}
	return all
}

func TestRecordsAreRetriedAndBecomeDeadLetters(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	var mu sync.Mutex
	seen := map[string][]int{}
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		seen[r.ID] = append(seen[r.ID], r.Attempt)
		if r.ID == "good.1" && r.Attempt == 3 {
			return End{}
		}
		return End{Err: errors.New("no luck\ntoday"), Again: r.Attempt < 4, After: time.Millisecond}
	})
	enter(t, j, "f.ns", "good.1", "x")
	enter(t, j, "f.ns", "bad", "y")
	empty(t, j)
	if want := map[string][]int{"good.1": {1, 2, 3}, "bad": {1, 2, 3, 4}}; !reflect.DeepEqual(seen, want) {
		t.Errorf("attempts %v, want %v", seen, want)
	}
	all := letters(t, j)
	if len(all) != 1 || all[0].ID != "bad" || all[0].Function != "f.ns" || all[0].Cause != "no luck today" || all[0].Attempts != 4 || all[0].Size != 1 || all[0].Accepted.After(all[0].Died) {
		t.Errorf("dead letters %+v", all)
	}
	if s := j.Stats(); s.Accepted != 2 || s.Runs != 7 || s.Retried != 5 || s.Done != 2 || s.Dead != 1 || s.Letters != 1 {
		t.Errorf("stats %+v", s)
	}
}

// TestKnownValueIsNotDecoded checks that a record that runs at once has its decoded value, and
// that a record read from disk has none.
func TestKnownValueIsNotDecoded(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	got := make(chan Record, 2)
	work(t, j, func(_ context.Context, r Record) End {
		got <- r
		if r.Attempt == 1 {
			return End{Err: errors.New("once"), Again: true}
		}
		return End{}
	})
	if err := j.AppendValue("f", "a", []byte("data"), 7); err != nil {
		t.Fatal(err)
	}
	empty(t, j)
	for _, want := range []any{7, nil} {
		if r := <-got; r.Value != want || string(r.Data) != "data" {
			t.Errorf("attempt %d: value %v of %q, want %v of the data", r.Attempt, r.Value, r.Data, want)
		}
	}
}

func TestPanicBecomesDeadLetter(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	work(t, j, func(context.Context, Record) End { panic("ouch") })
	enter(t, j, "f", "bad", "")
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || all[0].Cause != "panic: ouch" {
		t.Errorf("dead letters %+v", all)
	}
}

// TestSlowFunctionDelaysOnlyItself fills one function's line and checks that another function's
// record runs at once.
func TestSlowFunctionDelaysOnlyItself(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Window: 8, Limits: func(f string) Limits {
		return Limits{Concurrency: map[string]int{"slow": 3, "quick": 4}[f], Queue: 100}
	}})
	release := make(chan struct{})
	quick := make(chan string, 1)
	work(t, j, func(_ context.Context, r Record) End {
		if r.Function == "slow" {
			<-release
		} else {
			quick <- r.ID
		}
		return End{}
	})
	let := sync.OnceFunc(func() { close(release) })
	// Must run before work's end, which waits for the slow run even if this test has failed.
	t.Cleanup(let)
	for i := range 50 {
		enter(t, j, "slow", fmt.Sprint("s", i), "")
	}
	until(t, "the slow one to have its share", func() bool { return j.Stats().Running["slow"] == 3 })
	enter(t, j, "quick", "q", "")
	select {
	case id := <-quick:
		if id != "q" {
			t.Errorf("%q ran", id)
		}
	case <-time.After(time.Minute):
		t.Fatal("the quick one waits for the slow one")
	}
	if s := j.Stats(); s.Running["slow"] != 3 || s.Pending["slow"] != 50 {
		t.Errorf("%d of the slow function in work and %d there, want 3 of 50", s.Running["slow"], s.Pending["slow"])
	}
	let()
	empty(t, j)
}

// TestCallbacksDelayNobody has a result that nobody takes. Its function must go on.
func TestCallbacksDelayNobody(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir(), Limits: func(string) Limits { return Limits{Concurrency: 1, Queue: 100} }}
	j := openJournal(t, nc, cfg)
	told := make(chan Record, 10)
	f := func(refuse bool) func(context.Context, Record) End {
		return func(_ context.Context, r Record) End {
			if r.Kind == Run {
				return End{Callback: []byte("result of " + string(r.Data)), To: r.ID[:4]}
			}
			if refuse && strings.HasPrefix(r.ID, "dead") {
				return End{Err: errors.New("nobody there"), Again: true, After: time.Minute}
			}
			told <- r
			return End{}
		}
	}
	stop := work(t, j, f(true))
	enter(t, j, "f", "dead.1", "x")
	enter(t, j, "f", "dead.2", "x")
	enter(t, j, "f", "live.1", "y")
	if r := <-told; r.ID != "live.1" || r.Kind != Callback || string(r.Data) != "result of y" || r.Function != "f" || r.Attempt != 1 {
		t.Errorf("told %+v", r)
	}
	until(t, "both to be in back-off", func() bool { return j.Stats().Retried == 2 })
	stop()

	j = openJournal(t, nc, cfg) // next process: results survive, and functions do not run again
	j.mu.Lock()
	for i := range j.lines.delayed {
		j.lines.delayed[i].at = time.Now()
	}
	j.mu.Unlock()
	work(t, j, f(false))
	for range 2 {
		if r := <-told; r.Kind != Callback || string(r.Data) != "result of x" || r.Attempt != 2 {
			t.Errorf("told %+v", r)
		}
	}
	empty(t, j)
	if s := j.Stats(); s.Runs != 0 || s.Callbacks != 2 {
		t.Errorf("stats of the second process %+v", s)
	}
}

// TestFailedRunIsToldAndBecomesDeadLetter checks that a failed run becomes both a letter and a
// callback, and that a failed callback becomes another letter.
func TestFailedRunIsToldAndBecomesDeadLetter(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	large := strings.Repeat("x", blobAbove+1)
	work(t, j, func(_ context.Context, r Record) End {
		if r.Kind == Run {
			return End{Err: errors.New("run failed"), Callback: []byte("R" + large), To: "host"}
		}
		return End{Err: errors.New("receiver gone")}
	})
	enter(t, j, "f", "r", large)
	empty(t, j)
	all := letters(t, j)
	if len(all) != 2 || all[0].ID != "r" || all[0].Kind != Run || all[1].ID != "r.callback" || all[1].Kind != Callback || all[1].Cause != "receiver gone" {
		t.Fatalf("dead letters %+v", all)
	}
	for i, want := range []string{large, "R" + large} {
		if _, data, err := j.DeadLetter(t.Context(), all[i].ID); err != nil || string(data) != want {
			t.Errorf("letter %d has %d bytes, %v, want %d", i, len(data), err, len(want))
		}
	}
	again := openJournal(t, nc, cfg)
	if got := letters(t, again); len(got) != 2 || got[0].Cause != "run failed" || got[1].Attempts != 1 || got[1].Size != int64(len(large))+1 {
		t.Errorf("after a restart %+v", got)
	}
	for _, l := range all {
		if err := again.DropDead(l.ID); err != nil {
			t.Error(err)
		}
	}
	if files, err := os.ReadDir(cfg.Blobs); err != nil || len(files) != 0 {
		t.Errorf("files %v are left, %v", files, err)
	}
}

// TestAResultWithoutRoomKeepsItsContent uses a stream that others have filled completely, so that a
// large result becomes a dead letter.
func TestAResultWithoutRoomKeepsItsContent(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Shards: 1, Bytes: 1 << 20})
	enter(t, j, "f", "r", "x")
	for size := 1 << 20; size > 0; size /= 2 {
		for err := error(nil); err == nil; {
			_, err = j.js.Publish(t.Context(), "journal.0.other.r", make([]byte, size))
		}
	}
	large := strings.Repeat("y", blobAbove+1)
	work(t, j, func(context.Context, Record) End { return End{Callback: []byte(large), To: "host"} })
	until(t, "a dead letter", func() bool { return j.Stats().Dead == 1 })
	all := letters(t, j)
	if len(all) != 1 || all[0].ID != "r.callback" {
		t.Fatalf("dead letters %+v", all)
	}
	if _, data, err := j.DeadLetter(t.Context(), all[0].ID); err != nil || string(data) != large {
		t.Errorf("the letter has %d bytes, %v, want %d", len(data), err, len(large))
	}
}

func TestBusyShrinksTheLine(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Limits: func(string) Limits { return Limits{Concurrency: 16, Queue: 1000} }})
	var mu sync.Mutex
	running, most, refused := 0, 0, 0
	const room = 3 // the function's limit
	work(t, j, func(ctx context.Context, _ Record) End {
		mu.Lock()
		if running == room {
			refused++
			mu.Unlock()
			return End{Err: errors.New("429"), Again: true, Busy: true}
		}
		running++
		most = max(most, running)
		mu.Unlock()
		pause(ctx, 2*time.Millisecond) // stands for work
		mu.Lock()
		running--
		mu.Unlock()
		return End{}
	})
	for i := range 200 {
		enter(t, j, "f", fmt.Sprint(i), "")
	}
	empty(t, j)
	if refused > 150 || most != room {
		t.Errorf("%d refused for 200 records, at most %d at a time, want far fewer than 200 and %d", refused, most, room)
	}
	t.Logf("%d refused", refused)
}

func TestAppendRefusesRecordsBeyondLimits(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Bytes: 1 << 20, Limits: func(string) Limits { return Limits{Concurrency: 1, Queue: 3} }})
	for i := range 3 {
		enter(t, j, "f", fmt.Sprint(i), "")
	}
	if err := j.Append("f", "3", nil); !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), `3 async requests for "f"`) {
		t.Errorf("a fourth record: %v", err)
	}
	enter(t, j, "g", "3", "")
	if err := j.Append("g", "4", make([]byte, 1<<18+1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a large one: %v", err)
	}
	var err error
	n := 0
	for ; err == nil && n < 10; n++ {
		err = j.Append(fmt.Sprint("h", n), fmt.Sprint("h", n), make([]byte, 200<<10))
	}
	if !errors.Is(err, ErrFull) || n < 2 {
		t.Errorf("after %d of 200 KiB: %v", n, err)
	}
	if s := j.Stats(); s.Refused != 3 || s.Bytes != int64(n-1)*200<<10 {
		t.Errorf("stats %+v after %d", s, n)
	}
	work(t, j, func(context.Context, Record) End { return End{} })
	empty(t, j)
}

// TestWorkIsBoundedInBytes checks that the bytes in work, per line and in total, exceed their bound
// by at most one record.
func TestWorkIsBoundedInBytes(t *testing.T) {
	l := newLines(1024, 1024, func(string) Limits { return Limits{Concurrency: 1024} })
	begin := func() (n int, ln *line, it item) {
		for {
			next, record, ok := l.next(Run)
			if !ok {
				return n, ln, it
			}
			n, ln, it = n+1, next, record
		}
	}
	enter := func(function string, records int) {
		for range records {
			it := item{size: lineBytes / 2, account: l.open(function, lineBytes/2)}
			l.push(lineKey{Run, function}, it, time.Time{}, time.Time{})
		}
	}
	enter("f", 5)
	n, ln, it := begin()
	if n != 2 {
		t.Errorf("%d records of one line in work, want 2", n)
	}
	for i := range 2 * kindBytes / lineBytes {
		enter(fmt.Sprint("g", i), 2)
	}
	if n, _, _ := begin(); n != 2*kindBytes/lineBytes-2 {
		t.Errorf("%d more of all lines, want %d", n, 2*kindBytes/lineBytes-2)
	}
	l.end(ln, it, false)
	if n, _, _ := begin(); n != 1 {
		t.Errorf("%d records begin at the end of one, want 1", n)
	}
}

// TestNoFunctionFillsTheJournal checks that one function gets at most half of the journal's bytes,
// including results that wait for delivery.
func TestNoFunctionFillsTheJournal(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Bytes: 1 << 20, Shards: 1})
	enter(t, j, "f", "0", strings.Repeat("x", 200<<10))
	stop := work(t, j, func(_ context.Context, r Record) End {
		if r.Kind == Callback {
			return End{Err: errors.New("nobody there"), Again: true, After: time.Hour}
		}
		return End{Callback: make([]byte, 300<<10), To: "host"}
	})
	until(t, "the result to wait", func() bool { return j.Stats().Retried == 1 })
	stop()
	enter(t, j, "f", "1", strings.Repeat("x", 200<<10))
	if err := j.Append("f", "2", make([]byte, 13<<10)); !errors.Is(err, ErrShare) || !strings.Contains(err.Error(), `512000 bytes of async requests for "f"`) {
		t.Errorf("beyond half of it: %v", err)
	}
	enter(t, j, "f", "3", "small")
	enter(t, j, "g", "4", strings.Repeat("x", 200<<10))
}

// TestBackOffIsBoundedIfTheClockIsSetBack checks that a time written by a wrong clock delays nobody
// for long.
func TestBackOffIsBoundedIfTheClockIsSetBack(t *testing.T) {
	stored := time.Unix(1_000_000, 0)
	end := stored.Add(time.Minute).UnixNano()
	for name, tc := range map[string]struct {
		now  time.Duration // time since it was stored
		want time.Duration
	}{
		"20 s later":        {20 * time.Second, 40 * time.Second},
		"over":              {time.Hour, 0},
		"the clock is back": {-24 * 365 * time.Hour, time.Minute},
	} {
		if got := backOff(end, stored, stored.Add(tc.now)); got != tc.want {
			t.Errorf("%s: %v are left, want %v", name, got, tc.want)
		}
	}
	if got := backOff(0, stored, stored); got != 0 {
		t.Errorf("of a record without back-off %v are left", got)
	}
}

// TestLargeRecordsAreFiles checks that large records are stored as files, which are deleted with
// their records.
func TestLargeRecordsAreFiles(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	data := strings.Repeat("x", 12<<20) // larger than any message may be
	enter(t, j, "f", "large", data)
	enter(t, j, "f", "small", "y")
	if err := os.WriteFile(filepath.Join(cfg.Blobs, blobPrefix+"orphan"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j = openJournal(t, nc, cfg)
	if s := j.Stats(); s.Bytes != int64(len(data))+1 || s.Resumed != 2 {
		t.Errorf("after a restart %+v", s)
	}
	got := make(chan Record, 10)
	stop := work(t, j, func(_ context.Context, r Record) End {
		got <- r
		if r.ID == "large" && r.Attempt < 3 {
			return End{Err: errors.New("again"), Again: true}
		}
		return End{}
	})
	empty(t, j)
	stop()
	close(got)
	n := 0
	for r := range got {
		if r.ID == "large" {
			n++
			if string(r.Data) != data || r.Attempt != n {
				t.Errorf("attempt %d has %d bytes, want %d", r.Attempt, len(r.Data), len(data))
			}
		}
	}
	if files, err := os.ReadDir(cfg.Blobs); err != nil || len(files) != 0 || n != 3 {
		t.Errorf("files %v are left after %d runs, %v", files, n, err)
	}
}

package queue

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func openJournal(t testing.TB, nc *nats.Conn, cfg JournalConfig) *Journal {
	t.Helper()
	if cfg.Blobs == "" {
		cfg.Blobs = filepath.Join(t.TempDir(), "blobs")
	}
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

// until waits for a state that the journal tells only when asked.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for limit := time.After(20 * time.Second); !done(); {
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
	all, more, err := j.Dead("", "", 1000)
	if err != nil || more {
		t.Fatal(more, err)
	}
	return all
}

func TestRecordsAreRetriedAndDie(t *testing.T) {
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

func TestAPanicIsADeadLetter(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	work(t, j, func(context.Context, Record) End { panic("ouch") })
	enter(t, j, "f", "bad", "")
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || all[0].Cause != "panic: ouch" {
		t.Errorf("dead letters %+v", all)
	}
}

// TestASlowFunctionHoldsUpItselfAlone fills one function's line and sees another one's record run at once.
func TestASlowFunctionHoldsUpItselfAlone(t *testing.T) {
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
	t.Cleanup(let) // before work's end, which waits for the slow one also when this test has failed
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
	case <-time.After(20 * time.Second):
		t.Fatal("the quick one waits for the slow one")
	}
	if s := j.Stats(); s.Running["slow"] != 3 || s.Pending["slow"] != 50 {
		t.Errorf("%d of the slow function in work and %d there, want 3 of 50", s.Running["slow"], s.Pending["slow"])
	}
	let()
	empty(t, j)
}

// TestCallbacksHoldUpNobody has a result that nobody takes, and its function goes on.
func TestCallbacksHoldUpNobody(t *testing.T) {
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

	j = openJournal(t, nc, cfg) // the next process: results survive, functions do not run again
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

// TestAFailedRunIsToldAndDies: both the letter and the callback come of it, and a callback that fails is a letter of its own.
func TestAFailedRunIsToldAndDies(t *testing.T) {
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

func TestBusyShrinksTheLine(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Limits: func(string) Limits { return Limits{Concurrency: 16, Queue: 1000} }})
	var mu sync.Mutex
	running, most, refused := 0, 0, 0
	const room = 3 // of the function
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
		pause(ctx, 2*time.Millisecond)
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

// pause is a stand-in for work that takes time.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func TestLimits(t *testing.T) {
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

// TestNoFunctionFillsTheJournal: half of its bytes at most are one function's, results that wait to be told included.
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

// TestBackOffAndClock: what a wrong clock has written holds up nobody for long.
func TestBackOffAndClock(t *testing.T) {
	stored := time.Unix(1_000_000, 0)
	end := stored.Add(time.Minute).UnixNano()
	for name, tc := range map[string]struct {
		now  time.Duration // after it was stored
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

// TestLargeRecords are files, which go with their records.
func TestLargeRecords(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	data := strings.Repeat("x", 12<<20) // no message could be that large
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

func TestEndsOfTheProcessAreNoFailures(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	enter(t, openJournal(t, nc, cfg), "f", "r", "x")
	for range maxStarts - 1 {
		j := openJournal(t, nc, cfg)
		began := make(chan Record, 1)
		stop := work(t, j, func(ctx context.Context, r Record) End { began <- r; <-ctx.Done(); return End{Err: ctx.Err()} })
		if r := <-began; r.Attempt != 1 || string(r.Data) != "x" {
			t.Fatalf("record %+v after runs cut short, want attempt 1", r)
		}
		stop()
	}
	j := openJournal(t, nc, cfg) // what brings every process down must end somewhere
	work(t, j, func(context.Context, Record) End { t.Error("it runs once more"); return End{} })
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || !strings.Contains(all[0].Cause, "50 processes ended while it ran") {
		t.Errorf("dead letters %+v", all)
	}
}

// TestAttemptsSurviveTheProcess: neither the count nor the back-off begins anew.
func TestAttemptsSurviveTheProcess(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	stop := work(t, j, func(_ context.Context, r Record) End {
		return End{Err: errors.New("no"), Again: true, After: time.Hour * time.Duration(r.Attempt)}
	})
	enter(t, j, "f", "r", "x")
	until(t, "the back-off", func() bool { return j.Stats().Retried == 1 })
	stop()
	j = openJournal(t, nc, cfg)
	if len(j.lines.delayed) != 1 || time.Until(j.lines.delayed[0].at) < 50*time.Minute {
		t.Fatalf("delayed %+v, want one for an hour", j.lines.delayed)
	}
	j.lines.delayed[0].at = time.Now()
	got := make(chan int, 1)
	work(t, j, func(_ context.Context, r Record) End { got <- r.Attempt; return End{} })
	if n := <-got; n != 2 {
		t.Errorf("attempt %d, want 2", n)
	}
	empty(t, j)
}

// TestEarlierVersions opens a state folder as the first version left it: subjects without a function, a durable consumer a
// shard, dead letters without a function.
func TestEarlierVersions(t *testing.T) {
	nc := start(t, t.TempDir())
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	for i := range 4 {
		s, err := js.CreateStream(ctx, jetstream.StreamConfig{
			Name: fmt.Sprint("JOURNAL-", i), Subjects: []string{fmt.Sprintf("journal.%d.*", i)},
			Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew, MaxBytes: 1 << 28,
		})
		if err != nil {
			t.Fatal(err)
		}
		c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "run", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := js.Publish(ctx, fmt.Sprintf("journal.%d.old=2E%d", i, i), []byte("x")); err != nil {
			t.Fatal(err)
		}
		if i == 0 { // it was in work
			if _, err := c.Next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "DEAD", Subjects: []string{"dead.*"}, MaxBytes: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.PublishMsg(ctx, &nats.Msg{Subject: "dead.d=2E1", Data: []byte("y"), Header: nats.Header{"Cause": {"why"}}}); err != nil {
		t.Fatal(err)
	}
	j := openJournal(t, nc, JournalConfig{})
	if all := letters(t, j); len(all) != 1 || all[0].ID != "d.1" || all[0].Cause != "why" || all[0].Function != "" {
		t.Errorf("dead letters %+v", all)
	}
	if err := j.Redrive(ctx, "d.1"); err != nil {
		t.Fatal(err)
	}
	got := make(chan string, 10)
	work(t, j, func(_ context.Context, r Record) End {
		if r.Attempt == 1 {
			return End{Err: errors.New("again"), Again: true}
		}
		got <- r.ID + string(r.Data)
		return End{}
	})
	var ids []string
	for range 5 {
		ids = append(ids, <-got)
	}
	slices.Sort(ids)
	if want := []string{"d.1y", "old.0x", "old.1x", "old.2x", "old.3x"}; !slices.Equal(ids, want) {
		t.Errorf("ran %v, want %v", ids, want)
	}
	empty(t, j)
}

func TestDeadLetters(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir(), Dead: 6}
	j := openJournal(t, nc, cfg)
	var mu sync.Mutex
	broken := true
	ran := map[string]int{}
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		if broken {
			return End{Err: errors.New("broken")}
		}
		ran[r.ID] = r.Attempt
		return End{}
	})
	for i := range 8 {
		enter(t, j, []string{"f", "g"}[i%2], fmt.Sprint("r", i), "x")
		empty(t, j) // one after another, for the order
	}
	ids := func(all []DeadLetter) (out []string) {
		for _, l := range all {
			out = append(out, l.ID)
		}
		return out
	}
	if got := ids(letters(t, j)); !slices.Equal(got, []string{"r2", "r3", "r4", "r5", "r6", "r7"}) {
		t.Errorf("letters %v, want the latest 6", got)
	}
	page, more, err := j.Dead("f", "", 2)
	if got := ids(page); err != nil || !more || !slices.Equal(got, []string{"r2", "r4"}) {
		t.Errorf("first page %v, more %t, %v", got, more, err)
	}
	page, more, err = j.Dead("f", "r4", 2)
	if got := ids(page); err != nil || more || !slices.Equal(got, []string{"r6"}) {
		t.Errorf("second page %v, more %t, %v", got, more, err)
	}
	if _, _, err := j.Dead("", "r0", 2); !errors.Is(err, ErrNoLetter) {
		t.Errorf("after one that is not there: %v", err)
	}
	if err := j.DropDead("r2"); err != nil {
		t.Error(err)
	}
	for _, err := range []error{j.DropDead("r2"), j.Redrive(t.Context(), "r2")} {
		if !errors.Is(err, ErrNoLetter) {
			t.Errorf("a dropped one: %v", err)
		}
	}
	if err := j.Redrive(t.Context(), "r3"); err != nil { // still broken: it dies again
		t.Error(err)
	}
	empty(t, j)
	if got := ids(letters(t, j)); !slices.Equal(got, []string{"r4", "r5", "r6", "r7", "r3"}) {
		t.Errorf("letters %v, want r3 behind", got)
	}
	mu.Lock()
	broken = false
	mu.Unlock()
	for _, id := range []string{"r3", "r7"} {
		if err := j.Redrive(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	empty(t, j)
	if want := map[string]int{"r3": 1, "r7": 1}; !reflect.DeepEqual(ran, want) {
		t.Errorf("ran %v, want %v", ran, want)
	}
	if got := ids(letters(t, openJournal(t, nc, cfg))); !slices.Equal(got, []string{"r4", "r5", "r6"}) {
		t.Errorf("after a restart %v", got)
	}
}

// TestMovesCutShort: a record that lies both in the journal and among the dead letters is the journal's.
func TestMovesCutShort(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	large := strings.Repeat("x", blobAbove+1)
	enter(t, j, "f", "r", large)
	var m *message
	if raw, err := j.load(t.Context(), j.shards[j.shard("r")], 1); err == nil {
		m = raw
	} else {
		t.Fatal(err)
	}
	if err := j.bury(m, 1, errors.New("why")); err != nil { // and then the process ends
		t.Fatal(err)
	}
	j = openJournal(t, nc, cfg)
	if all := letters(t, j); len(all) != 0 {
		t.Errorf("dead letters %+v, want none", all)
	}
	got := make(chan int, 1)
	work(t, j, func(_ context.Context, r Record) End { got <- len(r.Data); return End{} })
	if n := <-got; n != len(large) {
		t.Errorf("%d bytes, want %d", n, len(large))
	}
	empty(t, j)
}

// writeJournal is a process of its own: it appends records and prints each id once Append has returned, until it is killed.
func writeJournal(dir string) {
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	nc, err := s.Connect("writer")
	if err != nil {
		panic(err)
	}
	j, err := OpenJournal(context.Background(), nc, JournalConfig{Blobs: filepath.Join(dir, "blobs"), Limits: func(string) Limits { return Limits{1, 1 << 30} }}, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 1_000_000 {
				id := fmt.Sprintf("call-%d-%d", w, i)
				if err := j.Append("f", id, []byte(id)); err != nil {
					panic(err)
				}
				fmt.Println(id)
			}
		})
	}
	wg.Wait()
	os.Exit(3)
}

func TestJournalSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "JOURNAL_WRITER="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	accepted := map[string]bool{}
	for sc := bufio.NewScanner(out); sc.Scan(); {
		accepted[sc.Text()] = true
		if len(accepted) == 2000 {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // killed
	if len(accepted) < 2000 {
		t.Fatalf("the writer ended by itself after %d records", len(accepted))
	}
	j := openJournal(t, start(t, dir), JournalConfig{Blobs: filepath.Join(dir, "blobs")})
	var mu sync.Mutex
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		delete(accepted, r.ID)
		return End{}
	})
	empty(t, j)
	for id := range accepted {
		if strings.Count(id, "-") == 2 && !strings.HasSuffix(id, "-") { // the kill may cut the last line
			t.Errorf("accepted record %s is gone", id)
		}
	}
}

// BenchmarkJournalAppend has 16 clients that each wait for the disk; /s is records accepted. None are worked on.
func BenchmarkJournalAppend(b *testing.B) {
	for _, size := range []int{300, 4 << 10} {
		b.Run(fmt.Sprint("bytes=", size), func(b *testing.B) {
			s, err := StartServer(ServerConfig{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			nc, err := s.Connect("bench")
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			j := openJournal(b, nc, JournalConfig{Bytes: 8 << 30, Limits: func(string) Limits { return Limits{64, 1 << 30} }})
			data := make([]byte, size)
			var wg sync.WaitGroup
			b.ResetTimer()
			for w := range 16 {
				wg.Go(func() {
					for i := w; i < b.N; i += 16 {
						if err := j.Append("f.openfaas-fn", fmt.Sprintf("0123456789abcdef-%d", i), data); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
		})
	}
}

// BenchmarkJournal has them worked on at the same time; /s is records done.
func BenchmarkJournal(b *testing.B) {
	s, err := StartServer(ServerConfig{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	nc, err := s.Connect("bench")
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	j := openJournal(b, nc, JournalConfig{Limits: func(string) Limits { return Limits{64, 1 << 30} }})
	work(b, j, func(context.Context, Record) End { return End{} })
	data := make([]byte, 300)
	var wg sync.WaitGroup
	b.ResetTimer()
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < b.N; i += 16 {
				if err := j.Append("f.openfaas-fn", fmt.Sprintf("0123456789abcdef-%d", i), data); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	empty(b, j)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
}

// TestStatesSideBySide has a kill between storing a record's next state and deleting the one before: the later one counts,
// and the record runs once.
func TestStatesSideBySide(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	for _, id := range []string{"retried", "told"} {
		enter(t, j, "f", id, "x")
	}
	retried := &message{subject: j.subject("f", "retried"), data: []byte("x")}
	retried.setNumber(headFailed, 3)
	told := &message{subject: j.subject("f", "told"), data: []byte("result")}
	told.set(headKind, Callback.String())
	told.set(headTo, "host")
	for _, m := range []*message{retried, told} {
		if _, err := j.store(m); err != nil {
			t.Fatal(err)
		}
	}
	j = openJournal(t, nc, cfg)
	if s := j.Stats(); s.Resumed != 2 || s.Pending["f"] != 2 {
		t.Errorf("after the kill %+v, want 2 records", s)
	}
	var mu sync.Mutex
	var got []string
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprint(r.Kind, r.ID, r.Attempt, string(r.Data)))
		return End{}
	})
	empty(t, j)
	slices.Sort(got)
	if want := []string{"callback" + "told1result", "run" + "retried4x"}; !slices.Equal(got, want) {
		t.Errorf("worked on %q, want %q", got, want)
	}
}

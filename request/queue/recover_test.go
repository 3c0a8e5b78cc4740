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

func TestProcessEndsAreNotFailures(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	enter(t, openJournal(t, nc, cfg), "f", "r", "x")
	accepted := time.Now()
	for n := range maxStarts - 1 {
		j := openJournal(t, nc, cfg)
		began := make(chan Record, 1)
		stop := work(t, j, func(ctx context.Context, r Record) End { began <- r; <-ctx.Done(); return End{Err: ctx.Err()} })
		if r := <-began; r.Attempt != 1 || !r.Redelivered || string(r.Data) != "x" {
			t.Fatalf("record %+v after %d runs cut short, want attempt 1, redelivered", r, n)
		}
		stop()
	}
	j := openJournal(t, nc, cfg) // a record that ends every process must be given up eventually
	work(t, j, func(context.Context, Record) End { t.Error("it runs once more"); return End{} })
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || !strings.Contains(all[0].Cause, "50 processes ended while it ran") {
		t.Errorf("dead letters %+v", all)
	} else if all[0].Accepted.After(accepted) {
		t.Errorf("accepted %v after it was", all[0].Accepted.Sub(accepted))
	}
}

// TestAttemptsSurviveTheProcess checks that a new process continues both the count and the
// back-off.
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
	got := make(chan Record, 1)
	work(t, j, func(_ context.Context, r Record) End { got <- r; return End{} })
	if r := <-got; r.Attempt != 2 {
		t.Errorf("attempt %d, want 2", r.Attempt)
	}
	empty(t, j)
}

// TestRedeliveredMarksRepetitions checks that runs, retries and callbacks that an earlier process
// may have started are marked, and that others are not.
func TestRedeliveredMarksRepetitions(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	var mu sync.Mutex
	var got []string
	note := func(r Record) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprint(r.Kind, " ", r.Attempt, " ", r.Redelivered))
	}
	j := openJournal(t, nc, cfg)
	began := make(chan struct{})
	stop := work(t, j, func(ctx context.Context, r Record) End {
		note(r)
		// The callback was delivered, but the process ends before that is stored.
		if r.Kind == Callback {
			close(began)
			<-ctx.Done()
			return End{Err: ctx.Err()}
		}
		if r.Attempt == 1 {
			return End{Err: errors.New("no"), Again: true}
		}
		return End{Callback: r.Data, To: "host"}
	})
	enter(t, j, "f", "r", "x")
	<-began
	stop()
	j = openJournal(t, nc, cfg)
	enter(t, j, "f", "new", "x")
	work(t, j, func(_ context.Context, r Record) End {
		if r.ID == "r" {
			note(r)
		} else if r.Redelivered {
			t.Error("a new record is marked")
		}
		return End{}
	})
	empty(t, j)
	if want := []string{"run 1 false", "run 2 false", "callback 1 false", "callback 1 true"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestStateOfTheFirstVersionIsRead opens a state folder of the first version: subjects without a
// function, one durable consumer per shard, and dead letters without a function.
func TestStateOfTheFirstVersionIsRead(t *testing.T) {
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
		if i == 0 { // was in work
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

func TestDeadLettersArePagedDroppedAndRedriven(t *testing.T) {
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
		empty(t, j) // one at a time, to fix the order
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
	ofF := func(function string) bool { return function == "f" }
	page, more, err := j.Dead(ofF, "", 2)
	if got := ids(page); err != nil || !more || !slices.Equal(got, []string{"r2", "r4"}) {
		t.Errorf("first page %v, more %t, %v", got, more, err)
	}
	page, more, err = j.Dead(ofF, "r4", 2)
	if got := ids(page); err != nil || more || !slices.Equal(got, []string{"r6"}) {
		t.Errorf("second page %v, more %t, %v", got, more, err)
	}
	if _, _, err := j.Dead(nil, "r0", 2); !errors.Is(err, ErrNoLetter) {
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
	// still broken, so it becomes a dead letter again.
	if err := j.Redrive(t.Context(), "r3"); err != nil {
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

// TestInterruptedDeadLetterIsStoredAgain checks that a dead letter that is stored twice exists only
// once. This happens if the disk fails after the first time, before the record is deleted.
func TestInterruptedDeadLetterIsStoredAgain(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	large := strings.Repeat("x", blobAbove+1)
	m := &message{subject: j.subject("f", "r"), data: []byte(large), at: time.Now()}
	if _, err := j.store(m); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := j.addDeadLetter(m, 1, errors.New("no"), ""); err != nil {
			t.Fatal(err)
		}
	}
	if all := letters(t, j); len(all) != 1 {
		t.Errorf("dead letters %+v, want one", all)
	}
	if _, data, err := j.DeadLetter(t.Context(), "r"); err != nil || string(data) != large {
		t.Errorf("it has %d bytes, %v, want %d", len(data), err, len(large))
	}
}

// TestRedriveIntoFullJournalIsRefused checks that a letter stays a letter until the journal has
// room.
func TestRedriveIntoFullJournalIsRefused(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Bytes: 1 << 20})
	data := strings.Repeat("x", 200<<10)
	stop := work(t, j, func(context.Context, Record) End { return End{Err: errors.New("no")} })
	enter(t, j, "f", "r", data)
	empty(t, j)
	stop()
	for i := range 4 {
		enter(t, j, fmt.Sprint("g", i), fmt.Sprint(i), data)
	}
	before := j.Stats().Bytes
	if err := j.Redrive(t.Context(), "r"); !errors.Is(err, ErrFull) {
		t.Errorf("redrive: %v, want ErrFull", err)
	}
	if all := letters(t, j); len(all) != 1 || j.Stats().Bytes != before {
		t.Errorf("dead letters %+v and %d bytes of records, want one and %d", all, j.Stats().Bytes, before)
	}
	work(t, j, func(context.Context, Record) End { return End{} })
	empty(t, j)
	if err := j.Redrive(t.Context(), "r"); err != nil {
		t.Error(err)
	}
	empty(t, j)
}

// TestRecordThatIsAlsoDeadLetterStaysInJournal checks that a start deletes a dead letter whose
// record is still in the journal.
func TestRecordThatIsAlsoDeadLetterStaysInJournal(t *testing.T) {
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
	if err := j.addDeadLetter(m, 1, errors.New("why"), ""); err != nil { // and then the process ends
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

// writeJournal runs in its own process. It appends records and prints each id once Append has
// returned, until it is killed.
func writeJournal(dir string) {
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	nc, err := s.Connect("writer")
	if err != nil {
		panic(err)
	}
	j, err := OpenJournal(context.Background(), nc, JournalConfig{Disk: s.Disk(), Blobs: filepath.Join(dir, "blobs"), Limits: func(string) Limits { return Limits{1, 1 << 30} }}, slog.New(slog.DiscardHandler))
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
	_ = cmd.Wait() // it was killed
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
		// The kill may have cut the last line.
		if strings.Count(id, "-") == 2 && !strings.HasSuffix(id, "-") {
			t.Errorf("accepted record %s is gone", id)
		}
	}
}

// TestLaterOfTwoStatesCounts simulates a kill between storing a record's next state and deleting
// the previous state. The later state counts, and the record runs once.
func TestLaterOfTwoStatesCounts(t *testing.T) {
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

// TestDeadLetterKeepsWhyItsRunWasDropped checks that the reason survives the process, and that a
// record that is sent again has none.
func TestDeadLetterKeepsWhyItsRunWasDropped(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	j := openJournal(t, nc, cfg)
	ends := make(chan End, 2)
	stop := work(t, j, func(context.Context, Record) End { return <-ends })
	ends <- End{Err: errors.New("status 503"), Dropped: "late"}
	enter(t, j, "f.ns", "r", "x")
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || all[0].Dropped != "late" {
		t.Errorf("letters %+v, want the reason", all)
	}
	stop()
	j = openJournal(t, nc, cfg)
	if all := letters(t, j); len(all) != 1 || all[0].Dropped != "late" {
		t.Errorf("letters of the next process %+v, want the reason", all)
	}
	work(t, j, func(context.Context, Record) End { return <-ends })
	ends <- End{Err: errors.New("status 500")}
	if err := j.Redrive(t.Context(), "r"); err != nil {
		t.Fatal(err)
	}
	empty(t, j)
	if all := letters(t, j); len(all) != 1 || all[0].Dropped != "" || all[0].Cause != "status 500" {
		t.Errorf("letters after a second failure %+v, want no reason", all)
	}
}

// lateConsumer is a consumer that the server of this process does not know at first.
type lateConsumer struct {
	jetstream.Consumer
	unknown int // calls
	err     error
}

// Fetch implements jetstream.Consumer.
func (c *lateConsumer) Fetch(n int, opts ...jetstream.FetchOpt) (jetstream.MessageBatch, error) {
	if c.unknown--; c.unknown >= 0 {
		return failedBatch{c.err}, nil
	}
	return c.Consumer.Fetch(n, opts...)
}

// failedBatch has no messages.
type failedBatch struct{ err error }

func (b failedBatch) Error() error { return b.err }

func (b failedBatch) Messages() <-chan jetstream.Msg {
	none := make(chan jetstream.Msg)
	close(none)
	return none
}

// TestReadAllWaitsForItsConsumer reads with a consumer that a cluster's server learns of only after
// a moment, as a busy one does. Other errors end it.
func TestReadAllWaitsForItsConsumer(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Blobs: t.TempDir(), Shards: 1})
	for i := range 3 {
		enter(t, j, "f", fmt.Sprint("r", i), "x")
	}
	read := func(fault error) (int, error) {
		c, err := j.shards[0].CreateConsumer(t.Context(), jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, HeadersOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		err = readAll(t.Context(), &lateConsumer{c, 2, fault}, 3, 0, func(found) { n++ })
		return n, errors.Join(err, j.shards[0].DeleteConsumer(t.Context(), c.CachedInfo().Name))
	}
	if n, err := read(nats.ErrNoResponders); n != 3 || err != nil {
		t.Errorf("%d messages, %v, want all 3", n, err)
	}
	if n, err := read(nats.ErrConsumerDeleted); n != 0 || !errors.Is(err, nats.ErrConsumerDeleted) {
		t.Errorf("%d messages, %v, want the error of the server", n, err)
	}
}

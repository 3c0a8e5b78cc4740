package queue

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// letter is a dead letter's name, cause and size.
type letter struct {
	id, cause string
	size      int
}

// dead hears of dead letters.
func dead(t *testing.T, nc *nats.Conn) func() letter {
	t.Helper()
	sub, err := nc.SubscribeSync("dead.*")
	if err != nil {
		t.Fatal(err)
	}
	return func() letter {
		t.Helper()
		m, err := sub.NextMsg(20 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return letter{strings.TrimPrefix(m.Subject, "dead."), m.Header.Get("Cause"), len(m.Data)}
	}
}

// work runs the journal until stop is called.
func work(t *testing.T, j *Journal, f func(context.Context, Record) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- j.Run(ctx, f) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func enter(t *testing.T, j *Journal, id string, data []byte) {
	t.Helper()
	if err := j.Append(t.Context(), id, data); err != nil {
		t.Fatal(err)
	}
}

func TestAPanicIsAFailedAttempt(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Attempts: 2, Backoff: time.Millisecond})
	next := dead(t, nc)
	runs := make(chan Record, 10)
	work(t, j, func(_ context.Context, r Record) error { runs <- r; panic("ouch\nin two lines") })
	enter(t, j, "bad", nil)
	if l := next(); l.id != "bad" || l.cause != "attempt 2 of 2: panic: ouch in two lines" {
		t.Errorf("dead letter %+v", l)
	}
	for i := 1; i <= 2; i++ {
		if r := <-runs; r.Attempt != i || r.Last != (i == 2) {
			t.Errorf("run %d is attempt %d, last %v", i, r.Attempt, r.Last)
		}
	}
}

func TestEndsOfTheProcessAreNoFailures(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Attempts: 2, Backoff: time.Millisecond})
	enter(t, j, "r", nil)
	for range 5 {
		began := make(chan Record, 1)
		stop := work(t, j, func(ctx context.Context, r Record) error { began <- r; <-ctx.Done(); return ctx.Err() })
		if r := <-began; r.Attempt != 1 || r.Last {
			t.Errorf("attempt %d, last %v after runs cut short, want 1", r.Attempt, r.Last)
		}
		stop()
	}
	done := make(chan Record, 1)
	stop := work(t, j, func(_ context.Context, r Record) error {
		if !r.Last {
			return errors.New("no luck")
		}
		done <- r
		return nil
	})
	<-done
	stop()
	if len(j.failed) > 0 {
		t.Errorf("remembers %v", j.failed)
	}
}

func TestWhatNeverEndsIsBuriedAtLast(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Attempts: 1, Shards: 1})
	next := dead(t, nc)
	enter(t, j, "poison", nil)
	for range deliveries {
		began := make(chan struct{})
		stop := work(t, j, func(ctx context.Context, _ Record) error { close(began); <-ctx.Done(); return ctx.Err() })
		<-began
		stop()
	}
	work(t, j, func(context.Context, Record) error { t.Error("it runs once more"); return nil })
	if l := next(); l.id != "poison" || !strings.Contains(l.cause, "given out 11 times") {
		t.Errorf("dead letter %+v", l)
	}
}

func TestTheLargestRecordCanDie(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Attempts: 1})
	if err := j.Append(t.Context(), "r", make([]byte, MaxRecord+1)); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), fmt.Sprint(MaxRecord)) {
		t.Errorf("a record above the limit: %v, want ErrTooLarge", err)
	}
	next := dead(t, nc)
	work(t, j, func(context.Context, Record) error { return errors.New(strings.Repeat("ü", 10_000)) })
	enter(t, j, "large", make([]byte, MaxRecord))
	if l := next(); l.size != MaxRecord || len(l.cause) < maxCause-1 {
		t.Errorf("a dead letter of %d bytes with a cause of %d, want all and about %d", l.size, len(l.cause), maxCause)
	}
}

func TestRunEndsWithItsConsumers(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{})
	running := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- j.Run(t.Context(), func(ctx context.Context, _ Record) error { close(running); <-ctx.Done(); return ctx.Err() })
	}()
	enter(t, j, "r", nil)
	<-running
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for i := range j.shards {
		if err := js.DeleteConsumer(t.Context(), fmt.Sprint("JOURNAL-", i), "run"); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "its consumer has ended") {
			t.Errorf("run ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("run goes on without consumers")
	}
}

func TestStopWaitsForTheHandlerOfAClosedConnection(t *testing.T) {
	nc := start(t, t.TempDir())
	b := NewBus(nc)
	began, release := make(chan struct{}), make(chan struct{})
	var events []string
	stop, err := b.Tasks("f", func([]byte, bool) { close(began); <-release; events = append(events, "handled") })
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Submit("f", nil); err != nil {
		t.Fatal(err)
	}
	<-began
	nc.Close()
	go close(release)
	stop()
	events = append(events, "stopped")
	if want := []string{"handled", "stopped"}; !reflect.DeepEqual(events, want) {
		t.Errorf("%v, want %v", events, want)
	}
	stop() // does nothing
	if _, err := b.Tasks("f", nil); err == nil {
		t.Error("a closed connection subscribes")
	}
}

package queue

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

var errNotHeld = errors.New("overtaken")

// publisher is JetStream with other ways to publish, if they are set.
type publisher struct {
	jetstream.JetStream
	once  func() (*jetstream.PubAck, error)
	twice bool
	claim func() error
}

func (p publisher) PublishMsg(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	if p.once != nil {
		return p.once()
	}
	ack, err := p.JetStream.PublishMsg(ctx, m, opts...)
	if p.twice {
		return p.JetStream.PublishMsg(ctx, m, opts...)
	}
	return ack, err
}

func (p publisher) PublishMsgAsync(m *nats.Msg, opts ...jetstream.PublishOpt) (jetstream.PubAckFuture, error) {
	if p.claim != nil {
		if err := p.claim(); err != nil {
			return nil, err
		}
	}
	return p.JetStream.PublishMsgAsync(m, opts...)
}

// unpurged is a stream that purges nothing.
type unpurged struct{ jetstream.Stream }

func (unpurged) Purge(context.Context, ...jetstream.StreamPurgeOpt) error { return errBroken }

var errBroken = errors.New("broken by the test")

// TestReleaseBeforeRunsNoWithdrawnRecord has a journal read a withdrawal without the field
// Withdrawn, as the release before does. The record waits, then becomes a dead letter, and never
// runs.
func TestReleaseBeforeRunsNoWithdrawnRecord(t *testing.T) {
	_, nc := openCluster(t, natstest.Start(t, 1), 0)
	j := openJournal(t, nc, JournalConfig{Held: func() error { return errNotHeld }})
	for i, s := range j.shards {
		j.shards[i] = unpurged{s}
	}
	if err := j.Append("f", "a", []byte("x")); !errors.Is(err, ErrStopped) {
		t.Fatalf("got %v, want ErrStopped", err)
	}
	raw, err := j.shards[j.shard("a")].GetLastMsgForSubject(t.Context(), j.subject("f", "a"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := j.load(t.Context(), j.shards[j.shard("a")], raw.Sequence)
	if err != nil || m.header.Get(headWithdrawn) == "" {
		t.Fatalf("the last state has the header %v, %v; want a withdrawal", m.header, err)
	}
	m.header.Del(headWithdrawn)
	if _, err := j.store(m); err != nil {
		t.Fatal(err)
	}
	next := openJournal(t, nc, JournalConfig{})
	if len(next.lines.delayed) != 1 || time.Until(next.lines.delayed[0].at) < withdrawnFor/2 {
		t.Fatalf("delayed %+v, want the record, for about %v", next.lines.delayed, withdrawnFor)
	}
	next.lines.delayed[0].at = time.Now()
	work(t, next, func(context.Context, Record) End { t.Error("the record runs"); return End{} })
	empty(t, next)
	if _, data, err := next.DeadLetter(t.Context(), "a"); err != nil || string(data) != "x" {
		t.Errorf("the dead letter has %q, %v; want the record's content", data, err)
	}
}

// TestRedrivenCallbackIsWithdrawn has an overtaken process redrive a callback that the next process
// has begun to deliver. The redrive succeeds, because the callback is delivered.
func TestRedrivenCallbackIsWithdrawn(t *testing.T) {
	of := natstest.Start(t, 1)
	_, nc := openCluster(t, of, 0)
	fail := func(_ context.Context, r Record) End {
		if r.Kind == Run {
			return End{Callback: []byte("result"), To: "host"}
		}
		return End{Err: errBroken}
	}
	var overtake func()
	j := openJournal(t, nc, JournalConfig{Held: func() error {
		if overtake == nil {
			return nil
		}
		overtake()
		return errNotHeld
	}})
	stop := work(t, j, fail)
	enter(t, j, "f", "a", "x")
	empty(t, j)
	stop()
	const id = "a.callback"
	delivered, goOn := make(chan Record, 1), make(chan struct{})
	var next *Journal
	overtake = func() {
		_, other := openCluster(t, of, 0)
		next = openJournal(t, other, JournalConfig{})
		work(t, next, func(_ context.Context, r Record) End { delivered <- r; <-goOn; return End{} })
		if r := <-delivered; r.ID != id || !r.Redelivered {
			t.Errorf("the next process begins %+v, want a callback, marked as a repetition", r)
		}
	}
	if err := j.Redrive(t.Context(), id); err != nil {
		t.Errorf("got %v, want nil, because the callback is delivered", err)
	}
	close(goOn)
	empty(t, next)
}

// fragile is a stream that takes one deletion.
type fragile struct {
	jetstream.Stream
	used *bool
}

func (f fragile) DeleteMsg(ctx context.Context, seq uint64) error {
	if *f.used {
		return errBroken
	}
	*f.used = true
	return f.Stream.DeleteMsg(ctx, seq)
}

func (f fragile) Purge(ctx context.Context, opts ...jetstream.StreamPurgeOpt) error {
	if *f.used {
		return errBroken
	}
	*f.used = true
	return f.Stream.Purge(ctx, opts...)
}

// TestWithdrawalIsDeletedWithItsRecord has a start delete a withdrawal, which a server with a late
// clock has stored. The start fails after one deletion. The record must not run.
func TestWithdrawalIsDeletedWithItsRecord(t *testing.T) {
	_, nc := openCluster(t, natstest.Start(t, 1), 0)
	j := openJournal(t, nc, JournalConfig{Shards: 1, Held: func() error { return errNotHeld }})
	stream := j.shards[0]
	j.shards[0] = unpurged{stream}
	if err := j.Append("f", "a", []byte("x")); !errors.Is(err, ErrStopped) {
		t.Fatalf("got %v, want ErrStopped", err)
	}
	var all []found
	if err := scan(t.Context(), j, stream, func(f found) { all = append(all, f) }); err != nil || len(all) != 2 {
		t.Fatalf("the stream has %d states, %v; want the record and its withdrawal", len(all), err)
	}
	all[1].at = all[0].at.Add(-time.Second)
	j.shards[0] = fragile{stream, new(bool)}
	_ = index(t.Context(), j, all) // may fail
	if s := openJournal(t, nc, JournalConfig{Shards: 1}).Stats(); s.Resumed != 0 {
		t.Errorf("the next start has found %d records, want none", s.Resumed)
	}
}

// TestOvertakenProcessWithdrawsRecords has a process store a record although another process has
// overtaken it. Either the record is refused and does not run, or it is accepted and runs.
func TestOvertakenProcessWithdrawsRecords(t *testing.T) {
	of := natstest.Start(t, 1)
	_, nc := openCluster(t, of, 0)
	ran := make(chan string, 10)
	run := func(_ context.Context, r Record) End { ran <- r.ID; return End{} }
	// appendOvertaken appends a record. The process is overtaken when overtake returns.
	appendOvertaken := func(t *testing.T, change func(*Journal), overtake func()) (*Journal, error) {
		t.Helper()
		j := openJournal(t, nc, JournalConfig{Held: func() error { overtake(); return errNotHeld }})
		if change != nil {
			change(j)
		}
		work(t, j, func(context.Context, Record) End {
			t.Error("the first process runs a record without the lease")
			return End{}
		})
		err := j.Append("f", t.Name(), []byte(strings.Repeat("x", blobAbove+1)))
		if s := j.Stats(); s.Bytes != 0 || len(s.Pending) != 0 {
			t.Errorf("the first process still counts the record: %+v", s)
		}
		return j, err
	}
	refused := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, ErrStopped) || !errors.Is(err, errNotHeld) || strings.Contains(err.Error(), "may be carried out") {
			t.Errorf("got %v, want ErrStopped and the cause, and no doubt", err)
		}
	}
	nothingRuns := func(t *testing.T, next *Journal) {
		t.Helper()
		stop := work(t, next, run)
		empty(t, next)
		stop()
		if len(ran) != 0 {
			t.Errorf("%s runs, which was refused", <-ran)
		}
	}

	t.Run("the next process has read the journal before", func(t *testing.T) {
		next := openJournal(t, nc, JournalConfig{})
		_, err := appendOvertaken(t, nil, func() {})
		refused(t, err)
		nothingRuns(t, next)
	})
	t.Run("the next process knows the record", func(t *testing.T) {
		var next *Journal
		_, err := appendOvertaken(t, nil, func() { next = openJournal(t, nc, JournalConfig{}) })
		refused(t, err)
		if s := next.Stats(); s.Resumed != 1 {
			t.Errorf("the next process has found %d records, want one", s.Resumed)
		}
		nothingRuns(t, next)
	})
	t.Run("the client of NATS sends the withdrawal twice", func(t *testing.T) {
		_, err := appendOvertaken(t, func(j *Journal) { j.js = publisher{JetStream: j.js, twice: true} }, func() {})
		refused(t, err)
		nothingRuns(t, openJournal(t, nc, JournalConfig{}))
	})
	t.Run("the withdrawal stays in the stream", func(t *testing.T) {
		var known *Journal
		_, err := appendOvertaken(t, func(j *Journal) {
			for i, s := range j.shards {
				j.shards[i] = unpurged{s}
			}
		}, func() { known = openJournal(t, nc, JournalConfig{}) })
		refused(t, err)
		stop := work(t, known, run)
		until(t, "the next process to forget the record", func() bool { return len(known.Stats().Pending) == 0 })
		stop()
		last := openJournal(t, nc, JournalConfig{})
		if s := last.Stats(); s.Resumed != 0 {
			t.Errorf("a process has found %d records, want none", s.Resumed)
		}
		nothingRuns(t, last)
	})
	t.Run("the next process has begun the record", func(t *testing.T) {
		begun, goOn := make(chan struct{}), make(chan struct{})
		var next *Journal
		_, err := appendOvertaken(t, nil, func() {
			next = openJournal(t, nc, JournalConfig{})
			work(t, next, func(_ context.Context, r Record) End { close(begun); <-goOn; return End{} })
			<-begun
		})
		close(goOn)
		if err != nil {
			t.Errorf("got %v, want nil, because the record runs", err)
		}
		empty(t, next)
	})
	t.Run("the next process has ended the record", func(t *testing.T) {
		_, err := appendOvertaken(t, nil, func() {
			next := openJournal(t, nc, JournalConfig{})
			stop := work(t, next, run)
			empty(t, next)
			stop()
		})
		if got := <-ran; err != nil || got != t.Name() {
			t.Errorf("%s has run, and got %v; want nil", got, err)
		}
	})
	t.Run("the next process is not sure that it has begun the record", func(t *testing.T) {
		claimed, healed := make(chan struct{}), make(chan struct{})
		_, other := openCluster(t, of, 0) // the next process notices that NATS does not answer
		var next *Journal
		var stop func()
		_, err := appendOvertaken(t, nil, func() {
			next = openJournal(t, other, JournalConfig{})
			next.js = publisher{JetStream: next.js, claim: func() error {
				select {
				case <-healed:
					return nil
				case claimed <- struct{}{}:
				default:
				}
				return nats.ErrTimeout
			}}
			stop = work(t, next, run)
			<-claimed
		})
		refused(t, err)
		close(healed)
		empty(t, next)
		stop()
		if len(ran) != 0 {
			t.Errorf("%s runs, which was refused", <-ran)
		}
	})
	t.Run("the stream does not answer", func(t *testing.T) {
		j, err := appendOvertaken(t, func(j *Journal) {
			j.js = publisher{JetStream: j.js, once: func() (*jetstream.PubAck, error) { return nil, context.DeadlineExceeded }}
		}, func() {})
		if !errors.Is(err, ErrStopped) || !strings.Contains(err.Error(), "may be carried out") {
			t.Errorf("got %v, want ErrStopped and that the request may be carried out", err)
		}
		j.mu.Lock()
		if len(j.lost) != 1 {
			t.Errorf("%d lost records, want the one that may be in the stream", len(j.lost))
		}
		j.mu.Unlock()
		next := openJournal(t, nc, JournalConfig{})
		work(t, next, run)
		if got := <-ran; got != t.Name() {
			t.Errorf("%s runs, want the record that was not withdrawn", got)
		}
		empty(t, next)
	})
}

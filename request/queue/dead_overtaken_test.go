package queue

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// slowStart is a start of the next process in two parts, between which the overtaken process acts.
type slowStart struct {
	t    *testing.T
	next *Journal
	all  []found
}

// readJournal is the first part: the next process reads the records, which are one.
func (s *slowStart) readJournal() {
	s.t.Helper()
	s.readStates()
	if len(s.all) != 1 {
		s.t.Fatalf("the next process reads %d records, want one", len(s.all))
	}
}

func (s *slowStart) readStates() {
	s.t.Helper()
	for i, shard := range s.next.shards {
		if err := scan(s.t.Context(), s.next, shard, func(f found) { f.shard = int32(i); s.all = append(s.all, f) }); err != nil {
			s.t.Fatal(err)
		}
	}
}

// goOn is the second part: the next process reads the dead letters, and begins.
func (s *slowStart) goOn() {
	s.t.Helper()
	if err := index(s.t.Context(), s.next, s.all); err != nil {
		s.t.Fatal(err)
	}
}

// overtaken returns a journal that is not held any more once overtake is set, and the next process,
// which has not begun.
func overtaken(t *testing.T) (j *Journal, overtake *func(), next *slowStart) {
	t.Helper()
	of := natstest.Start(t, 1)
	_, nc := openCluster(t, of, 0)
	_, other := openCluster(t, of, 0)
	next = &slowStart{t: t, next: openJournal(t, other, JournalConfig{})}
	overtake = new(func())
	j = openJournal(t, nc, JournalConfig{Held: func() error {
		if *overtake == nil {
			return nil
		}
		(*overtake)()
		return errNotHeld
	}})
	return j, overtake, next
}

// fails is the work of a record that becomes a dead letter.
func fails(context.Context, Record) End { return End{Err: errBroken} }

// makeLetter stores a dead letter, with a large content.
func makeLetter(t *testing.T, j *Journal) (content string) {
	t.Helper()
	content = strings.Repeat("x", blobAbove+1)
	stop := work(t, j, fails)
	enter(t, j, "f", "a", content)
	empty(t, j)
	stop()
	return content
}

// keeps checks that the next process has the dead letter and no record, and can redrive the letter.
func (s *slowStart) keeps(content string) {
	t := s.t
	t.Helper()
	if n := len(s.next.Stats().Pending); n != 0 {
		t.Errorf("the next process has records of %d functions, want none", n)
	}
	if all := letters(t, s.next); len(all) != 1 || all[0].ID != "a" {
		t.Fatalf("the next process has the dead letters %+v, want that of a", all)
	}
	if _, data, err := s.next.DeadLetter(t.Context(), "a"); err != nil || string(data) != content {
		t.Errorf("the letter has %d bytes, %v; want the %d of the request", len(data), err, len(content))
	}
	s.runs(content, func() {
		if err := s.next.Redrive(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	})
}

// runs checks that the next process runs the record once, and has no letter then.
func (s *slowStart) runs(content string, begin func()) {
	t := s.t
	t.Helper()
	ran := make(chan Record, 10)
	stop := work(t, s.next, func(_ context.Context, r Record) End { ran <- r; return End{} })
	begin()
	select {
	case r := <-ran:
		if r.ID != "a" || string(r.Data) != content {
			t.Errorf("record %s of %d bytes runs, want a with %d", r.ID, len(r.Data), len(content))
		}
	case <-time.After(waitLimit):
		t.Fatal("the record does not run")
	}
	empty(t, s.next)
	stop()
	if len(ran) != 0 {
		t.Error("the record runs again")
	}
	info, err := s.next.dead.stream.Info(t.Context())
	if err != nil || info.State.Msgs != 0 || len(letters(t, s.next)) != 0 {
		t.Errorf("%+v dead letters are left, %v", info, err)
	}
}

// TestWithdrawnRedriveKeepsItsLetter has an overtaken process withdraw a redriven letter after the
// next process has read the record, and before that process looks at the letters.
func TestWithdrawnRedriveKeepsItsLetter(t *testing.T) {
	j, overtake, next := overtaken(t)
	content := makeLetter(t, j)
	*overtake = next.readJournal
	if err := j.Redrive(t.Context(), "a"); !errors.Is(err, ErrStopped) {
		t.Fatalf("got %v, want ErrStopped", err)
	}
	next.goOn()
	next.keeps(content)
}

// TestWithdrawalThatStaysKeepsTheLetter does the same, and the withdrawal is not deleted.
func TestWithdrawalThatStaysKeepsTheLetter(t *testing.T) {
	j, overtake, next := overtaken(t)
	content := makeLetter(t, j)
	*overtake = next.readJournal
	for i, s := range j.shards {
		j.shards[i] = unpurged{s}
	}
	if err := j.Redrive(t.Context(), "a"); !errors.Is(err, ErrStopped) {
		t.Fatalf("got %v, want ErrStopped", err)
	}
	next.goOn()
	next.keeps(content)
}

// TestClaimedRedriveCannotBeWithdrawn has the next process claim a redriven record, and delete its
// letter, before the overtaken process withdraws the record.
func TestClaimedRedriveCannotBeWithdrawn(t *testing.T) {
	j, overtake, next := overtaken(t)
	content := makeLetter(t, j)
	*overtake = func() { next.readJournal(); next.goOn() }
	if err := j.Redrive(t.Context(), "a"); err != nil {
		t.Errorf("got %v, want nil, because the next process has the record", err)
	}
	next.runs(content, func() {})
}

// TestRecordThatDiesKeepsItsLetter has an overtaken process end a record, which becomes a letter,
// after the next process has read the record.
func TestRecordThatDiesKeepsItsLetter(t *testing.T) {
	j, _, next := overtaken(t)
	content := strings.Repeat("x", blobAbove+1)
	enter(t, j, "f", "a", content)
	next.readJournal()
	work(t, j, fails)
	empty(t, j)
	next.goOn()
	next.keeps(content)
}

// TestOvertakenProcessDeletesNoClaimedRecord has an overtaken process store a record as a letter,
// and delete the record after the next process has claimed it. The overtaken process does not know
// all states of the record.
func TestOvertakenProcessDeletesNoClaimedRecord(t *testing.T) {
	j, overtake, next := overtaken(t)
	content := strings.Repeat("x", blobAbove+1)
	enter(t, j, "f", "a", content)
	next.readJournal()
	j.markUncertain(j.subject("f", "a"))
	j.shards[j.shard("a")] = beforeEnd{j.shards[j.shard("a")], sync.OnceFunc(func() {
		next.goOn()
		*overtake = func() {}
	})}
	work(t, j, fails)
	until(t, "the overtaken process to end the record", func() bool { return len(j.Stats().Pending) == 0 })
	next.runs(content, func() {})
}

// beforeEnd is a stream that calls f before the states of a record are read or deleted.
type beforeEnd struct {
	jetstream.Stream
	f func()
}

func (b beforeEnd) GetLastMsgForSubject(ctx context.Context, subject string) (*jetstream.RawStreamMsg, error) {
	b.f()
	return b.Stream.GetLastMsgForSubject(ctx, subject)
}

func (b beforeEnd) Purge(ctx context.Context, opts ...jetstream.StreamPurgeOpt) error {
	b.f()
	return b.Stream.Purge(ctx, opts...)
}

// TestWithdrawalSentTwiceKeepsTheLetter has the client of NATS send a withdrawal twice. In between,
// the next process starts, and deletes the withdrawn record. The overtaken process cannot tell this
// from a record that has ended, and must not delete the letter.
func TestWithdrawalSentTwiceKeepsTheLetter(t *testing.T) {
	j, overtake, next := overtaken(t)
	content := makeLetter(t, j)
	*overtake = func() {}
	j.js = resent{j.js, func() {
		next.readStates()
		next.goOn()
	}}
	if err := j.Redrive(t.Context(), "a"); err != nil {
		t.Errorf("got %v, want nil, because the record may have ended", err)
	}
	next.keeps(content)
}

// resent is JetStream that publishes a message twice, with a call of between in between.
type resent struct {
	jetstream.JetStream
	between func()
}

func (r resent) PublishMsg(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	again := &nats.Msg{Subject: m.Subject, Header: maps.Clone(m.Header), Data: m.Data}
	if _, err := r.JetStream.PublishMsg(ctx, m, opts...); err != nil {
		return nil, err
	}
	r.between()
	return r.JetStream.PublishMsg(ctx, again, opts...)
}

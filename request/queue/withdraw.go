package queue

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A process that was overtaken may store a record after the next process has read the journal. The
// next process does not know the record, so the overtaken process must not accept it. It withdraws
// the record with a conditional write: a last state that says that the record must not run. The
// next process begins a record with a conditional write, too. The stream takes only one of the two.

// withdrawTimeout bounds how long a client waits for a withdrawal.
const withdrawTimeout = 2 * time.Second

// withdrawAgain is the time between two attempts, while the stream refuses all writes.
const withdrawAgain = 100 * time.Millisecond

// withdrawnFor is how long the release before, which does not know withdrawals, leaves a withdrawal
// alone. By then, the process that has withdrawn the record has deleted it, unless it was killed.
const withdrawnFor = time.Hour

// confirm decides whether this process accepts a record that it has just stored. theirs is true if
// another process has begun the record. After an error, the record does not run. Only if the error
// is unanswered, the record may run.
func confirm(j *Journal, m *message, shard int32, seq uint64) (theirs bool, err error) {
	if j.cfg.Held == nil {
		return false, nil
	}
	lost := j.cfg.Held()
	if lost == nil {
		return false, nil
	}
	theirs, err = withdraw(j, m, shard, seq)
	switch {
	case theirs:
		j.log.Info("another process has begun a record of this one", "record", m.subject)
		return true, nil
	case err != nil:
		return false, unanswered{fmt.Errorf("%w: %w; the request may be carried out, because it could not be withdrawn: %w", ErrStopped, lost, err)}
	}
	return false, fmt.Errorf("%w: %w", ErrStopped, lost)
}

// withdraw prevents other processes from running the record m, whose only state has the sequence
// seq. theirs is true if another process has begun the record before.
func withdraw(j *Journal, m *message, shard int32, seq uint64) (theirs bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), withdrawTimeout)
	defer cancel()
	last, theirs, err := storeWithdrawal(ctx, j, m, shard, seq)
	if theirs || err != nil {
		return theirs, err
	}
	// A file with the record's content stays, because another process may be reading it. The next
	// start deletes the file, and the withdrawal if it could not be deleted here.
	if err := j.purge(ctx, j.shards[shard], m.subject, last+1); err != nil {
		j.log.Warn("failed to delete a withdrawn record; the next start deletes it", "record", m.subject, "error", err)
	}
	return false, nil
}

// withdrawal returns the state that withdraws the record m.
//
// During a rolling update, the next process may be of the release before, which does not know the
// field Withdrawn. For that release, the state is a record that has to wait, and that too many
// processes have started. So it does not run the record. If the state stays, the record becomes a
// dead letter. It has its content, because it may replace a letter that was redriven.
func withdrawal(m *message) *nats.Msg {
	last := &message{header: maps.Clone(m.header)}
	last.set(headWithdrawn, "1")
	last.setNumber(headStarts, maxStarts)
	last.setNumber(headAfter, time.Now().Add(withdrawnFor).UnixNano())
	last.keepAccepted(m)
	msg := &nats.Msg{Subject: m.subject, Header: last.header}
	if m.header.Get(headBlob) == "" {
		msg.Data = m.data
	}
	return msg
}

// storeWithdrawal stores a withdrawal of m on top of the state seq, and returns its sequence.
func storeWithdrawal(ctx context.Context, j *Journal, m *message, shard int32, seq uint64) (last uint64, theirs bool, err error) {
	for {
		msg := withdrawal(m) // a new one per attempt, because PublishMsg changes the header
		ack, err := j.js.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(seq))
		var api *jetstream.APIError
		switch {
		case err == nil:
			return ack.Sequence, false, nil
		case errors.As(err, &api) && wrongSequence(api):
			return conflicting(ctx, j, m.subject, shard)
		case api == nil && !errors.Is(err, jetstream.ErrNoStreamResponse):
			return 0, false, err
		}
		if !pause(ctx, withdrawAgain) { // the stream has stored nothing, so try again
			return 0, false, err
		}
	}
}

// conflicting reads the state that made a withdrawal fail. That state may be the withdrawal itself,
// because the client of NATS may send a message twice.
func conflicting(ctx context.Context, j *Journal, subject string, shard int32) (last uint64, theirs bool, err error) {
	raw, err := j.shards[shard].GetLastMsgForSubject(ctx, subject)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return 0, true, nil // another process has even ended the record
	case err != nil:
		return 0, false, err
	case raw.Header.Get(headWithdrawn) != "":
		return raw.Sequence, false, nil
	}
	return 0, true, nil
}

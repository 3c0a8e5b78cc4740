package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// errOvertaken means that a record has another state than this process knows: another process has
// changed it, or a change of this process was stored although no answer came.
var errOvertaken = errors.New("queue: the record was changed meanwhile")

// reread returns the stored state of a record that was changed meanwhile. from is the state that
// this process knows.
func reread(ctx context.Context, j *Journal, from state, m *message) state {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	raw, err := j.shards[from.item.shard].GetLastMsgForSubject(ctx, m.subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		j.log.Info("another process has ended a record", "record", m.subject)
		from.gone = true
		return from
	}
	if err != nil {
		j.log.Warn("failed to read a record; trying again", "record", m.subject, "error", err)
		from.at, from.item.old = time.Now().Add(time.Second), true
		return from
	}
	if raw.Header.Get(headWithdrawn) != "" {
		j.log.Info("another process has withdrawn a record", "record", m.subject)
		from.gone = true
		return from
	}
	j.log.Info("another process has changed a record; it goes on from there", "record", m.subject)
	now := &message{subject: raw.Subject, header: raw.Header, data: raw.Data, at: raw.Time}
	function, _, _ := names(m.subject) // of a record that was read before
	from.key = lineKey{now.kind(), function}
	if from.key.kind == Callback {
		from.key.name = now.header.Get(headTo)
	}
	from.item.seq, from.item.old = raw.Sequence, true
	size := cmp.Or(now.header.Get(headSize), strconv.Itoa(len(now.data)))
	from.item.size, _ = strconv.ParseInt(size, 10, 64) // the field is the journal's
	if wait := backOff(now.number(headAfter), now.at, time.Now()); wait > 0 {
		from.at = time.Now().Add(wait)
	}
	return from
}

// missing returns the next state of a record whose known state, is, was deleted from the stream. If
// another process has ended the record, the record is gone. But an overtaken process may have
// stored the next state after this process had read the stream, and may have ended then.
func missing(ctx context.Context, j *Journal, is state) state {
	if j.cfg.Disk.cluster != nil {
		next, err := successor(ctx, j, is.item)
		switch {
		case err != nil:
			j.log.Warn("failed to look for a record's next state; trying again", "function", is.item.account.function, "error", err)
			is.at = time.Now().Add(time.Second)
			return is
		case next != "":
			return reread(ctx, j, is, &message{subject: next})
		}
	}
	logMissing(j, is.item)
	is.gone = true
	return is
}

// successor returns the subject of the state that was stored in place of an item; empty: there is
// none. Each state has the sequence of the one before it. successor reads the later records of the
// item's function in the item's shard.
func successor(ctx context.Context, j *Journal, it item) (subject string, err error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	filter := string(append(appendToken(fmt.Appendf(nil, "journal.%d.", it.shard), it.account.function), ".>"...))
	before := strconv.FormatUint(it.seq, 10)
	for next := it.seq + 1; ; {
		raw, err := j.shards[it.shard].GetMsg(ctx, next, jetstream.WithGetMsgSubject(filter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		if raw.Header.Get(jetstream.ExpectedLastSubjSeqHeader) == before {
			return raw.Subject, nil
		}
		next = raw.Sequence + 1
	}
}

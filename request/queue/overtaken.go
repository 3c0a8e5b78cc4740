package queue

import (
	"cmp"
	"context"
	"errors"
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

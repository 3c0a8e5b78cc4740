package queue

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"
)

// A record is lost if its Append failed because the disk did not answer in time. The stream may
// have the record, or get it soon. The journal deletes lost records so that they do not run. The
// client of a lost record got an error, and has probably sent the request again under a new id.

// mostLost bounds how many lost records a journal remembers. Further lost records are not deleted,
// so the next start runs them.
const mostLost = 4096

// lost describes a lost record.
type lost struct {
	at    time.Time // when its Append gave up
	shard int32
	blob  string // its file, if it is large
	keep  uint64 // First sequence that can belong to a later record with the same id; 0: unknown.
}

// unanswered is an error of a publish that the stream may still have taken.
type unanswered struct{ error }

func (u unanswered) Unwrap() error { return u.error }

// recordLost remembers m as lost in two cases: err means that the stream did not answer, or an
// earlier record with m's id is lost (then was is set). The caller holds j.mu.
func (j *Journal) recordLost(m *message, shard int32, err error, was bool) {
	if was {
		delete(j.uncertain, m.subject)
	} else if u := (unanswered{}); !errors.As(err, &u) || len(j.lost) >= mostLost {
		return
	}
	j.lost[m.subject] = lost{at: time.Now(), shard: shard, blob: m.header.Get(headBlob)}
	select {
	case j.losing <- struct{}{}:
	default: // the goroutine is awake already
	}
}

// takeLost reports whether a record with this subject is lost, and removes it from j.lost. The
// caller appends a new record under the same subject. From now on, the subject may have states that
// the journal does not know.
func (j *Journal) takeLost(subject string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, is := j.lost[subject]
	if is {
		delete(j.lost, subject)
		j.uncertain[subject] = true
	}
	return is
}

// deleteLost deletes lost records until ctx ends.
func (j *Journal) deleteLost(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-j.losing:
		case <-ctx.Done():
			return
		}
		for left := true; left; left = j.deleteLostBefore(ctx, time.Now().Add(-appendTimeout)) {
			pause.Reset(appendTimeout)
			select {
			case <-pause.C:
			case <-ctx.Done():
				return
			}
		}
	}
}

// deleteLostBefore deletes the records that were lost at the given time or earlier, if the disk has
// room. left reports whether lost records remain. The caller passes a time that is appendTimeout
// ago, because records lost later may still be on their way to the stream.
func (j *Journal) deleteLostBefore(ctx context.Context, then time.Time) (left bool) {
	if j.cfg.Disk.room(0, changeRoom) != nil { // deletions of lost records do not use the reserve
		return true
	}
	last := map[int32]uint64{} // last sequence per shard
	j.mu.Lock()
	subjects := slices.Collect(maps.Keys(j.lost))
	j.mu.Unlock()
	for _, subject := range subjects {
		if err := j.deleteLostRecord(ctx, subject, then, last); err != nil {
			j.log.Warn("failed to delete a refused record; trying again", "record", subject, "error", err)
			return true
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.lost) > 0
}

func (j *Journal) deleteLostRecord(ctx context.Context, subject string, then time.Time, last map[int32]uint64) error {
	j.mu.Lock()
	l, is := j.lost[subject]
	j.mu.Unlock()
	if !is || l.at.After(then) {
		return nil
	}
	if _, known := last[l.shard]; !known {
		ctx, cancel := context.WithTimeout(ctx, appendTimeout)
		defer cancel()
		info, err := j.shards[l.shard].Info(ctx)
		if err != nil {
			return err
		}
		last[l.shard] = info.State.LastSeq
	}
	j.mu.Lock()
	// Otherwise it was appended again meanwhile, and any new message gets a later sequence.
	l, is = j.lost[subject]
	delete(j.lost, subject)
	j.mu.Unlock()
	if !is {
		return nil
	}
	if l.keep == 0 {
		l.keep = last[l.shard] + 1
	}
	if err := j.purge(ctx, j.shards[l.shard], subject, l.keep); err != nil {
		j.mu.Lock()
		j.lost[subject] = l
		j.mu.Unlock()
		return err
	}
	return j.blobs.drop(l.blob)
}

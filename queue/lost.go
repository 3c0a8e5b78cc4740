package queue

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"
)

// A record is lost when its Append was refused because no answer of the disk came in time. The
// stream may have it, or get it soon. It must not run at the next start: who sent it has been told
// that it was refused, and has probably sent it again under a new id.

// mostLost bounds how many lost records a journal notes. More stay until the next start.
const mostLost = 4096

// lost is what a journal knows of a lost record.
type lost struct {
	at    time.Time // when it was given up
	shard int32
	blob  string // its file, if it is large
	keep  uint64 // the first sequence that can be of a later record with the same id; 0: not known yet
}

// unanswered is an error of a publish that the stream may have taken all the same.
type unanswered struct{ error }

func (u unanswered) Unwrap() error { return u.error }

// lose notes that m is lost if err says so, or if an earlier record with its id is: was. The caller
// holds j.mu.
func (j *Journal) lose(m *message, shard int32, err error, was bool) {
	if was {
		delete(j.doubts, m.subject)
	} else if u := (unanswered{}); !errors.As(err, &u) || len(j.lost) >= mostLost {
		return
	}
	j.lost[m.subject] = lost{at: time.Now(), shard: shard, blob: m.header.Get(headBlob)}
	select {
	case j.losing <- struct{}{}:
	default: // it looks anyway
	}
}

// find reports whether a record that is appended is lost. From now on it is one that may have
// earlier states.
func (j *Journal) find(subject string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, is := j.lost[subject]
	if is {
		delete(j.lost, subject)
		j.doubts[subject] = true
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

// deleteLostBefore deletes the records that were lost until then, if the disk has room, and reports
// whether lost records are left. Those lost within appendTimeout may still be on their way to the
// stream.
func (j *Journal) deleteLostBefore(ctx context.Context, then time.Time) (left bool) {
	if j.cfg.Disk.room(0, changeRoom) != nil { // the reserve is for others
		return true
	}
	last := map[int32]uint64{} // sequences of the shards
	j.mu.Lock()
	subjects := slices.Collect(maps.Keys(j.lost))
	j.mu.Unlock()
	for _, subject := range subjects {
		if err := j.deleteLostRecord(ctx, subject, then, last); err != nil {
			j.log.Warn("a record that was refused cannot be deleted now", "record", subject, "error", err)
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
	l, is = j.lost[subject] // else it was appended again meanwhile; from now on, that gets a later sequence
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

package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// found is a message of a stream without its data.
type found struct {
	message
	seq   uint64
	shard int32
	size  int64 // size of the content
}

// recover rebuilds the index. Records that were in work when the previous process ended run at
// once.
func (j *Journal) recover(ctx context.Context) error {
	var all []found
	for i, s := range j.shards {
		if err := scan(ctx, j, s, func(f found) { f.shard = int32(i); all = append(all, f) }); err != nil {
			return err
		}
	}
	return index(ctx, j, all)
}

// index rebuilds j's index from all messages of the shards, which it sorts by time.
func index(ctx context.Context, j *Journal, all []found) error {
	slices.SortStableFunc(all, func(a, b found) int { return a.at.Compare(b.at) })
	// A kill between storing a record's next state and deleting the previous state leaves both. The
	// later state counts.
	latest, err := latestStates(ctx, j, all)
	if err != nil {
		return err
	}
	letters, dead, err := lettersOf(ctx, j) // after the records, because a record becomes a letter
	if err != nil {
		return err
	}
	now, named, there := time.Now(), map[string]bool{}, map[string]bool{}
	for i := range all {
		f := &all[i]
		last, counts := latest[f.subject]
		if !counts {
			continue
		}
		if f.seq < last {
			if err := j.remove(j.shards[f.shard], f.seq); err != nil {
				return err
			}
			continue
		}
		function, id, err := names(f.subject)
		if err != nil {
			j.log.Error("unknown message in the journal; it is kept", "subject", f.subject, "error", err)
			continue
		}
		if j.cfg.Disk.cluster != nil && dead[deadID(id, f.kind())] {
			if ours, err := claim(ctx, j, f); err != nil {
				return err
			} else if !ours {
				continue
			}
		}
		key := lineKey{f.kind(), function}
		if key.kind == Callback {
			key.name = f.header.Get(headTo)
		}
		there[deadID(id, key.kind)] = true
		named[f.header.Get(headBlob)] = true
		it := item{seq: f.seq, size: f.size, account: j.lines.open(function, f.size), shard: f.shard, old: true}
		wait := backOff(f.number(headAfter), f.at, now)
		j.lines.push(key, it, now.Add(wait), now)
		j.cfg.Found(f.left(function, id, now, wait))
		j.stats.Resumed++
	}
	j.recoverDead(letters, there, named)
	return j.blobs.sweep(named)
}

// latestStates returns the sequence of each record's latest state. It deletes withdrawn records,
// each with one call: if it deleted only the withdrawal, the record would run.
func latestStates(ctx context.Context, j *Journal, all []found) (map[string]uint64, error) {
	last := map[string]*found{}
	for i := range all {
		if f := &all[i]; last[f.subject] == nil || f.seq > last[f.subject].seq {
			last[f.subject] = f
		}
	}
	latest := make(map[string]uint64, len(last))
	for subject, f := range last {
		if f.header.Get(headWithdrawn) == "" {
			latest[subject] = f.seq
		} else if err := j.purge(ctx, j.shards[f.shard], subject, f.seq+1); err != nil {
			return nil, err
		}
	}
	return latest, nil
}

// left describes a record that a start has found. wait is the time until its next attempt.
func (f *found) left(function, id string, now time.Time, wait time.Duration) Found {
	out := Found{ID: id, Function: function, Kind: f.kind(), Failed: int(f.number(headFailed)), Accepted: f.at}
	if at := f.number(headAccepted); at != 0 {
		out.Accepted = time.Unix(0, at)
	}
	if wait > 0 {
		out.Next = now.Add(wait)
	}
	return out
}

// backOff returns how much of a record's back-off is left. end is the end of the back-off in Unix
// nanoseconds. stored is the time when the back-off began. The result is at most the whole
// back-off, even if the clock has been set back.
func backOff(end int64, stored, now time.Time) time.Duration {
	at := time.Unix(0, end)
	return max(0, min(at.Sub(now), at.Sub(stored)))
}

// names splits a subject: journal.SHARD.FUNCTION.ID or, of earlier versions, journal.SHARD.ID.
// Subjects of dead letters look alike.
func names(subject string) (function, id string, err error) {
	tokens := strings.Split(subject, ".")
	if tokens[0] == "journal" && len(tokens) > 1 {
		tokens = tokens[1:] // skips the shard
	}
	tokens = tokens[1:]
	if len(tokens) == 0 || len(tokens) > 2 {
		return "", "", fmt.Errorf("subject %q, want one or two names", subject)
	}
	if len(tokens) == 2 {
		if function, err = Name(tokens[0]); err != nil {
			return "", "", err
		}
	}
	id, err = Name(tokens[len(tokens)-1])
	return function, id, err
}

// markSuffix ends the subject of a mark: a message that only says how far a server has to read. No
// record has such a subject, in no release.
const markSuffix = ".scan.mark.end"

// markWait is how long a server may lag behind.
const markWait = 30 * time.Second

// mark stores a mark in a stream with several copies, and returns its sequence. A consumer reads
// the copy of any server, which may lack the newest messages and the newest deletions for a while.
// Once that copy has the mark, it has had all that was stored before. If mark fails, it returns 0.
func mark(ctx context.Context, j *Journal, s jetstream.Stream) uint64 {
	if j.cfg.Disk.cluster == nil || s.CachedInfo() == nil || s.CachedInfo().Config.Replicas < 2 {
		return 0
	}
	subject := strings.TrimSuffix(s.CachedInfo().Config.Subjects[0], ".>") + markSuffix
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	ack, err := j.js.Publish(ctx, subject, nil)
	if err != nil {
		j.log.Warn("a stream takes no mark, so its newest messages may be overlooked until the next start", "subject", subject, "error", err)
		return 0
	}
	return ack.Sequence
}

// scan calls f with each message of a stream, in order.
func scan(ctx context.Context, j *Journal, s jetstream.Stream, f func(found)) error {
	var old []string
	list := s.ConsumerNames(ctx)
	for name := range list.Name() {
		old = append(old, name)
	}
	if err := list.Err(); err != nil {
		return err
	}
	for _, name := range old { // left by an earlier version or by an interrupted start
		if err := s.DeleteConsumer(ctx, name); err != nil {
			return err
		}
	}
	last := mark(ctx, j, s)
	info, err := s.Info(ctx)
	if err != nil || info.State.Msgs == 0 {
		return err
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour, MaxAckPending: -1, HeadersOnly: true, MemoryStorage: true,
	})
	if err != nil {
		return err
	}
	if err := readAll(ctx, c, info.State.Msgs, last, func(one found) {
		if !strings.HasSuffix(one.subject, markSuffix) {
			f(one)
		}
	}); err != nil {
		return err
	}
	if last > 0 {
		if err := s.Purge(ctx, jetstream.WithPurgeSubject(strings.TrimSuffix(info.Config.Subjects[0], ".>")+markSuffix)); err != nil {
			j.log.Warn("a mark stays in a stream; the next start deletes it", "stream", info.Config.Name, "error", err)
		}
	}
	return s.DeleteConsumer(ctx, c.CachedInfo().Name)
}

// Of a new consumer. In a cluster, another server may have it, and the server of this process may
// learn that a moment later. Until then, it answers that nobody does.
const (
	consumerWait  = 10 * time.Second
	consumerAgain = 50 * time.Millisecond
)

// readAll calls f with the messages of a consumer, of which left are stored, and up to the sequence
// last, if that is not 0.
func readAll(ctx context.Context, c jetstream.Consumer, left, last uint64, f func(found)) error {
	seen := uint64(0)
	for begun := time.Now(); left > 0; {
		batch, err := c.Fetch(int(min(left, 1000)), jetstream.FetchMaxWait(10*time.Second))
		if err != nil {
			return err
		}
		got := uint64(0)
		for m := range batch.Messages() {
			one, err := asFound(m)
			if err != nil {
				return err
			}
			f(one)
			got++
			seen = one.seq
		}
		switch err := batch.Error(); {
		case errors.Is(err, nats.ErrNoResponders) && time.Since(begun) < consumerWait:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(consumerAgain):
			}
		case err != nil:
			return fmt.Errorf("%d messages were not read: %w", left, err)
		case got == 0 && seen >= last:
			if now, err := c.Info(ctx); err == nil && now.NumPending == 0 {
				return nil // another process has deleted the others meanwhile
			}
			return fmt.Errorf("%d messages were not read: %w", left, context.DeadlineExceeded)
		case got == 0 && time.Since(begun) > markWait:
			return fmt.Errorf("the server that reads lags behind: it has no message %d after %v", last, markWait)
		}
		if left -= min(left, got); left == 0 && seen < last {
			left = 1
		}
	}
	return nil
}

func asFound(m jetstream.Msg) (found, error) {
	meta, err := m.Metadata()
	if err != nil {
		return found{}, err
	}
	one := found{message: message{subject: m.Subject(), header: m.Headers(), at: meta.Timestamp}, seq: meta.Sequence.Stream}
	size := cmp.Or(one.header.Get(headSize), one.header.Get("Nats-Msg-Size"))
	one.size, _ = strconv.ParseInt(size, 10, 64) // the field is the server's or the journal's
	return one, nil
}

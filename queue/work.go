package queue

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Record is one entry of the journal as it is given to a worker.
type Record struct {
	ID       string
	Function string // empty: of an earlier version, which did not say
	Kind     Kind
	Data     []byte
	Value    any // decoded form of Data, if AppendValue got it and Data was not read from disk; otherwise nil
	Attempt  int // from 1; runs cut short by the end of a process do not count

	// Redelivered says that an earlier process may have begun this attempt, or even finished it.
	Redelivered bool
}

// End is what becomes of a record after its work. The zero End: it is done.
type End struct {
	Err      error         // why it failed; it becomes a dead letter, unless Again
	Again    bool          // it is worked on again,
	After    time.Duration // from now
	Busy     bool          // who did the work has too much of it: give less at a time
	Callback []byte        // unless Again: it lives on as a callback with this data, even when it becomes a dead letter too,
	To       string        // in the line of this receiver
}

// maxStarts is how many processes a run is given to. Ends of processes are hardly a record's fault, but one that brings
// them down each time must end somewhere.
const maxStarts = 50

// Run works on records until ctx ends, and waits for the workers. work's context ends with ctx; what it then returns with an
// error was cut short, and runs again the next time. A panic is an error of the record that caused it.
func (j *Journal) Run(ctx context.Context, work func(context.Context, Record) End) {
	var workers sync.WaitGroup
	jobs := make(chan job) // to workers that are idle
	j.mu.Lock()
	j.begin = func(ln *line, it item, m *message) {
		next := job{ln, it, m}
		select {
		case jobs <- next:
		default:
			workers.Go(func() { j.worker(ctx, next, jobs, work) }) // bounded by the lines
		}
	}
	j.mu.Unlock()
	workers.Go(func() { j.deleteLost(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		j.mu.Lock()
		now := time.Now()
		at := j.lines.wake(now)
		j.pump(Run, item{}, nil)
		j.pump(Callback, item{}, nil)
		j.mu.Unlock()
		if at.IsZero() {
			at = now.Add(time.Hour)
		}
		timer.Reset(at.Sub(now))
		select {
		case <-timer.C:
		case <-j.wake:
		case <-ctx.Done():
		}
	}
	j.mu.Lock()
	j.begin = nil
	j.mu.Unlock()
	workers.Wait()
}

// state is where a record goes after its work.
type state struct {
	gone bool // out of the journal
	key  lineKey
	item item
	at   time.Time // of the next run; zero: at once
	busy bool
}

func (j *Journal) finish(ln *line, it item, to state) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines.end(ln, it, to.busy)
	if to.gone {
		j.lines.close(it.account, it.size)
	} else {
		j.lines.resize(it.account, to.item.size-it.size)
		j.lines.push(to.key, to.item, to.at, time.Now())
	}
	j.lines.settle(ln)
	j.pump(ln.key.kind, item{}, nil)
	if !to.gone && to.key.kind != ln.key.kind {
		j.pump(to.key.kind, item{}, nil)
	}
	if !to.at.IsZero() {
		select {
		case j.wake <- struct{}{}:
		default: // it looks anyway
		}
	}
}

// process works on one record and stores what becomes of it.
func (j *Journal) process(ctx context.Context, ln *line, it item, m *message, work func(context.Context, Record) End) state {
	back := state{key: ln.key, item: it}
	if m == nil {
		var err error
		if m, err = j.load(ctx, j.shards[it.shard], it.seq); errors.Is(err, jetstream.ErrMsgNotFound) {
			j.log.Error("a record is gone", "function", it.account.function, "shard", it.shard, "sequence", it.seq)
			return state{gone: true}
		} else if err != nil && m == nil {
			j.log.Warn("a record cannot be read now", "function", it.account.function, "error", err)
			back.at = time.Now().Add(time.Second)
			return back
		} else if err != nil {
			return j.leave(ctx, back, m, End{Err: err})
		}
	}
	function, id, err := names(m.subject)
	if err != nil {
		return j.leave(ctx, back, m, End{Err: err})
	}
	if it.old && ln.key.kind == Run {
		starts := m.number(headStarts) + 1
		if starts >= maxStarts {
			return j.leave(ctx, back, m, End{Err: fmt.Errorf("%d processes ended while it ran, want fewer than %d", starts, maxStarts)})
		}
		m.setNumber(headStarts, starts)
		m.keepAccepted(m)
		if seq, err := j.replace(ctx, it, m); err == nil { // else it is not counted this time
			back.item.seq, back.item.old = seq, false
		}
	}
	rec := Record{
		ID: id, Function: function, Kind: ln.key.kind, Data: m.data, Value: m.value, Attempt: int(m.number(headFailed)) + 1,
		Redelivered: it.old || m.number(headStarts) > 0,
	}
	end := j.try(ctx, rec, work)
	j.mu.Lock()
	if rec.Kind == Run {
		j.stats.Runs++
	} else {
		j.stats.Callbacks++
	}
	j.mu.Unlock()
	if ctx.Err() != nil && end.Err != nil {
		return back // the process ends, the record is not to blame
	}
	return j.leave(ctx, back, m, end)
}

// try runs work.
func (j *Journal) try(ctx context.Context, rec Record, work func(context.Context, Record) End) (end End) {
	defer func() {
		if p := recover(); p != nil {
			j.log.Error("panic in the work of a record", "call", rec.ID, "panic", p, "stack", string(debug.Stack()))
			end = End{Err: fmt.Errorf("panic: %v", p)}
		}
	}()
	return work(ctx, rec)
}

// leave stores a record's end; from is where it was. What the disk does not take is tried again until ctx ends.
func (j *Journal) leave(ctx context.Context, from state, m *message, end End) state {
	to := from
	to.busy = end.Busy
	err := j.insist(ctx, m, func() (err error) {
		to, err = j.end(ctx, to, m, end)
		return err
	})
	if err != nil {
		return from // the process ends: rather twice than never
	}
	return to
}

// end stores a record's end once; what of it was stored before an error is stored again.
func (j *Journal) end(ctx context.Context, to state, m *message, end End) (state, error) {
	failed := m.number(headFailed) + 1
	switch {
	case end.Err != nil && end.Again:
		next := &message{subject: m.subject, header: maps.Clone(m.header), data: m.data}
		to.at = time.Now().Add(end.After)
		next.setNumber(headFailed, failed)
		next.setNumber(headAfter, to.at.UnixNano())
		next.keepAccepted(m)
		next.header.Del(headStarts)
		seq, err := j.replace(ctx, to.item, next)
		if errors.Is(err, ErrFull) {
			end.Again, end.Err = false, fmt.Errorf("%w; no room for another attempt", end.Err)
			return j.end(ctx, to, m, end)
		}
		if err == nil {
			to.item.seq, to.item.old = seq, false
		}
		j.count(err, &j.stats.Retried)
		return to, err
	case end.Err != nil:
		if err := j.bury(m, failed, end.Err); err != nil {
			return to, err
		}
	}
	if end.Callback != nil {
		return j.callback(ctx, to, m, end)
	}
	to.gone = true
	err := j.clear(ctx, j.shards[to.item.shard], m.subject, to.item.seq, 0)
	if err == nil && end.Err == nil {
		j.dropBlob(m)
	}
	j.count(err, &j.stats.Done)
	return to, err
}

// callback replaces a record that has run by its result, which is to be told.
func (j *Journal) callback(ctx context.Context, to state, m *message, end End) (state, error) {
	next := &message{subject: m.subject, data: end.Callback}
	next.set(headKind, Callback.String())
	next.set(headTo, end.To)
	next.keepAccepted(m)
	seq, err := j.replace(ctx, to.item, next)
	if errors.Is(err, ErrFull) {
		if err = j.bury(next, 0, err); err == nil {
			to.gone = true
			err = j.clear(ctx, j.shards[to.item.shard], m.subject, to.item.seq, 0)
		}
		return to, err
	}
	if err != nil {
		return to, err
	}
	if end.Err == nil {
		j.dropBlob(m)
	}
	to.key = lineKey{Callback, end.To}
	to.item.seq, to.item.size, to.item.old = seq, int64(len(end.Callback)), false
	return to, nil
}

// replace stores a record's next state and deletes the one before. A kill in between leaves both, of which a start takes the
// later one.
func (j *Journal) replace(ctx context.Context, it item, next *message) (seq uint64, err error) {
	if seq, err = j.store(next); err != nil {
		j.doubt(next.subject)
		return 0, err
	}
	return seq, j.insist(ctx, next, func() error { return j.clear(ctx, j.shards[it.shard], next.subject, it.seq, seq) })
}

// clear deletes a record's state. If the record may have unknown states, it deletes all states
// before the sequence keep, or all states if keep is 0.
func (j *Journal) clear(ctx context.Context, s jetstream.Stream, subject string, seq, keep uint64) error {
	if !j.doubted(subject) {
		return j.remove(s, seq)
	}
	err := j.purge(ctx, s, subject, keep)
	if err != nil {
		j.doubt(subject)
	}
	return err
}

// purge deletes all states of a record before the sequence keep; 0: all.
func (j *Journal) purge(ctx context.Context, s jetstream.Stream, subject string, keep uint64) error {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	err := j.cfg.Disk.deletion(ctx)
	if err == nil {
		err = j.reported(s.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(keep)))
	}
	if err != nil {
		return fmt.Errorf("delete all states of %s: %w", subject, err)
	}
	return nil
}

// reported returns err, a stream's answer to a deletion. If err names a full disk, the stream keeps
// it, so reported reports it to the Disk.
func (j *Journal) reported(err error) error {
	var api *jetstream.APIError
	if errors.As(err, &api) && noSpace(err) {
		j.cfg.Disk.report(err)
	}
	return err
}

// doubt records that a record may have an unknown state: one was published, and its write was not
// confirmed.
func (j *Journal) doubt(subject string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.doubts[subject] = true
}

// doubted reports whether a record may have unknown states, and clears that mark.
func (j *Journal) doubted(subject string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	was := j.doubts[subject]
	delete(j.doubts, subject)
	return was
}

func (m *message) keepAccepted(before *message) {
	if at := before.number(headAccepted); at != 0 {
		m.setNumber(headAccepted, at)
	} else {
		m.setNumber(headAccepted, before.at.UnixNano())
	}
}

func (j *Journal) count(err error, n *uint64) {
	if err == nil {
		j.mu.Lock()
		*n++
		j.mu.Unlock()
	}
}

// insist calls f until it succeeds, at least once, or ctx ends.
func (j *Journal) insist(ctx context.Context, m *message, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		if !errors.Is(err, nats.ErrConnectionClosed) && !refusal(err) { // the Disk logs these, once
			j.log.Warn("the journal's disk refuses; trying again", "record", m.subject, "error", err)
		}
		pause := time.NewTimer(time.Second)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return err
		}
	}
}

// load reads a message with its content. With a message, an error says that its content is lost.
func (j *Journal) load(ctx context.Context, s jetstream.Stream, seq uint64) (*message, error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	raw, err := s.GetMsg(ctx, seq)
	if err != nil {
		return nil, err
	}
	m := &message{subject: raw.Subject, header: raw.Header, data: raw.Data, at: raw.Time}
	for _, field := range []string{jetstream.StreamHeader, jetstream.SequenceHeader, jetstream.TimeStampHeaer, jetstream.SubjectHeader, jetstream.LastSequenceHeader} {
		m.header.Del(field)
	}
	if blob := m.header.Get(headBlob); blob != "" {
		if m.data, err = j.blobs.get(blob); err != nil {
			return m, fmt.Errorf("content of a large record: %w", err)
		}
	}
	return m, nil
}

// remove deletes a message; one that is not there is deleted.
func (j *Journal) remove(s jetstream.Stream, seq uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), appendTimeout)
	defer cancel()
	err := j.cfg.Disk.deletion(ctx)
	if err == nil {
		err = j.reported(s.DeleteMsg(ctx, seq))
	}
	if err == nil || errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) && strings.Contains(err.Error(), "found") { // "not found"
		return nil
	}
	return fmt.Errorf("delete message %d: %w", seq, err)
}

func (j *Journal) dropBlob(m *message) {
	if err := j.blobs.drop(m.header.Get(headBlob)); err != nil {
		j.log.Warn("content of a large record stays until the next start", "error", err)
	}
}

package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Record is an entry of the journal that is given to a worker.
type Record struct {
	ID       string
	Function string // empty for records of an earlier version
	Kind     Kind
	Data     []byte
	// Decoded form of Data if AppendValue got it and Data was not read from disk; otherwise nil.
	Value   any
	Attempt int // from 1; runs cut short by the end of a process do not count

	// Redelivered means that an earlier process may have started or finished this attempt.
	Redelivered bool
}

// End is the outcome of a record's work. The zero End means done.
type End struct {
	// cause of the failure; without Again, the record becomes a dead letter.
	Err   error
	Again bool          // run the record again
	After time.Duration // wait before the next run
	Busy  bool          // the worker is overloaded: run fewer records of this line at a time
	// Dropped is why a policy dropped the record; the dead letter has it. Empty: no policy did.
	Dropped string
	// If Again is not set, the record continues as a callback with this data, even if it also
	// becomes a dead letter.
	Callback []byte
	To       string // receiver, which selects the callback's line
}

// maxStarts is how many processes may start a run. The end of a process is rarely a record's fault,
// but a record that ends every process must be given up eventually.
const maxStarts = 50

// Run calls work for each record that may run, until ctx ends, and then waits for the calls to
// return. The context of work ends with ctx. If work returns an error after that, the record was
// cut short, and runs again in the next process. A panic counts as an error of its record.
func (j *Journal) Run(ctx context.Context, work func(context.Context, Record) End) {
	var workers sync.WaitGroup
	jobs := make(chan job) // to idle workers
	j.mu.Lock()
	j.begin = func(ln *line, it item, m *message) {
		next := job{ln, it, m}
		select {
		case jobs <- next:
		default:
			// The number of workers is bounded by the lines.
			workers.Go(func() { j.worker(ctx, next, jobs, work) })
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
		j.startReady(Run, item{}, nil)
		j.startReady(Callback, item{}, nil)
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
	gone bool // the record leaves the journal
	key  lineKey
	item item
	at   time.Time // time of the next run; zero: at once
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
	j.startReady(ln.key.kind, item{}, nil)
	if !to.gone && to.key.kind != ln.key.kind {
		j.startReady(to.key.kind, item{}, nil)
	}
	if !to.at.IsZero() {
		select {
		case j.wake <- struct{}{}:
		default: // the goroutine is awake already
		}
	}
}

// process works on one record and stores its new state.
func (j *Journal) process(ctx context.Context, ln *line, it item, m *message, work func(context.Context, Record) End) state {
	back := state{key: ln.key, item: it}
	if m == nil {
		var err error
		if m, err = j.load(ctx, j.shards[it.shard], it.seq); errors.Is(err, jetstream.ErrMsgNotFound) {
			return missing(ctx, j, back)
		} else if err != nil && m == nil {
			j.log.Warn("failed to read a record; trying again", "function", it.account.function, "error", err)
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
	if it.old {
		var runs bool
		if back, runs = begin(ctx, j, ln.key.kind, back, m); !runs {
			return back
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
		back.item.old = true // if it runs again in this process, it may be a repetition
		return back          // the work ends here, which is not the record's fault
	}
	return j.leave(ctx, back, m, end)
}

// begin stores that a record m, which this process has found, begins to run. If runs is false, the
// record does not run now, and next is its state.
func begin(ctx context.Context, j *Journal, kind Kind, is state, m *message) (next state, runs bool) {
	outside := j.cfg.Disk.cluster != nil
	if kind == Run {
		starts := m.number(headStarts) + 1
		if starts >= maxStarts {
			return j.leave(ctx, is, m, End{Err: fmt.Errorf("%d processes ended while it ran, want fewer than %d", starts, maxStarts)}), false
		}
		m.setNumber(headStarts, starts)
	} else if !outside {
		return is, true // nobody can withdraw it
	}
	m.keepAccepted(m)
	seq, err := j.replace(ctx, is.item, m)
	switch {
	case errors.Is(err, errOvertaken):
		return reread(ctx, j, is, m), false
	case err == nil:
		is.item.seq, is.item.old = seq, false
	case outside && !errors.Is(err, ErrFull) && !disk.IsFull(err):
		is.at = time.Now().Add(time.Second) // an overtaken process may have withdrawn the record
		return is, false
	}
	return is, true // on a full disk, this start is not counted, because runs make room
}

// logMissing logs that a record of the index is not in the streams. With NATS outside, a process
// that was overtaken may have ended or withdrawn it.
func logMissing(j *Journal, it item) {
	level := slog.LevelError
	if j.cfg.Disk.cluster != nil {
		level = slog.LevelInfo
	}
	j.log.Log(context.Background(), level, "a record is missing", "function", it.account.function, "shard", it.shard, "sequence", it.seq)
}

// try runs work and turns a panic into an error.
func (j *Journal) try(ctx context.Context, rec Record, work func(context.Context, Record) End) (end End) {
	defer func() {
		if p := recover(); p != nil {
			j.log.Error("panic in the work of a record", "call", rec.ID, "panic", p, "stack", string(debug.Stack()))
			end = End{Err: fmt.Errorf("panic: %v", p)}
		}
	}()
	return work(ctx, rec)
}

// leave stores a record's end. from is the record's previous state. If the disk refuses, leave
// retries until ctx ends.
func (j *Journal) leave(ctx context.Context, from state, m *message, end End) state {
	to := from
	to.busy = end.Busy
	overtaken := false
	err := j.retryWrite(ctx, m, func() (err error) {
		to, err = j.end(ctx, to, m, end)
		overtaken = errors.Is(err, errOvertaken)
		if overtaken {
			return nil
		}
		return err
	})
	if overtaken {
		return reread(ctx, j, from, m)
	}
	if err != nil {
		return from // the process ends: running twice is better than never
	}
	return to
}

// end stores a record's end once. After an error, all of it is stored again.
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
		if err := j.addDeadLetter(m, failed, end.Err, end.Dropped); err != nil {
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

// callback replaces a record that has run by its result, which must be delivered.
func (j *Journal) callback(ctx context.Context, to state, m *message, end End) (state, error) {
	next := &message{subject: m.subject, data: end.Callback}
	next.set(headKind, Callback.String())
	next.set(headTo, end.To)
	next.keepAccepted(m)
	seq, err := j.replace(ctx, to.item, next)
	if errors.Is(err, ErrFull) {
		if err = j.addDeadLetter(next, 0, err, ""); err == nil {
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

// replace stores a record's next state and deletes the previous one. A kill in between leaves both,
// and the next start takes the later one.
func (j *Journal) replace(ctx context.Context, it item, next *message) (seq uint64, err error) {
	if j.cfg.Disk.cluster != nil {
		next.after = it.seq
	}
	if seq, err = j.store(next); err != nil {
		j.markUncertain(next.subject)
		return 0, err
	}
	if err := j.retryWrite(ctx, next, func() error { return j.clear(ctx, j.shards[it.shard], next.subject, it.seq, seq) }); err != nil {
		// ctx has ended. The next state counts from now on. What deletes it deletes the previous
		// one, too.
		j.markUncertain(next.subject)
	}
	return seq, nil
}

// clear deletes a record's state. If the record may have unknown states, clear deletes all states
// before the sequence keep, or all states if keep is 0.
func (j *Journal) clear(ctx context.Context, s jetstream.Stream, subject string, seq, keep uint64) error {
	if !j.takeUncertain(subject) {
		return j.remove(s, seq)
	}
	var err error
	if keep == 0 && j.cfg.Held != nil {
		err = clearHeld(ctx, j, s, subject, seq)
	} else {
		err = j.purge(ctx, s, subject, keep)
	}
	if err != nil {
		j.markUncertain(subject)
	}
	return err
}

// clearHeld deletes all states of a record that this process has stored. A later process may have
// changed the record. If Held returns nil, all states from before the call are this process's.
// Otherwise only the state seq certainly is.
func clearHeld(ctx context.Context, j *Journal, s jetstream.Stream, subject string, seq uint64) error {
	limited, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	last, err := s.GetLastMsgForSubject(limited, subject)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return nil
	case err != nil:
		return fmt.Errorf("read the last state of %s: %w", subject, err)
	case j.cfg.Held() != nil:
		return j.remove(s, seq)
	}
	return j.purge(ctx, s, subject, last.Sequence+1)
}

// purge deletes all states of a record before the sequence keep; 0: all.
func (j *Journal) purge(ctx context.Context, s jetstream.Stream, subject string, keep uint64) error {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	err := j.cfg.Disk.prepareDeletion(ctx)
	if err == nil {
		err = j.reported(s.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(keep)))
	}
	if err != nil {
		return fmt.Errorf("delete all states of %s: %w", subject, err)
	}
	return nil
}

// reported returns err, which is a stream's answer to a deletion. If err means that the disk is
// full, the stream now keeps this error, so reported passes it to the Disk.
func (j *Journal) reported(err error) error {
	var api *jetstream.APIError
	if j.cfg.Disk.cluster != nil {
		return j.cfg.Disk.explain(err)
	}
	if failed := (serverError{err}); errors.As(err, &api) && noSpace(failed) {
		j.cfg.Disk.report(failed)
	}
	return err
}

// markUncertain records that a record may have an unknown state: the state was published, and its
// write was not confirmed.
func (j *Journal) markUncertain(subject string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.uncertain[subject] = true
}

// takeUncertain reports whether a record may have unknown states, and clears that mark.
func (j *Journal) takeUncertain(subject string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	was := j.uncertain[subject]
	delete(j.uncertain, subject)
	return was
}

// deleteServerFields deletes the fields that NATS adds to what was stored, and the condition.
func (m *message) deleteServerFields() {
	for _, field := range []string{jetstream.StreamHeader, jetstream.SequenceHeader, jetstream.TimeStampHeaer, jetstream.SubjectHeader, jetstream.LastSequenceHeader, jetstream.ExpectedLastSubjSeqHeader} {
		m.header.Del(field)
	}
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

// retryWrite calls f at least once, until it succeeds or ctx ends.
func (j *Journal) retryWrite(ctx context.Context, m *message, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		// The Disk logs these once.
		if !errors.Is(err, nats.ErrConnectionClosed) && !refusal(err) {
			j.log.Warn("the journal's disk refused a write; trying again", "record", m.subject, "error", err)
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

// load reads a message with its content. If it returns both a message and an error, the content is
// lost.
func (j *Journal) load(ctx context.Context, s jetstream.Stream, seq uint64) (*message, error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	raw, err := s.GetMsg(ctx, seq)
	if err != nil {
		return nil, err
	}
	m := &message{subject: raw.Subject, header: raw.Header, data: raw.Data, at: raw.Time}
	m.deleteServerFields()
	if blob := m.header.Get(headBlob); blob != "" {
		if m.data, err = j.blobs.get(blob); errors.As(err, new(transient)) {
			return nil, fmt.Errorf("content of a large record: %w", err)
		} else if err != nil {
			return m, fmt.Errorf("content of a large record: %w", err)
		}
	}
	return m, nil
}

// remove deletes a message. It is no error if the message does not exist.
func (j *Journal) remove(s jetstream.Stream, seq uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), appendTimeout)
	defer cancel()
	err := j.cfg.Disk.prepareDeletion(ctx)
	if err == nil {
		err = j.reported(s.DeleteMsg(ctx, seq))
	}
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) { // it does not say why
		if _, missing := s.GetMsg(ctx, seq); errors.Is(missing, jetstream.ErrMsgNotFound) {
			return nil
		}
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("delete message %d: %w", seq, err)
}

func (j *Journal) dropBlob(m *message) {
	if err := j.blobs.drop(m.header.Get(headBlob)); err != nil {
		j.log.Warn("failed to delete the content of a large record; the next start deletes it", "error", err)
	}
}

package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// DeadLetter is a record that has failed permanently. Its Kind says what failed: the run, or the
// delivery of its result.
type DeadLetter struct {
	ID       string // of the record, with the suffix ".callback" if its callback failed
	Function string
	Kind     Kind
	Cause    string // at most 512 bytes
	Dropped  string // why a policy dropped the last run; empty: no policy did
	Attempts int
	Accepted time.Time
	Died     time.Time
	Size     int64 // of the data, in bytes

	seq  uint64
	blob string
}

// ErrNoLetter means that no dead letter has this ID.
var ErrNoLetter = errors.New("no such dead letter")

// maxCause is the longest cause of a dead letter in bytes.
const maxCause = 512

// deadLetters is the index of the stream DEAD.
type deadLetters struct {
	stream jetstream.Stream

	change sync.Mutex // held while letters are added or removed

	mu    sync.Mutex
	all   []*DeadLetter // sorted by sequence
	byID  map[string]*DeadLetter
	bytes int64
}

func newDeadLetters() *deadLetters { return &deadLetters{byID: map[string]*DeadLetter{}} }

func (d *deadLetters) count() (letters, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return int64(len(d.all)), d.bytes
}

func (d *deadLetters) add(l *DeadLetter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, l)
	d.byID[l.ID] = l
	d.bytes += l.Size
}

func (d *deadLetters) get(id string) (*DeadLetter, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.byID[id]; l != nil {
		return l, nil
	}
	return nil, fmt.Errorf("%q: %w", id, ErrNoLetter)
}

func (d *deadLetters) forget(l *DeadLetter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i, ok := slices.BinarySearchFunc(d.all, l.seq, bySequence); ok {
		d.all = slices.Delete(d.all, i, i+1)
		d.bytes -= l.Size
	}
	if d.byID[l.ID] == l {
		delete(d.byID, l.ID)
	}
}

func bySequence(l *DeadLetter, seq uint64) int { return cmp.Compare(l.seq, seq) }

// oldest returns the letter to delete if there are too many, or nil.
func (d *deadLetters) oldest(letters int, bytes int64) *DeadLetter {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.all) > letters || len(d.all) > 1 && d.bytes > bytes {
		return d.all[0]
	}
	return nil
}

// deadID returns the ID of a record's dead letter.
func deadID(id string, kind Kind) string {
	const suffix = ".callback"
	if kind == Callback && !strings.HasSuffix(id, suffix) {
		return id + suffix
	}
	return id
}

// letter decodes a stored dead letter.
func letter(m *message, seq uint64, size int64) (*DeadLetter, error) {
	function, id, err := names(m.subject)
	if err != nil {
		return nil, err
	}
	l := &DeadLetter{
		ID: id, Function: function, Kind: m.kind(), Cause: m.header.Get(headCause), Dropped: m.header.Get(headDropped), Attempts: int(m.number(headFailed)),
		Accepted: time.Unix(0, m.number(headAccepted)), Died: m.at, Size: size, seq: seq, blob: m.header.Get(headBlob),
	}
	if m.number(headAccepted) == 0 { // written by an earlier version
		l.Accepted = l.Died
	}
	return l, nil
}

// lettersOf reads the stream DEAD. ids has the IDs of its letters.
func lettersOf(ctx context.Context, j *Journal) (all []*DeadLetter, ids map[string]bool, err error) {
	ids = map[string]bool{}
	err = scan(ctx, j, j.dead.stream, func(f found) {
		l, err := letter(&f.message, f.seq, f.size)
		if err != nil {
			j.log.Error("unknown message in the stream of dead letters; it is kept", "subject", f.subject, "error", err)
			return
		}
		all, ids[l.ID] = append(all, l), true
	})
	return all, ids, err
}

// claim stores the latest state of a record once more, as a state of this process, and changes f to
// it. ours is false if the record has left the journal: it was withdrawn, or it has ended.
//
// A record that has a dead letter must be claimed before the letter is deleted. An overtaken
// process may still move the record between the journal and DEAD:
//
//   - It has stored a redriven letter as a record, and withdraws the record.
//   - It has stored a record as a letter, and deletes the record.
//
// In both cases, only the letter is left. A withdrawal and a claim have the same condition, so the
// stream takes only one of them. If the overtaken process deletes a record, it deletes the states
// that it knows, so a claimed record stays. If there is no claim, the letter stays.
func claim(ctx context.Context, j *Journal, f *found) (ours bool, err error) {
	for {
		raw, err := lastState(ctx, j, f)
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			return false, nil
		case err != nil:
			return false, fmt.Errorf("claim %s: %w", f.subject, err)
		case raw.Header.Get(headWithdrawn) != "":
			return false, j.purge(ctx, j.shards[f.shard], f.subject, raw.Sequence+1)
		}
		now := &message{subject: raw.Subject, header: maps.Clone(raw.Header), data: raw.Data, at: raw.Time, after: raw.Sequence}
		now.deleteServerFields()
		now.keepAccepted(now)
		seq, err := j.store(now)
		if errors.Is(err, errOvertaken) {
			continue
		}
		if err == nil {
			err = j.remove(j.shards[f.shard], raw.Sequence)
		}
		if err != nil {
			return false, fmt.Errorf("claim %s: %w", f.subject, err)
		}
		size := cmp.Or(now.header.Get(headSize), strconv.Itoa(len(now.data)))
		f.size, _ = strconv.ParseInt(size, 10, 64) // the field is the journal's
		f.message, f.seq = *now, seq
		return true, nil
	}
}

// lastState reads the latest state of a record.
func lastState(ctx context.Context, j *Journal, f *found) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	return j.shards[f.shard].GetLastMsgForSubject(ctx, f.subject)
}

// recoverDead adds the letters that a start has found. The map there has as its keys the deadIDs of
// all records in the journal. If a letter has one of these IDs, an earlier process ended, or was
// overtaken, while it moved the record between the journal and DEAD. Then the record counts, and
// recoverDead deletes the letter. With NATS outside, the caller has claimed the record before. It
// adds the files of all other letters to named.
func (j *Journal) recoverDead(letters []*DeadLetter, there, named map[string]bool) {
	for _, l := range letters {
		if before, err := j.dead.get(l.ID); err == nil { // as with records, the later one counts
			j.dead.forget(before)
			if err := j.remove(j.dead.stream, before.seq); err != nil {
				j.log.Warn("dead letter", "call", l.ID, "error", err)
			}
		}
		if there[l.ID] {
			if err := j.remove(j.dead.stream, l.seq); err == nil {
				continue
			}
		}
		named[l.blob] = true
		j.dead.add(l)
	}
}

// addDeadLetter stores a record as a dead letter. The record stays in the journal too. Its file, if
// it has one, belongs to the letter from now on. dropped is why a policy dropped the last run;
// empty: no policy did.
func (j *Journal) addDeadLetter(m *message, attempts int64, cause error, dropped string) error {
	j.dead.change.Lock()
	defer j.dead.change.Unlock()
	tokens := strings.Split(m.subject, ".")
	dead := &message{header: maps.Clone(m.header), data: m.data, at: time.Now()}
	function, id, err := names(m.subject)
	switch {
	case err != nil: // keep it as it is: somebody may be able to read it
		dead.subject = "dead." + tokens[len(tokens)-1]
	case function == "":
		dead.subject = "dead." + Token(deadID(id, m.kind()))
	default:
		dead.subject = "dead." + Token(function) + "." + Token(deadID(id, m.kind()))
	}
	text := cause.Error()
	dead.set(headCause, strings.ToValidUTF8(strings.ReplaceAll(text[:min(len(text), maxCause)], "\n", " "), ""))
	if dropped != "" {
		dead.set(headDropped, dropped)
	}
	dead.setNumber(headFailed, attempts)
	dead.keepAccepted(m)
	dead.header.Del(headAfter)
	dead.header.Del(headStarts)
	seq, err := j.store(dead)
	if err != nil {
		return fmt.Errorf("dead letter: %w", err)
	}
	l, err := letter(dead, seq, int64(len(m.data)))
	if err != nil {
		return fmt.Errorf("dead letter: %w", err)
	}
	if before, err := j.dead.get(l.ID); err == nil { // the new letter replaces an earlier one
		if err := j.remove(j.dead.stream, before.seq); err != nil {
			return err
		}
		j.dead.forget(before)
		if before.blob != l.blob {
			_ = j.blobs.drop(before.blob) // swept at the next start
		}
	}
	j.dead.add(l)
	j.count(nil, &j.stats.Dead)
	j.log.Warn("dead letter", "function", l.Function, "call", l.ID, "kind", l.Kind.String(), "attempts", attempts, "cause", l.Cause)
	j.cfg.Died(*l)
	for l := j.dead.oldest(j.cfg.Dead, j.cfg.Bytes/10*9); l != nil; l = j.dead.oldest(j.cfg.Dead, j.cfg.Bytes/10*9) {
		j.log.Warn("too many dead letters: the oldest is deleted", "function", l.Function, "call", l.ID)
		if err := j.drop(l); err != nil {
			return err
		}
	}
	return nil
}

// drop deletes a letter.
func (j *Journal) drop(l *DeadLetter) error {
	if err := j.remove(j.dead.stream, l.seq); err != nil {
		return err
	}
	j.dead.forget(l)
	if err := j.blobs.drop(l.blob); err != nil {
		j.log.Warn("failed to delete the content of a dead letter; the next start deletes it", "error", err)
	}
	return nil
}

// Dead returns at most limit dead letters, oldest first. If of is not nil, Dead returns only the
// letters for whose function of returns true. If after is not empty, Dead starts with the letter
// that follows the letter with this ID; if there is no letter with this ID, it returns ErrNoLetter.
// more is true if further letters exist.
func (j *Journal) Dead(of func(function string) bool, after string, limit int) (letters []DeadLetter, more bool, err error) {
	d := j.dead
	d.mu.Lock()
	defer d.mu.Unlock()
	from := 0
	if after != "" {
		l := d.byID[after]
		if l == nil {
			return nil, false, fmt.Errorf("%q: %w", after, ErrNoLetter)
		}
		i, _ := slices.BinarySearchFunc(d.all, l.seq, bySequence)
		from = i + 1
	}
	for _, l := range d.all[from:] {
		if of != nil && !of(l.Function) {
			continue
		}
		if len(letters) == limit {
			return letters, true, nil
		}
		letters = append(letters, *l)
	}
	return letters, false, nil
}

// DeadLetter returns a dead letter and its data. It returns ErrNoLetter if the letter does not
// exist.
func (j *Journal) DeadLetter(ctx context.Context, id string) (DeadLetter, []byte, error) {
	l, err := j.dead.get(id)
	if err != nil {
		return DeadLetter{}, nil, err
	}
	m, err := j.load(ctx, j.dead.stream, l.seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		j.dead.forget(l)
		return DeadLetter{}, nil, fmt.Errorf("%q: %w", id, ErrNoLetter)
	}
	if err != nil {
		return *l, nil, err
	}
	return *l, m.data, nil
}

// Redrive moves a dead letter back into the journal, as if it had just been accepted.
//
// If this process was overtaken meanwhile, Redrive withdraws the record, and the letter stays. If
// the next process has claimed the record, Redrive returns nil, and leaves the letter to that
// process, which has deleted it after the claim.
func (j *Journal) Redrive(ctx context.Context, id string) error {
	j.dead.change.Lock()
	defer j.dead.change.Unlock()
	l, err := j.dead.get(id)
	if err != nil {
		return err
	}
	m, err := j.load(ctx, j.dead.stream, l.seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		j.dead.forget(l)
		return fmt.Errorf("%q: %w", id, ErrNoLetter)
	}
	if err != nil {
		return fmt.Errorf("redrive %q: %w", id, err)
	}
	m.subject = j.subject(l.Function, l.ID)
	if l.Function == "" {
		m.subject = fmt.Sprintf("journal.%d.%s", j.shard(l.ID), Token(l.ID))
	}
	for _, field := range []string{headCause, headDropped, headFailed, headAfter, headStarts, headWithdrawn} {
		m.header.Del(field)
	}
	m.at = l.Accepted
	j.mu.Lock()
	full := j.lines.bytes+l.Size > j.cfg.Bytes/10*9
	a := j.lines.open(l.Function, l.Size)
	j.mu.Unlock()
	var seq uint64
	theirs := false // the next process has begun it
	if err = j.cfg.Disk.room(l.Size, acceptRoom); full {
		err = ErrFull
	}
	if err == nil {
		if seq, err = j.store(m); err == nil {
			theirs, err = confirm(j, m, j.shard(l.ID), seq)
		}
	}
	j.mu.Lock()
	if err != nil {
		j.lines.close(a, l.Size)
		j.mu.Unlock()
		return fmt.Errorf("redrive %q: %w", id, err)
	}
	key := lineKey{l.Kind, l.Function}
	if l.Kind == Callback {
		key.name = m.header.Get(headTo)
	}
	it := item{seq: seq, size: l.Size, account: a, shard: j.shard(l.ID)}
	if theirs {
		j.lines.close(a, l.Size)
	} else {
		j.cfg.Found(Found{ID: l.ID, Function: l.Function, Kind: l.Kind, Accepted: l.Accepted})
		j.lines.push(key, it, time.Time{}, time.Time{})
		j.startReady(l.Kind, it, m)
	}
	j.mu.Unlock()
	if !theirs {
		if err := j.remove(j.dead.stream, l.seq); err != nil {
			return err
		}
	}
	j.dead.forget(l)
	return nil
}

// DropDead deletes a dead letter. It returns ErrNoLetter if the letter does not exist.
func (j *Journal) DropDead(id string) error {
	j.dead.change.Lock()
	defer j.dead.change.Unlock()
	l, err := j.dead.get(id)
	if err != nil {
		return err
	}
	return j.drop(l)
}

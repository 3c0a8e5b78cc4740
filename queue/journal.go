package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Kind is what is left to do for a record.
type Kind uint8

// The kinds of work.
const (
	Run      Kind = iota // the request runs
	Callback             // its result is told to who asked for it
)

// String names the kind as it is stored and shown.
func (k Kind) String() string { return [...]string{"run", "callback"}[k] }

// Limits bound one function's part of the journal.
type Limits struct {
	Concurrency int // runs in work at a time
	Queue       int // records, in whatever state; Append refuses more
}

// JournalConfig is what a [Journal] is made of. The zero value of a field means its default.
type JournalConfig struct {
	Disk   *Disk                        // of the server that keeps the streams; needed
	Blobs  string                       // folder of records above 1 MiB, on the same disk; needed
	Shards int                          // streams that share the load; default 4. Fixed for the life of a state folder
	Bytes  int64                        // of content kept, at most half of one function's, and as much again of dead letters; default 1 GiB
	Window int                          // runs in work over all functions; default 1024
	Limits func(function string) Limits // default: 64 runs and 10,000 records
	Dead   int                          // dead letters kept; of more the oldest go; default 10,000
	Died   func(DeadLetter)             // is told of each new dead letter; must not block or call back; default: nobody
	Found  func(Found)                  // called for each record that OpenJournal finds, and for dead letters that run again; must not block or call back; may be nil
}

func (c JournalConfig) withDefaults() JournalConfig {
	c.Shards = cmp.Or(c.Shards, 4)
	c.Bytes = cmp.Or(c.Bytes, 1<<30)
	c.Window = cmp.Or(c.Window, 1024)
	c.Dead = cmp.Or(c.Dead, 10_000)
	if c.Died == nil {
		c.Died = func(DeadLetter) {}
	}
	if c.Found == nil {
		c.Found = func(Found) {}
	}
	if c.Limits == nil {
		c.Limits = func(string) Limits { return Limits{Concurrency: 64, Queue: 10_000} }
	}
	return c
}

// Journal keeps accepted async requests on disk until they are done. A record survives kill -9 of every process from the
// moment Append returns; it survives power loss only once the file system has written it, which happens as
// often as ServerConfig.Sync says.
//
// The streams keep the records and the index in memory, which a start rebuilds, says who is next: docs/adr/0014 has the
// reasons. At most one process may have a journal open.
type Journal struct {
	js     jetstream.JetStream
	cfg    JournalConfig
	shards []jetstream.Stream
	blobs  blobs
	dead   *deadLetters
	log    *slog.Logger

	mu    sync.Mutex
	lines *lines
	begin func(*line, item, *message) // starts a record's work; nil: nobody works
	wake  chan struct{}               // the next delayed record has changed
	stats Stats

	doubts map[string]bool // subjects of records that may have unknown states, see doubt
	lost   map[string]lost // by subject
	losing chan struct{}   // gets a value with the first that is lost
}

// Found describes a record that an earlier process has left, or that was a dead letter.
type Found struct {
	ID       string
	Function string
	Kind     Kind
	Failed   int       // attempts so far
	Accepted time.Time // of a record of an earlier version: when its present state was stored
	Next     time.Time // of the next attempt; zero: as soon as there is room
}

// Stats counts since the journal was opened, and what is there now.
type Stats struct {
	Accepted, Refused    uint64         // by Append
	Runs, Callbacks      uint64         // ended, whatever their end
	Retried, Done, Dead  uint64         // ends, of both
	Resumed              uint64         // records found when it was opened
	Bytes                int64          // of records now
	Letters, LetterBytes int64          // dead letters now
	Pending, Running     map[string]int // records by function; of them in work as runs
}

// The errors of Append that are not the disk's.
var (
	ErrTooLarge  = errors.New("queue: record too large")
	ErrQueueFull = errors.New("queue: too many records of one function")
	ErrShare     = errors.New("queue: the records of one function are too large together")
	ErrFull      = errors.New("queue: the journal is full")
)

// blobAbove is the size in bytes above which a record's content is a file of its own.
const blobAbove = 1 << 20

// The fields of a stored record; all may be missing.
const (
	headKind     = "Kind"       // of work, unless it is a run
	headTo       = "To"         // the callback's receiver
	headBlob     = "Blob"       // the file that has the content
	headSize     = "Size"       // of that file
	headFailed   = "Failed"     // attempts that failed so far
	headStarts   = "Starts"     // processes that were given it, beyond the first
	headAfter    = "Not-Before" // time in unix nanoseconds
	headCause    = "Cause"      // of a dead letter
	headAccepted = "Accepted"   // time in unix nanoseconds, of a dead letter and what it was before
)

// message is a record as it is stored.
type message struct {
	subject string
	header  nats.Header
	data    []byte
	at      time.Time // stored
	value   any       // decoded form of data; nil: not at hand
}

func (m *message) number(field string) int64 {
	n, _ := strconv.ParseInt(m.header.Get(field), 10, 64) // none: 0
	return n
}

func (m *message) set(field, value string) {
	if m.header == nil {
		m.header = nats.Header{}
	}
	m.header.Set(field, value)
}

func (m *message) setNumber(field string, n int64) { m.set(field, strconv.FormatInt(n, 10)) }

func (m *message) kind() Kind {
	if m.header.Get(headKind) == Callback.String() {
		return Callback
	}
	return Run
}

// OpenJournal opens the journal's streams, which are made if they do not exist, and reads what is in them. Streams of
// earlier versions are read: their records have no function and wait in a line of their own.
func OpenJournal(ctx context.Context, nc *nats.Conn, cfg JournalConfig, log *slog.Logger) (*Journal, error) {
	cfg = cfg.withDefaults()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(1<<14), jetstream.WithPublishAsyncTimeout(appendTimeout))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{
		js: js, cfg: cfg, log: log, wake: make(chan struct{}, 1), doubts: map[string]bool{},
		lost: map[string]lost{}, losing: make(chan struct{}, 1),
		lines: newLines(cfg.Window, callbackWindow, cfg.Limits), dead: newDeadLetters(),
	}
	if j.blobs, err = openBlobs(cfg.Blobs); err != nil {
		return nil, err
	}
	for i := range cfg.Shards {
		s, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: "JOURNAL-" + strconv.Itoa(i), Subjects: []string{fmt.Sprintf("journal.%d.>", i)},
			Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, AllowDirect: true,
			// Append bounds the contents. This has room for names and headers too, and for shards that are not alike: a retry
			// that a stream refuses is a dead letter.
			Discard: jetstream.DiscardNew, MaxBytes: 2 * cfg.Bytes / int64(cfg.Shards),
			MaxMsgsPerSubject: -1, // what a limit removes is back after kill -9: only what is deleted is not
		})
		if err != nil {
			return nil, fmt.Errorf("journal shard %d: %w", i, err)
		}
		j.shards = append(j.shards, s)
	}
	if j.dead.stream, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "DEAD", Subjects: []string{"dead.>"}, Storage: jetstream.FileStorage, AllowDirect: true,
		MaxBytes: cfg.Bytes, Discard: jetstream.DiscardOld, MaxMsgsPerSubject: -1,
	}); err != nil {
		return nil, fmt.Errorf("dead letters: %w", err)
	}
	if err := j.recover(ctx); err != nil {
		return nil, fmt.Errorf("journal: read what is there: %w", err)
	}
	return j, nil
}

// callbackWindow is how many callbacks are in work at a time.
const callbackWindow = 256

// appendTimeout bounds how long the disk may take to keep a record.
const appendTimeout = 10 * time.Second

// Append does the same as AppendValue without a value.
func (j *Journal) Append(function, id string, data []byte) error {
	return j.AppendValue(function, id, data, nil)
}

// AppendValue returns once the record is on disk. id must be unique: a second record of the same id
// replaces the first. The caller must not use data afterwards. value is what data was made from: if
// the record is worked on at once, its Record has it. On a full disk, the error wraps
// syscall.ENOSPC and names the disk. While the streams take no writes for another reason, it wraps
// ErrStopped. After any error but ErrTooLarge, ErrQueueFull, ErrShare and ErrFull, the record may
// still be kept, because the disk answered too late. Run deletes it later; if the process ends
// before, the next one runs it.
func (j *Journal) AppendValue(function, id string, data []byte, value any) error {
	size := int64(len(data))
	if most := j.cfg.Bytes / 4; size > most {
		return j.refused(fmt.Errorf("journal record %q of %d bytes, want at most %d: %w", id, size, most, ErrTooLarge))
	}
	limit := j.cfg.Limits(function).Queue
	m := &message{subject: j.subject(function, id), data: data, at: time.Now(), value: value}
	j.mu.Lock()
	a := j.lines.open(function, size)
	records, own, bytes := a.records, a.bytes, j.lines.bytes
	j.mu.Unlock()
	err := j.cfg.Disk.room(size, acceptRoom)
	var seq uint64
	was := false
	switch {
	case err != nil:
	case records > limit:
		err = fmt.Errorf("%d async requests for %q are accepted and not done: %w", limit, function, ErrQueueFull)
	case own > j.cfg.Bytes/2: // so that no function alone fills it
		err = fmt.Errorf("%d bytes of async requests for %q are accepted and not done, want at most %d, half of the journal: %w", own-size, function, j.cfg.Bytes/2, ErrShare)
	case bytes > j.cfg.Bytes/10*9: // the rest is for records that grow
		err = fmt.Errorf("%d bytes of async requests are accepted and not done, which is the limit: %w", bytes-size, ErrFull)
	default:
		was = j.find(m.subject)
		seq, err = j.store(m)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.lines.close(a, size)
		j.lose(m, j.shard(id), err, was)
		j.stats.Refused++
		return err
	}
	j.stats.Accepted++
	it := item{seq: seq, size: size, account: a, shard: j.shard(id)}
	j.lines.push(lineKey{Run, function}, it, time.Time{}, time.Time{})
	j.pump(Run, it, m)
	return nil
}

// pump begins what may run. The content of one record may be at hand already.
func (j *Journal) pump(kind Kind, it item, m *message) {
	for j.begin != nil {
		ln, next, ok := j.lines.next(kind)
		if !ok {
			return
		}
		if m != nil && next.seq == it.seq && next.shard == it.shard {
			j.begin(ln, next, m)
		} else {
			j.begin(ln, next, nil)
		}
	}
}

func (j *Journal) refused(err error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stats.Refused++
	return err
}

func (j *Journal) shard(id string) int32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	return int32(h.Sum32() % uint32(j.cfg.Shards))
}

func (j *Journal) subject(function, id string) string {
	b := strconv.AppendInt(append(make([]byte, 0, 128), "journal."...), int64(j.shard(id)), 10)
	return string(appendToken(append(appendToken(append(b, '.'), function), '.'), id))
}

// store publishes m and returns its sequence once it is on disk. Large data becomes a file before, unless it is one already.
func (j *Journal) store(m *message) (seq uint64, err error) {
	if err := j.cfg.Disk.room(int64(len(m.data)), changeRoom); err != nil {
		return 0, fmt.Errorf("record of %d bytes at %s: %w", len(m.data), m.subject, err)
	}
	made := ""
	if len(m.data) > blobAbove && m.header.Get(headBlob) == "" {
		if made, err = j.blobs.put(m.data); err != nil {
			return 0, fmt.Errorf("large record of %d bytes: %w", len(m.data), err)
		}
		m.set(headBlob, made)
		m.set(headSize, strconv.Itoa(len(m.data)))
	}
	msg := &nats.Msg{Subject: m.subject, Header: m.header, Data: m.data}
	if m.header.Get(headBlob) != "" {
		msg.Data = nil
	}
	stopped := j.cfg.Disk.stops()
	f, err := j.js.PublishMsgAsync(msg)
	if err == nil {
		select {
		case ack := <-f.Ok():
			return ack.Sequence, nil
		case err = <-f.Err():
		case <-stopped: // perhaps by this message, which then gets no answer
			err = cmp.Or(j.cfg.Disk.fault(), ErrStopped)
		}
	}
	var api *jetstream.APIError
	if errors.As(err, &api) { // else a late answer may come: the file stays for the next process
		if made != "" {
			_ = j.blobs.drop(made) // swept at the next start
			m.header.Del(headBlob)
			m.header.Del(headSize)
		}
		if api.ErrorCode == errStoreFailed {
			err = errors.Join(err, ErrFull)
		}
	} else {
		err = unanswered{err}
	}
	return 0, fmt.Errorf("record of %d bytes at %s: %w", len(m.data), m.subject, err)
}

// refusal reports whether err says that the disk is full, or that the streams take no writes.
func refusal(err error) bool { return disk.IsFull(err) || errors.Is(err, ErrStopped) }

// errStoreFailed is JetStream's code for a message that a stream has no room for.
const errStoreFailed = 10077

// Stats returns the counts.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.stats
	s.Bytes = j.lines.bytes
	s.Letters, s.LetterBytes = j.dead.count()
	s.Pending, s.Running = map[string]int{}, map[string]int{}
	for name, a := range j.lines.accounts {
		s.Pending[name], s.Running[name] = a.records, a.runs
	}
	return s
}

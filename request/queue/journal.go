package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Kind is the kind of work that is left for a record.
type Kind uint8

// The kinds of work.
const (
	Run      Kind = iota // run the request
	Callback             // deliver its result
)

// String returns the name under which the kind is stored and shown.
func (k Kind) String() string { return [...]string{"run", "callback"}[k] }

// Limits bound one function's part of the journal.
type Limits struct {
	Concurrency int // concurrent runs
	Queue       int // records in any state; Append refuses more
}

// JournalConfig configures a [Journal]. A zero field means its default.
type JournalConfig struct {
	Disk *Disk // disk of the server's streams; required
	// Folder for records above 1 MiB, on the same disk; required if the server is embedded. With NATS
	// outside, these records are in its object store.
	Blobs string
	// Number of streams that share the load; default 4. It cannot change during the life of a state
	// folder.
	Shards int
	// Bytes of contents; default 1 GiB. One function may have at most half. Dead letters may have
	// as much again.
	Bytes  int64
	Window int                          // concurrent runs of all functions; default 1024
	Limits func(function string) Limits // default: 64 runs and 10,000 records
	// Number of dead letters, above which the oldest are deleted; default 10,000.
	Dead int
	// Died is called for each new dead letter. It must not block or call back. It may be nil.
	Died func(DeadLetter)
	// Found is called for each record that OpenJournal finds, and for dead letters that run again.
	// It must not block or call back. It may be nil.
	Found func(Found)
	// Held returns nil if no other process can have read the journal since this one did. It may wait.
	// It is called for each record, after the record is stored and before it runs. If it is nil, no
	// other process can open the journal.
	Held func() error
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

// Journal keeps accepted async requests on disk until they are done. Once Append has returned, a
// record survives kill -9 of every process. To survive power loss, it must also have been synced;
// ServerConfig.Sync sets how often that happens.
//
// The records are in JetStream streams. An index in memory, rebuilt at each start, selects the next
// record to run (docs/adr/0014). At most one process may have a journal open. With NATS outside, an
// earlier process may not know yet that another one has the journal: of two changes of a record's
// state, only the first is stored.
type Journal struct {
	js     jetstream.JetStream
	cfg    JournalConfig
	shards []jetstream.Stream
	blobs  contents
	dead   *deadLetters
	log    *slog.Logger

	mu    sync.Mutex
	lines *lines
	begin func(*line, item, *message) // starts a record's work; nil: there are no workers
	// receives when the time of the next delayed record has changed.
	wake  chan struct{}
	stats Stats

	// Subjects of records that may have unknown states; see markUncertain.
	uncertain map[string]bool
	lost      map[string]lost // by subject
	losing    chan struct{}   // receives when lost gets its first record
}

// Found describes a record that an earlier process left, or that was a dead letter.
type Found struct {
	ID       string
	Function string
	Kind     Kind
	Failed   int // attempts so far
	// Time of acceptance; for records of an earlier version, when the present state was stored.
	Accepted time.Time
	Next     time.Time // time of the next attempt; zero: as soon as there is room
}

// Stats has counts since the journal was opened, and its present content.
type Stats struct {
	Accepted, Refused    uint64         // by Append
	Runs, Callbacks      uint64         // ended runs and callbacks, whatever their end
	Retried, Done, Dead  uint64         // outcomes of both
	Resumed              uint64         // records found at the opening
	Bytes                int64          // contents of all records
	Letters, LetterBytes int64          // dead letters, and their bytes
	Pending, Running     map[string]int // records by function; those that run
}

// The errors of Append that the disk does not cause.
var (
	ErrTooLarge  = errors.New("queue: record too large")
	ErrQueueFull = errors.New("queue: too many records of one function")
	ErrShare     = errors.New("queue: the records of one function are too large together")
	ErrFull      = errors.New("queue: the journal is full")
)

// blobAbove is the size in bytes above which a record's content is stored in its own file.
const blobAbove = 1 << 20

// The header fields of a stored record. All are optional.
const (
	headKind     = "Kind"       // kind of work; absent: a run
	headTo       = "To"         // receiver of the callback
	headBlob     = "Blob"       // file with the content
	headSize     = "Size"       // size of that file
	headFailed   = "Failed"     // number of failed attempts
	headStarts   = "Starts"     // number of further processes that started it
	headAfter    = "Not-Before" // Unix time in nanoseconds
	headCause    = "Cause"      // of a dead letter
	headDropped  = "Dropped"    // of a dead letter: why a policy dropped its last run
	headAccepted = "Accepted"   // Unix time in nanoseconds; of a dead letter and of its record

	headWithdrawn = "Withdrawn" // the record was refused after it was stored, and must not run
)

// message is a stored record.
type message struct {
	subject string
	header  nats.Header
	data    []byte
	at      time.Time // when it was stored
	value   any       // decoded form of data; nil: data must be decoded
	after   uint64    // store it only if this is the record's latest state; 0: in any case
}

func (m *message) number(field string) int64 {
	n, _ := strconv.ParseInt(m.header.Get(field), 10, 64) // 0 if absent
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

// OpenJournal opens the journal's streams and reads their content. It creates missing streams. It
// reads streams of earlier versions: their records have no function and share one line.
func OpenJournal(ctx context.Context, nc *nats.Conn, cfg JournalConfig, log *slog.Logger) (*Journal, error) {
	cfg = cfg.withDefaults()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(1<<14), jetstream.WithPublishAsyncTimeout(appendTimeout))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{
		js: js, cfg: cfg, log: log, wake: make(chan struct{}, 1), uncertain: map[string]bool{},
		lost: map[string]lost{}, losing: make(chan struct{}, 1),
		lines: newLines(cfg.Window, callbackWindow, cfg.Limits), dead: newDeadLetters(),
	}
	if cfg.Disk.cluster != nil {
		var o *Objects
		o, err = openObjects(ctx, js, cfg.Disk, objectBucket)
		j.blobs = objects{o}
	} else {
		j.blobs, err = openBlobs(cfg.Blobs)
	}
	if err != nil {
		return nil, err
	}
	for i := range cfg.Shards {
		copies, err := cfg.Disk.copies(ctx, js, "JOURNAL-"+strconv.Itoa(i))
		if err != nil {
			return nil, fmt.Errorf("journal shard %d: %w", i, err)
		}
		s, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: "JOURNAL-" + strconv.Itoa(i), Subjects: []string{fmt.Sprintf("journal.%d.>", i)},
			Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, Replicas: copies,
			// A copy may lack the latest records, and a record that is not found counts as done.
			AllowDirect: copies == 1,
			// Append bounds the contents. The factor 2 leaves room for names, headers and uneven
			// shards, because a retry that a stream refuses becomes a dead letter.
			Discard: jetstream.DiscardNew, MaxBytes: 2 * cfg.Bytes / int64(cfg.Shards),
			// After kill -9, messages that a limit removed come back. Only deleted messages do not.
			MaxMsgsPerSubject: -1,
		})
		if err != nil {
			return nil, fmt.Errorf("journal shard %d: %w", i, err)
		}
		j.shards = append(j.shards, s)
	}
	copies, err := cfg.Disk.copies(ctx, js, "DEAD")
	if err != nil {
		return nil, fmt.Errorf("dead letters: %w", err)
	}
	if j.dead.stream, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "DEAD", Subjects: []string{"dead.>"}, Storage: jetstream.FileStorage, Replicas: copies, AllowDirect: copies == 1,
		MaxBytes: cfg.Bytes, Discard: jetstream.DiscardOld, MaxMsgsPerSubject: -1,
	}); err != nil {
		return nil, fmt.Errorf("dead letters: %w", err)
	}
	if err := j.recover(ctx); err != nil {
		return nil, fmt.Errorf("journal: read the streams: %w", err)
	}
	return j, nil
}

// callbackWindow is the number of concurrent callbacks.
const callbackWindow = 256

// appendTimeout bounds how long the disk may take to store a record.
const appendTimeout = 10 * time.Second

// Append is AppendValue without a value.
func (j *Journal) Append(function, id string, data []byte) error {
	return j.AppendValue(function, id, data, nil)
}

// AppendValue stores a record, and returns once the record is on disk. id must be unique: a second
// record with the same id replaces the first. The caller must not use data afterwards. value is the
// decoded form of data. Work gets value in its Record, unless the record had to be read from disk.
//
// On a full disk, the error wraps syscall.ENOSPC and names the disk. If the streams take no writes
// for another reason, the error wraps ErrStopped. After ErrTooLarge, ErrQueueFull, ErrShare and
// ErrFull, nothing is stored. After any other error, the record may be in the stream, because the
// disk may have answered too late. Then Run deletes it. If the process ends before that, the next
// process runs the record.
//
// If this process was overtaken meanwhile (JournalConfig.Held), AppendValue withdraws the record
// and returns ErrStopped. If the next process has already begun the record, AppendValue returns
// nil. If NATS does not answer within 2 s, the error says that the record may run.
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
	was, theirs := false, false
	switch {
	case err != nil:
	case records > limit:
		err = fmt.Errorf("%d async requests for %q are accepted and not done: %w", limit, function, ErrQueueFull)
	case own > j.cfg.Bytes/2: // so that one function alone cannot fill it
		err = fmt.Errorf("%d bytes of async requests for %q are accepted and not done, want at most %d, half of the journal: %w", own-size, function, j.cfg.Bytes/2, ErrShare)
	case bytes > j.cfg.Bytes/10*9: // the rest is for records that grow
		err = fmt.Errorf("%d bytes of async requests are accepted and not done, which is the limit: %w", bytes-size, ErrFull)
	default:
		was = j.takeLost(m.subject)
		if seq, err = j.store(m); err == nil {
			theirs, err = confirm(j, m, j.shard(id), seq)
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.lines.close(a, size)
		j.recordLost(m, j.shard(id), err, was)
		j.stats.Refused++
		return err
	}
	j.stats.Accepted++
	if theirs {
		j.lines.close(a, size)
		return nil
	}
	it := item{seq: seq, size: size, account: a, shard: j.shard(id)}
	j.lines.push(lineKey{Run, function}, it, time.Time{}, time.Time{})
	j.startReady(Run, it, m)
	return nil
}

// startReady starts all records that may run now. A caller that already has the content of a record
// passes the record's index entry and the content m. Otherwise m is nil.
func (j *Journal) startReady(kind Kind, it item, m *message) {
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

// store publishes m and returns its sequence once it is on disk. Large data is written to a file
// first, unless it is in one already.
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
	if m.after > 0 {
		msg.Header = maps.Clone(m.header)
		if msg.Header == nil {
			msg.Header = nats.Header{}
		}
		msg.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(m.after, 10))
	}
	stopped := j.cfg.Disk.stops()
	f, err := j.js.PublishMsgAsync(msg)
	if err == nil {
		select {
		case ack := <-f.Ok():
			return ack.Sequence, nil
		case err = <-f.Err():
		case <-stopped: // perhaps because of this message, which then gets no answer
			err = cmp.Or(j.cfg.Disk.fault(), ErrStopped)
		}
	}
	var api *jetstream.APIError
	// Otherwise an answer may still come, so the file stays for the next process.
	if errors.As(err, &api) {
		if made != "" {
			_ = j.blobs.drop(made) // swept at the next start
			m.header.Del(headBlob)
			m.header.Del(headSize)
		}
		switch explained := j.cfg.Disk.explain(err); {
		case wrongSequence(api):
			err = errors.Join(err, errOvertaken)
		case explained != err: //nolint:errorlint // the same error, unless the cluster refuses
			err = explained
		case api.ErrorCode == errStoreFailed:
			err = errors.Join(err, ErrFull)
		}
	} else {
		err = unanswered{j.cfg.Disk.late(err)}
	}
	return 0, fmt.Errorf("record of %d bytes at %s: %w", len(m.data), m.subject, err)
}

// refusal reports whether err means that the disk is full or that the streams take no writes.
func refusal(err error) bool { return disk.IsFull(err) || errors.Is(err, ErrStopped) }

// errStoreFailed is JetStream's code for a full stream.
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

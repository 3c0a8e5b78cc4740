package queue

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// JournalConfig bounds a journal. The zero value of a field means its default.
type JournalConfig struct {
	Shards   int           // streams that share the load; default 4. Fixed for the life of a state folder.
	Bytes    int64         // kept over all shards; beyond it Append fails; default 1 GiB
	Window   int           // records in work at a time, a shard; default 64
	AckWait  time.Duration // a record whose worker shows no sign of life for this long is given out again; default 30 s
	Attempts int           // runs that may fail before a record becomes a dead letter; default 5
	Backoff  time.Duration // before the second run, doubled for each further one; default 1 s
}

func (c JournalConfig) withDefaults() JournalConfig {
	if c.Shards == 0 {
		c.Shards = 4
	}
	if c.Bytes == 0 {
		c.Bytes = 1 << 30
	}
	if c.Window == 0 {
		c.Window = 64
	}
	if c.AckWait == 0 {
		c.AckWait = 30 * time.Second
	}
	if c.Attempts == 0 {
		c.Attempts = 5
	}
	if c.Backoff == 0 {
		c.Backoff = time.Second
	}
	return c
}

// Journal keeps accepted async requests on disk until they are done. A record survives kill -9 of every process from the
// moment Append returns; it survives power loss only once the file system has written it, which JetStream asks for every
// two minutes.
type Journal struct {
	js     jetstream.JetStream
	cfg    JournalConfig
	shards []jetstream.Consumer
	log    *slog.Logger

	mu     sync.Mutex
	failed map[place]int // runs that failed, by record in work or in back-off: at most Window a shard
}

// place is where a record lies.
type place struct {
	stream   string
	sequence uint64
}

// MaxRecord is the largest record in bytes: as a dead letter it carries its cause too.
const MaxRecord = MaxMessage - 1<<10

// maxCause is how many bytes of a cause a dead letter carries.
const maxCause = 512

// ErrTooLarge says that a record is above MaxRecord.
var ErrTooLarge = errors.New("queue: record too large")

// deliveries is how many times as often as it may fail a record is given out. Ends of the process do not count as failures,
// because they are hardly a record's fault; one that brings the process down each time must end somewhere still.
const deliveries = 10

// Record is one entry of the journal as it is given to a worker.
type Record struct {
	ID      string
	Data    []byte
	Attempt int  // from 1; runs cut short by the end of a process do not count, and a new process counts anew
	Last    bool // it is the last attempt: when it fails, the record becomes a dead letter

	place place
}

// OpenJournal opens the journal's streams, which are made if they do not exist.
func OpenJournal(ctx context.Context, nc *nats.Conn, cfg JournalConfig, log *slog.Logger) (*Journal, error) {
	cfg = cfg.withDefaults()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{js: js, cfg: cfg, log: log, failed: map[place]int{}}
	for i := range cfg.Shards {
		s, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: "JOURNAL-" + strconv.Itoa(i), Subjects: []string{fmt.Sprintf("journal.%d.*", i)},
			Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage,
			Discard: jetstream.DiscardNew, MaxBytes: cfg.Bytes / int64(cfg.Shards),
		})
		if err != nil {
			return nil, fmt.Errorf("journal shard %d: %w", i, err)
		}
		c, err := s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
			Durable: "run", AckPolicy: jetstream.AckExplicitPolicy, AckWait: cfg.AckWait, MaxAckPending: cfg.Window,
		})
		if err != nil {
			return nil, fmt.Errorf("journal shard %d: %w", i, err)
		}
		j.shards = append(j.shards, c)
	}
	_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "DEAD", Subjects: []string{"dead.*"}, Storage: jetstream.FileStorage,
		MaxBytes: cfg.Bytes, Discard: jetstream.DiscardOld,
	})
	if err != nil {
		return nil, fmt.Errorf("dead letters: %w", err)
	}
	return j, nil
}

// Append returns once the record is on disk. A record above MaxRecord is refused with ErrTooLarge.
func (j *Journal) Append(ctx context.Context, id string, data []byte) error {
	if len(data) > MaxRecord {
		return fmt.Errorf("journal record %q of %d bytes, want at most %d: %w", id, len(data), MaxRecord, ErrTooLarge)
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	subject := fmt.Sprintf("journal.%d.%s", h.Sum32()%uint32(j.cfg.Shards), Token(id))
	if _, err := j.js.Publish(ctx, subject, data); err != nil {
		return fmt.Errorf("journal record %q of %d bytes: %w", id, len(data), err)
	}
	return nil
}

// Run gives each record to work, up to Window a shard at a time, until ctx ends, and waits for the workers. A record is
// done when work returns nil. When it returns an error or panics the record is given out again after a back-off, and becomes
// a dead letter after the last attempt. work's context ends with ctx; a record that was cut short by that is given out again
// after AckWait. Run returns an error when a shard can be read no more.
func (j *Journal) Run(ctx context.Context, work func(context.Context, Record) error) error {
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	working, cut := context.WithCancel(context.WithoutCancel(ctx)) // ends once nothing is given out any more
	defer cut()
	w := &workers{}
	var consumers []jetstream.ConsumeContext
	for i, c := range j.shards {
		cc, err := c.Consume(func(m jetstream.Msg) {
			w.begin(func() { j.run(working, m, work) }) // bounded by MaxAckPending
		}, jetstream.PullMaxMessages(j.cfg.Window), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			if running.Err() == nil {
				j.log.Warn("journal", "shard", i, "error", err)
			}
		}))
		if err != nil {
			stop(fmt.Errorf("journal shard %d: %w", i, err))
			break
		}
		consumers = append(consumers, cc)
		w.begin(func() {
			select {
			case <-cc.Closed():
				stop(fmt.Errorf("journal shard %d: its consumer has ended", i))
			case <-running.Done():
			}
		})
	}
	<-running.Done()
	for _, cc := range consumers {
		cc.Stop()
		<-cc.Closed()
	}
	cut() // a record given back before would come to a consumer that has stopped, and again only after AckWait
	w.end()
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(running)
}

// workers is a WaitGroup that can be closed: a consumer may hand out one more message after it was stopped.
type workers struct {
	mu     sync.Mutex
	closed bool
	group  sync.WaitGroup
}

// begin runs f on a goroutine, unless end was called.
func (w *workers) begin(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.group.Go(f)
	}
}

// end lets nothing begin any more and waits for what runs.
func (w *workers) end() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.group.Wait()
}

func (j *Journal) run(ctx context.Context, m jetstream.Msg, work func(context.Context, Record) error) {
	rec, err := j.record(m)
	if err != nil {
		j.bury(ctx, m, rec, err)
		return
	}
	done := make(chan error, 1)
	go func() { done <- j.try(ctx, rec, work) }() // waited for below
	alive := time.NewTicker(j.cfg.AckWait / 3)
	defer alive.Stop()
	for {
		select {
		case <-alive.C:
			j.warn(rec, "in progress", m.InProgress())
		case err := <-done:
			switch {
			case err == nil:
				j.warn(rec, "ack", m.Ack())
				j.settle(rec)
			case ctx.Err() != nil: // the process ends, the record is not to blame
				j.warn(rec, "nak", m.Nak())
			case rec.Last:
				j.bury(ctx, m, rec, fmt.Errorf("attempt %d of %d: %w", rec.Attempt, j.cfg.Attempts, err))
			default:
				j.mu.Lock()
				j.failed[rec.place] = rec.Attempt
				j.mu.Unlock()
				j.warn(rec, "nak", m.NakWithDelay(j.cfg.Backoff<<(rec.Attempt-1)))
			}
			return
		}
	}
}

// try runs work. A panic is an error of the record that caused it, not the end of all others.
func (j *Journal) try(ctx context.Context, rec Record, work func(context.Context, Record) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			j.log.Error("panic in the work of a record", "record", rec.ID, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return work(ctx, rec)
}

// settle forgets the failures of a record that is done.
func (j *Journal) settle(rec Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.failed, rec.place)
}

// record reads a message; an error says why it must not run.
func (j *Journal) record(m jetstream.Msg) (Record, error) {
	meta, err := m.Metadata()
	if err != nil {
		return Record{}, fmt.Errorf("journal record without metadata: %w", err)
	}
	rec := Record{Data: m.Data(), place: place{meta.Stream, meta.Sequence.Stream}}
	subject := m.Subject()
	if rec.ID, err = Name(subject[lastDot(subject)+1:]); err != nil {
		return rec, err
	}
	if limit := uint64(deliveries * j.cfg.Attempts); meta.NumDelivered > limit {
		return rec, fmt.Errorf("given out %d times without an end, want at most %d", meta.NumDelivered, limit)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	rec.Attempt = j.failed[rec.place] + 1
	rec.Last = rec.Attempt >= j.cfg.Attempts
	return rec, nil
}

func lastDot(s string) int {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] == '.' {
			return i
		}
	}
	return -1
}

// bury moves m to the dead letters: stored there first, then taken off the journal.
func (j *Journal) bury(ctx context.Context, m jetstream.Msg, rec Record, cause error) {
	subject := m.Subject()
	dead := nats.NewMsg("dead." + subject[lastDot(subject)+1:])
	dead.Data = m.Data()
	text := cause.Error()
	dead.Header.Set("Cause", strings.ToValidUTF8(text[:min(len(text), maxCause)], ""))
	if _, err := j.js.PublishMsg(ctx, dead); err != nil {
		j.log.Error("dead letter not stored, the record stays in the journal", "subject", dead.Subject, "error", err)
		return
	}
	j.settle(rec)
	j.log.Warn("dead letter", "subject", dead.Subject, "cause", cause)
	if err := m.Ack(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		j.log.Warn("journal", "verb", "ack", "subject", subject, "error", err)
	}
}

func (j *Journal) warn(rec Record, verb string, err error) {
	if err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		j.log.Warn("journal", "verb", verb, "record", rec.ID, "error", err)
	}
}

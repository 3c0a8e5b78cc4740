package queue

import (
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
)

// JournalConfig bounds a journal. The zero value of a field means its default.
type JournalConfig struct {
	Shards   int           // streams that share the load; default 4. Fixed for the life of a state folder.
	Bytes    int64         // kept over all shards; beyond it Append fails; default 1 GiB
	Window   int           // records in work at a time, a shard; default 64
	AckWait  time.Duration // a record whose worker shows no sign of life for this long is given out again; default 30 s
	Attempts int           // runs of a record before it becomes a dead letter; default 5
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
}

// Record is one entry of the journal as it is given to a worker.
type Record struct {
	ID      string
	Data    []byte
	Attempt int // from 1
}

// OpenJournal opens the journal's streams, which are made if they do not exist.
func OpenJournal(ctx context.Context, nc *nats.Conn, cfg JournalConfig, log *slog.Logger) (*Journal, error) {
	cfg = cfg.withDefaults()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{js: js, cfg: cfg, log: log}
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

// Append returns once the record is on disk.
func (j *Journal) Append(ctx context.Context, id string, data []byte) error {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	subject := fmt.Sprintf("journal.%d.%s", h.Sum32()%uint32(j.cfg.Shards), Token(id))
	if _, err := j.js.Publish(ctx, subject, data); err != nil {
		return fmt.Errorf("journal record %q of %d bytes: %w", id, len(data), err)
	}
	return nil
}

// Run gives each record to work, up to Window a shard at a time, until ctx ends, and waits for the workers. A record is
// done when work returns nil. When it returns an error the record is given out again after a back-off, and becomes a dead
// letter after the last attempt. work's context ends with ctx; a record that was cut short by that is given out again
// after AckWait.
func (j *Journal) Run(ctx context.Context, work func(context.Context, Record) error) error {
	var wg sync.WaitGroup
	var stops []jetstream.ConsumeContext
	for i, c := range j.shards {
		cc, err := c.Consume(func(m jetstream.Msg) {
			wg.Go(func() { j.run(ctx, m, work) }) // bounded by MaxAckPending
		}, jetstream.PullMaxMessages(j.cfg.Window))
		if err != nil {
			return fmt.Errorf("journal shard %d: %w", i, err)
		}
		stops = append(stops, cc)
	}
	<-ctx.Done()
	for _, cc := range stops {
		cc.Stop()
		<-cc.Closed()
	}
	wg.Wait()
	return nil
}

func (j *Journal) run(ctx context.Context, m jetstream.Msg, work func(context.Context, Record) error) {
	rec, err := record(m)
	if err != nil {
		j.bury(ctx, m, err)
		return
	}
	done := make(chan error, 1)
	go func() { done <- work(ctx, rec) }() // waited for below
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
			case ctx.Err() != nil: // the process ends, the record is not to blame
				j.warn(rec, "nak", m.Nak())
			case rec.Attempt >= j.cfg.Attempts:
				j.bury(ctx, m, fmt.Errorf("attempt %d of %d: %w", rec.Attempt, j.cfg.Attempts, err))
			default:
				j.warn(rec, "nak", m.NakWithDelay(j.cfg.Backoff<<(rec.Attempt-1)))
			}
			return
		}
	}
}

func record(m jetstream.Msg) (Record, error) {
	meta, err := m.Metadata()
	if err != nil {
		return Record{}, fmt.Errorf("journal record without metadata: %w", err)
	}
	subject := m.Subject()
	id, err := Name(subject[lastDot(subject)+1:])
	if err != nil {
		return Record{}, err
	}
	return Record{ID: id, Data: m.Data(), Attempt: int(meta.NumDelivered)}, nil
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
func (j *Journal) bury(ctx context.Context, m jetstream.Msg, cause error) {
	subject := m.Subject()
	dead := nats.NewMsg("dead." + subject[lastDot(subject)+1:])
	dead.Data = m.Data()
	dead.Header.Set("Cause", cause.Error())
	if _, err := j.js.PublishMsg(ctx, dead); err != nil {
		j.log.Error("dead letter not stored, the record stays in the journal", "subject", dead.Subject, "error", err)
		return
	}
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

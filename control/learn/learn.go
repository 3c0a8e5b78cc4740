// Package learn feeds a demand.Learner from ended requests while Stagecoach runs, and stores what
// was learned, so that it survives restarts.
//
// [Demand.Ended] is on the path of requests, and only puts the request into a bounded queue. A
// goroutine empties the queue. Requests that find it full are counted, and nothing is learned from
// them.
package learn

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Store keeps records; a *queue.KV is one.
type Store interface {
	// Watch calls f with each stored record, and then with changes until stop is called.
	Watch(ctx context.Context, f func(Entry)) (stop func(), err error)
	Put(ctx context.Context, key string, value []byte) (revision uint64, err error)
}

// Entry is a record in a Store. It is an alias, so that a *queue.KV is a Store without an adapter.
type Entry = struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// Config configures a Demand. Every field is required.
type Config struct {
	Store Store
	// Graph returns the graph of a pipeline, or of a function as a pipeline of one stage.
	Graph   func(pipeline.Key) (pipeline.Pipeline, bool)
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

const (
	queueLimit = 8192                   // ended requests that wait to be learned from
	gather     = 100 * time.Millisecond // how long they wait, so that they are taken together
	saveEvery  = time.Minute
	saveTime   = 10 * time.Second // bounds each save
	shards     = 32               // records; the name of an application says which one it is in
	shardLimit = 900 << 10        // bytes of a record
)

// ended is a request in the queue.
type ended struct {
	at       time.Time
	app      string
	timings  []task.Timing
	complete bool
}

// Demand is the demand that the gateway's requests teach. [Open] makes one.
type Demand struct {
	cfg     Config
	dropped prometheus.Counter
	wake    chan struct{} // the queue has got its first request
	done    chan struct{}
	loop    sync.WaitGroup

	saving sync.Mutex // held by Save
	failed bool       // the latest save failed, which was logged

	mu    sync.Mutex
	queue []ended // waiting requests

	// learning guards the fields below. It is locked before mu.
	learning sync.Mutex
	taken    []ended // the queue's memory while mu is free
	lesson   flow.Lesson
	graph    pipeline.Pipeline // of the request that is learned from
	learner  *demand.Learner
	changed  [shards]bool // since they were saved

	summary flow.Summary

	refused [shards]string
	tight   bool // applications did not fit into their record, which was logged
}

// Open reads what earlier processes have learned, and begins to learn. A record that it cannot read
// is logged, and its applications start empty.
func Open(ctx context.Context, c Config) (*Demand, error) {
	d := &Demand{
		cfg: c, wake: make(chan struct{}, 1), done: make(chan struct{}), learner: demand.New(demand.DefaultLimits()),
		queue: make([]ended, 0, queueLimit), taken: make([]ended, 0, queueLimit),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "demand", Name: "dropped_total",
			Help: "Ended requests from which no demand was learned, because they came too fast.",
		}),
	}
	if err := d.Reload(ctx); err != nil {
		return nil, err
	}
	for _, m := range append(d.gauges(), d.dropped) {
		if err := c.Metrics.Register(m); err != nil {
			return nil, fmt.Errorf("learned demand: %w", err)
		}
	}
	d.loop.Go(d.run)
	return d, nil
}

// gauges returns the metrics that are read from the learner.
func (d *Demand) gauges() []prometheus.Collector {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "stagecoach", Subsystem: "demand", Name: name, Help: help}
	}
	read := func(value func(*demand.Learner) float64) func() float64 {
		return func() float64 {
			d.learning.Lock()
			defer d.learning.Unlock()
			return value(d.learner)
		}
	}
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts("applications", "Applications whose demand was learned.")), read(func(l *demand.Learner) float64 { return float64(l.Apps()) })),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts("bytes", "Memory of the learned demand.")), read(func(l *demand.Learner) float64 { return float64(l.Bytes()) })),
		prometheus.NewCounterFunc(prometheus.CounterOpts(opts("forgotten_total", "Applications that were forgotten, because others were used later.")), read(func(l *demand.Learner) float64 { return float64(l.Forgotten()) })),
	}
}

// Ended takes a request for app, a pipeline.Key in text. complete means that the request succeeded.
// The caller must not change timings afterwards. Ended does not wait.
func (d *Demand) Ended(app string, timings []task.Timing, complete bool) {
	if len(timings) == 0 {
		return
	}
	e := ended{at: time.Now(), app: app, timings: timings, complete: complete}
	d.mu.Lock()
	if len(d.queue) == queueLimit {
		d.mu.Unlock()
		d.dropped.Inc()
		return
	}
	d.queue = append(d.queue, e)
	first := len(d.queue) == 1
	d.mu.Unlock()
	if first {
		select {
		case d.wake <- struct{}{}:
		default:
		}
	}
}

// learn learns from all waiting requests. The caller holds d.learning.
func (d *Demand) learn() {
	d.mu.Lock()
	d.queue, d.taken = d.taken[:0], d.queue
	d.mu.Unlock()
	for i := range d.taken {
		e := &d.taken[i]
		var ok bool
		d.graph, ok = d.cfg.Graph(pipeline.ParseKey(e.app))
		d.learner.Add(e.at, d.lesson.Of(e.app, &d.graph, e.timings, e.complete && ok))
		d.changed[shardOf(e.app)] = true
	}
	clear(d.taken) // releases the timings
}

// run learns and saves until Close.
func (d *Demand) run() {
	pause, save := time.NewTimer(gather), time.NewTicker(saveEvery)
	defer pause.Stop()
	defer save.Stop()
	for {
		select {
		case <-d.done:
			return
		case <-save.C:
			d.Save()
			continue
		case <-d.wake:
		}
		pause.Reset(gather)
		select {
		case <-d.done:
			return
		case <-pause.C:
		}
		d.learning.Lock()
		d.learn()
		d.learning.Unlock()
	}
}

// Close learns from the requests that wait, and saves. No request may end meanwhile.
func (d *Demand) Close() error {
	close(d.done)
	d.loop.Wait()
	d.Save()
	return nil
}

// App returns what is known about an application, whether anything is, and the reason if its record
// could not be read.
func (d *Demand) App(key pipeline.Key) (app demand.App, known bool, fault string) {
	d.learning.Lock()
	defer d.learning.Unlock()
	d.learn()
	name := key.String()
	app, known = d.learner.App(name, time.Now())
	return app, known, d.refused[shardOf(name)]
}

// Fill sets Learned of the functions of a snapshot. The figures may be as old as flow.SummaryAge.
func (d *Demand) Fill(s *plan.Snapshot) {
	d.learning.Lock()
	defer d.learning.Unlock()
	if d.summary.Old(s.At) {
		d.learn()
		d.summary.Make(d.learner, s.At)
	}
	d.summary.Fill(s)
}

// shardOf returns the record of an application.
func shardOf(app string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(app)) // never fails
	return int(h.Sum32() % shards)
}

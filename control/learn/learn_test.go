package learn

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// graph is film for each key: cut -> grade, one call per item.
func graph(pipeline.Key) (pipeline.Pipeline, bool) { return filmGraph, true }

var filmGraph = pipeline.Pipeline{Name: "film", Namespace: "ns", Entry: "cut", Stages: []pipeline.Stage{
	{Function: pipeline.Function{Name: "cut", Namespace: "ns"}, Next: []pipeline.Edge{{To: "grade"}}},
	{Function: pipeline.Function{Name: "grade", Namespace: "ns"}},
}}

func config(s Store) (Config, *proctest.Buffer) {
	log := &proctest.Buffer{}
	return Config{Store: s, Graph: graph, Log: slog.New(slog.NewTextHandler(log, nil)), Metrics: prometheus.NewRegistry()}, log
}

// bucket opens a bucket of a real server. closeAll closes both.
func bucket(t *testing.T, dir string) (kv *queue.KV, closeAll func()) {
	t.Helper()
	server, err := queue.StartServer(queue.ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	nc, err := server.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	if kv, err = queue.OpenKV(t.Context(), nc, server.Disk(), "demand"); err != nil {
		t.Fatal(err)
	}
	return kv, func() { nc.Close(); server.Close() }
}

// open opens a Demand on a bucket of a real server. closeAll closes all.
func open(t *testing.T, dir string, before func(*queue.KV)) (d *Demand, log *proctest.Buffer, closeAll func()) {
	t.Helper()
	kv, closeBucket := bucket(t, dir)
	if before != nil {
		before(kv)
	}
	c, log := config(kv)
	var err error
	if d, err = Open(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return d, log, func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		closeBucket()
	}
}

// timings are those of a request: cut returns two items, which grade gets one per call.
func timings() []task.Timing {
	return []task.Timing{
		{Stage: "cut", Function: "cut.ns", Service: 10 * time.Millisecond, Given: 1, Returned: 2},
		{Stage: "grade", Function: "grade.ns", Variant: "grade-small.ns", Service: 50 * time.Millisecond, Given: 1, Returned: 1, BatchSize: 2, Length: 7},
		{Stage: "grade", Function: "grade.ns", Code: task.ReplicaLost, Service: time.Hour},
		{Stage: "grade", Function: "grade.ns", Variant: "grade-small.ns", Service: 50 * time.Millisecond, Given: 1, Returned: 1, BatchSize: 2},
	}
}

var (
	film  = pipeline.Key{Name: "film", Namespace: "ns"}
	other = pipeline.Key{Name: "other", Namespace: "ns"}
)

// check wants film to have been learned from n requests.
func check(t *testing.T, d *Demand, n float64) {
	t.Helper()
	a, known, fault := d.App(film)
	if !known || fault != "" || len(a.Stages) != 2 || a.Requests < n*0.99 || a.Requests > n {
		t.Fatalf("known %v, fault %q, %+v, want two stages after %v requests", known, fault, a, n)
	}
	cut, grade := a.Stages[0], a.Stages[1]
	if len(cut.Next) != 1 || cut.Next[0].To != "grade" || cut.Next[0].Probability != 1 || cut.Next[0].Factor != 2 || len(cut.Next[0].Variants) != 1 || cut.Next[0].Variants[0].Factor != 2 {
		t.Errorf("after cut: %+v, want grade with two items", cut.Next)
	}
	l := grade.Lanes
	if len(l) != 1 || l[0].Function != "grade-small.ns" || l[0].Batch != 2 || l[0].Work.Mean < 0.0499 || l[0].Work.Mean > 0.0501 || grade.PerRequest != 2 || grade.Length.Mean != 7 {
		t.Errorf("grade: %+v, want 50 ms in the variant, in batches of 2, of length 7", grade)
	}
}

func TestLearnedDemandSurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	d, _, closeAll := open(t, dir, nil)
	for range 20 {
		d.Ended("film.ns", timings(), true)
		d.Ended("other.ns", timings()[:1], false)
	}
	d.Ended("other.ns", nil, false) // was refused
	check(t, d, 20)
	if a, _, _ := d.App(other); len(a.Stages) != 1 || len(a.Stages[0].Next) > 0 || a.Stages[0].PerRequest != 0 {
		t.Errorf("%+v, want failed requests to teach no more than the work of calls", a)
	}
	closeAll()

	d, log, closeAll := open(t, dir, nil)
	check(t, d, 20)
	d.Ended("film.ns", timings(), true)
	check(t, d, 21)
	s := plan.Snapshot{At: time.Now(), Functions: []plan.Function{{Name: "cut.ns"}, {Name: "grade-small.ns"}, {Name: "grade.ns"}}}
	d.Fill(&s)
	if f := s.Functions[1].Learned; !f.Known || f.Factor != 1 || f.P99 < 49*time.Millisecond || f.P99 > 51*time.Millisecond || s.Functions[2].Learned.Known || s.Functions[0].Learned.Factor < 1.99 {
		t.Errorf("%+v, want what was learned, and nothing of grade.ns", s.Functions)
	}
	if log.String() != "" {
		t.Errorf("log: %s", log)
	}
	closeAll()
}

// TestReload checks that a process that takes over knows what the earlier process has learned and
// saved after this one had started.
func TestReload(t *testing.T) {
	kv, closeBucket := bucket(t, t.TempDir())
	t.Cleanup(closeBucket)
	var both [2]*Demand
	for i := range both {
		c, _ := config(kv)
		var err error
		if both[i], err = Open(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		defer both[i].Close()
	}
	first, second := both[0], both[1]
	for range 20 {
		first.Ended("film.ns", timings(), true)
	}
	second.Ended("film.ns", timings(), true)  // the first knows the application better
	second.Ended("other.ns", timings(), true) // only the second knows it
	first.Save()
	if err := second.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	check(t, second, 20)
	if a, known, _ := second.App(other); !known || a.Requests < 0.9 {
		t.Errorf("%+v, %v; want that the process keeps what it alone has learned", a, known)
	}
	second.Save()
	if err := first.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	check(t, first, 20)
	if _, known, _ := first.App(other); !known {
		t.Error("what the second process has learned was not saved")
	}
}

// TestUnreadableRecordsStartEmpty: applications of the record start empty, and others keep what was
// learned. The next save replaces the record.
func TestUnreadableRecordsStartEmpty(t *testing.T) {
	shard := strconv.Itoa(shardOf("film.ns"))
	if shard == strconv.Itoa(shardOf("other.ns")) {
		t.Fatal("both applications are in one record")
	}
	for name, tc := range map[string]struct {
		change func(record []byte)
		want   string
	}{
		"newer":   {func(b []byte) { b[len("sc-demand")] = 9 }, "got version 9, want at most 1: a newer Stagecoach has written it"},
		"damaged": {func(b []byte) { b[len(b)/2] ^= 4 }, "it is damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			d, _, closeAll := open(t, dir, nil)
			d.Ended("film.ns", timings(), true)
			d.Ended("other.ns", timings(), true)
			closeAll()

			d, log, closeAll := open(t, dir, func(kv *queue.KV) {
				b, _, err := kv.Get(t.Context(), shard)
				if err != nil {
					t.Fatal(err)
				}
				tc.change(b)
				if _, err := kv.Put(t.Context(), shard, b); err != nil {
					t.Fatal(err)
				}
			})
			if _, known, fault := d.App(film); known || !strings.Contains(fault, tc.want) {
				t.Errorf("known %v, fault %q, want it empty, and %q", known, fault, tc.want)
			}
			if _, known, fault := d.App(other); !known || fault != "" {
				t.Errorf("the other application: known %v, fault %q", known, fault)
			}
			if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), tc.want) {
				t.Errorf("log: %s\nwant %q", log, tc.want)
			}
			d.Ended("film.ns", timings(), true)
			closeAll()

			d, log, closeAll = open(t, dir, nil)
			check(t, d, 1)
			if log.String() != "" {
				t.Errorf("log: %s", log)
			}
			closeAll()
		})
	}
}

// brokenStore stores nothing while it is full.
type brokenStore struct {
	Store
	full bool
	puts int
}

func (s *brokenStore) Watch(context.Context, func(Entry)) (func(), error) { return func() {}, nil }

func (s *brokenStore) Put(context.Context, string, []byte) (uint64, error) {
	if s.full {
		return 0, errors.New("the disk is full")
	}
	s.puts++
	return 1, nil
}

func TestRecordsThatWereNotStoredAreTriedAgain(t *testing.T) {
	s := &brokenStore{full: true}
	c, log := config(s)
	d, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	d.Ended("film.ns", timings(), true)
	d.Save()
	d.Save()
	if n := strings.Count(log.String(), "the disk is full"); n != 1 || s.puts != 0 {
		t.Errorf("%d lines, %d records stored, want one line:\n%s", n, s.puts, log)
	}
	s.full = false
	d.Save()
	d.Save()
	if s.puts != 1 || !strings.Contains(log.String(), "stored again") {
		t.Errorf("%d records stored, want one\n%s", s.puts, log)
	}
	if err := d.Close(); err != nil || s.puts != 1 {
		t.Errorf("%v, %d records stored, want none that has not changed", err, s.puts)
	}
}

func TestAFullQueueDropsAndCounts(t *testing.T) {
	c, _ := config(&brokenStore{})
	d, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	d.learning.Lock()
	for range queueLimit + 5 {
		d.Ended("film.ns", timings(), true)
	}
	d.learning.Unlock()
	check(t, d, queueLimit)
	if n := testutil.ToFloat64(d.dropped); n != 5 {
		t.Errorf("%v dropped, want 5", n)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// BenchmarkEnded is what a request waits for.
func BenchmarkEnded(b *testing.B) {
	benchmarkEnded(b, func(d *Demand) {
		d.mu.Lock()
		d.queue = d.queue[:0]
		d.mu.Unlock()
	})
}

// BenchmarkEndedAndLearned has the learning in its time. A request has four calls.
func BenchmarkEndedAndLearned(b *testing.B) {
	benchmarkEnded(b, func(d *Demand) {
		d.learning.Lock()
		d.learn()
		d.learning.Unlock()
	})
}

// benchmarkEnded calls empty whenever the queue is half full.
func benchmarkEnded(b *testing.B, empty func(*Demand)) {
	c, _ := config(&brokenStore{})
	d, err := Open(b.Context(), c)
	if err != nil {
		b.Fatal(err)
	}
	all := timings()
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		d.Ended("film.ns", all, true)
		if i++; i%(queueLimit/2) == 0 {
			empty(d)
		}
	}
	if err := d.Close(); err != nil {
		b.Error(err)
	}
}

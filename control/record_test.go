package control

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// history makes decisions in a random world.
func history(t *testing.T, seed uint64, names policy.Names, n int) []Decision {
	t.Helper()
	set, err := names.Choose()
	if err != nil {
		t.Fatal(err)
	}
	w := plantest.NewWorld(seed)
	if seed%2 == 0 {
		w = plantest.NewVariantWorld(seed, plan.Chosen{}, plan.Chosen{Allocator: "accuracy", Rank: "fair"}, plan.Chosen{Route: "even"})
	}
	var m policy.Memory
	var all []Decision
	for range n {
		w.Step()
		s := w.Snapshot()
		p, next, _, err := set.Decide(s, m)
		all = append(all, Decision{Policies: set.Names(), Snapshot: s, Memory: m, Plan: p, Err: err})
		m = next
		w.Apply(p.Wants)
	}
	return all
}

// recorder opens a record in a folder of the test. logged may be read after Close.
func recorder(t *testing.T, path string, limit int64) (r *RecordFile, logged *lines) {
	t.Helper()
	logged = &lines{}
	r, err := OpenRecord(path, limit, slog.New(slog.NewTextHandler(logged, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r, logged
}

// TestRecordedDecisionsAreReplayed records random histories under several policies and replays
// them. A later process appends to the same file.
func TestRecordedDecisionsAreReplayed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.jsonl")
	n := 0
	for seed, names := range []policy.Names{{}, {Placer: "first-fit"}, {Corrector: "none", Sharer: "none"}, {Price: 30}} {
		r, _ := recorder(t, path, 1<<30)
		// Fewer than may wait, so that none is dropped.
		for _, d := range history(t, uint64(seed), names, 24) {
			r.Record(d)
			n++
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		r.Record(Decision{}) // is dropped
	}
	if got := replayed(t, path); got.Decisions != n || !got.Same() {
		t.Errorf("%d decisions made again, want %d: %.2000v %v", got.Decisions, n, got.Diffs, got.Unread)
	}
}

// TestARecordIsBounded checks that the older half is dropped, and that lines stay complete.
func TestARecordIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.jsonl")
	all := history(t, 5, policy.Names{}, 120)
	total, longest := 0, 0
	for _, d := range all {
		line, err := d.line()
		if err != nil {
			t.Fatal(err)
		}
		total, longest = total+len(line), max(longest, len(line))
	}
	limit := int64(max(total/4, 2*longest))
	for from := 0; from < len(all); from += recordQueue {
		r, logged := recorder(t, path, limit)
		for _, d := range all[from:min(from+recordQueue, len(all))] {
			r.Record(d)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if logged.String() != "" {
			t.Error(logged)
		}
	}
	var kept int
	var size int64
	for _, p := range []string{path, path + ".1"} {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
		r := replayed(t, p)
		if !r.Same() {
			t.Errorf("%s: %v %v", p, r.Diffs, r.Unread)
		}
		kept += r.Decisions
	}
	if size > limit || kept < 10 {
		t.Errorf("%d decisions in %d bytes, want some in %d at most", kept, size, limit)
	}
}

// TestARecordGoesOnAfterACrash checks that a line that was cut short loses only itself.
func TestARecordGoesOnAfterACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.jsonl")
	if err := os.WriteFile(path, []byte(`{"version":1,"pol`), 0o600); err != nil {
		t.Fatal(err)
	}
	r, _ := recorder(t, path, 1<<20)
	r.Record(history(t, 1, policy.Names{}, 1)[0])
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if got := replayed(t, path); got.Decisions != 1 || len(got.Unread) != 1 || got.Unread[0].Line != 1 {
		t.Errorf("%+v, want line 1 unread, line 2 decided again", got)
	}
}

// TestFailedWritesAreLoggedOnce checks a full disk, a decision that JSON cannot encode, and one
// that is too large.
func TestFailedWritesAreLoggedOnce(t *testing.T) {
	good := history(t, 1, policy.Names{}, 1)[0]
	absurd := good
	absurd.Snapshot.Functions = append([]plan.Function{}, good.Snapshot.Functions...)
	absurd.Snapshot.Functions[0].Demand.Rate = math.Inf(1)
	for name, tc := range map[string]struct {
		path  string
		limit int64
		d     Decision
		want  string
	}{
		"a full disk":             {"/dev/full", 1 << 20, good, "no space left on device"},
		"an absurd signal":        {"", 1 << 20, absurd, "unsupported value: +Inf"},
		"larger than half of all": {"", 100, good, "want at most 50 B"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.path == "" {
				tc.path = filepath.Join(t.TempDir(), "r")
			}
			r, logged := recorder(t, tc.path, tc.limit)
			for range 3 {
				r.Record(tc.d)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			if n := strings.Count(logged.String(), "decisions are not recorded"); n != 1 || !strings.Contains(logged.String(), tc.want) {
				t.Errorf("told %d times, want once with %q: %s", n, tc.want, logged)
			}
			if got := counted(t, r.drops.WithLabelValues("write")); got != 3 {
				t.Errorf("%v counted, want 3", got)
			}
		})
	}
	if _, err := OpenRecord(filepath.Join(t.TempDir(), "none", "r"), 1, slog.New(slog.DiscardHandler), prometheus.NewRegistry()); err == nil {
		t.Error("a folder that is not there: no error")
	}
}

// TestARecordHasOneWriter checks that a second writer is refused, because two would break each
// other's lines and files.
func TestARecordHasOneWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r")
	r, _ := recorder(t, path, 1<<20)
	if _, err := OpenRecord(path, 1<<20, slog.New(slog.DiscardHandler), prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "another process records in "+path) {
		t.Errorf("a second writer: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	recorder(t, path, 1<<20) // afterwards there is room
}

// TestRecordGoesOnAfterItsFileIsRemoved checks that recording continues with a new file once the
// removed one would be full.
func TestRecordGoesOnAfterItsFileIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r")
	d := history(t, 1, policy.Names{}, 1)[0]
	line, err := d.line()
	if err != nil {
		t.Fatal(err)
	}
	r, logged := recorder(t, path, int64(2*len(line)))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r.Record(d)
	r.Record(d)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if got := replayed(t, path); got.Decisions != 1 || logged.String() != "" {
		t.Errorf("%d decisions in the new file, want 1: %s", got.Decisions, logged)
	}
}

// TestSlowDiskDelaysNothing checks that Record returns at once while nobody reads the queue. It
// drops and counts decisions, and logs that once.
func TestSlowDiskDelaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // in a bubble, a Record that blocks is a deadlock
		logged := &lines{}
		path := filepath.Join(t.TempDir(), "r")
		r := newRecordFile(path, 1<<30, slog.New(slog.NewTextHandler(logged, nil)))
		d := history(t, 1, policy.Names{}, 1)[0]
		for range recordQueue + 7 {
			r.Record(d)
		}
		if got := counted(t, r.drops.WithLabelValues("queue")); got != 7 {
			t.Errorf("%v counted as dropped, want 7", got)
		}
		r.take(<-r.queue) // the disk works again
		r.Record(d)
		go r.own()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if got := replayed(t, path); got.Decisions != recordQueue+1 {
			t.Errorf("%d decisions in the record, want %d", got.Decisions, recordQueue+1)
		}
		for _, text := range []string{"decisions are dropped", "decisions are recorded again\" dropped=7"} {
			if n := strings.Count(logged.String(), text); n != 1 {
				t.Errorf("%q said %d times, want once: %s", text, n, logged)
			}
		}
	})
}

// BenchmarkLine measures how long the record's goroutine takes to encode one decision, by the
// number of functions.
func BenchmarkLine(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint("functions=", n), func(b *testing.B) {
			s := plan.Snapshot{Nodes: []plan.Node{{Name: "n", Memory: 1 << 40}}}
			for i := range n {
				f := plan.Function{Name: fmt.Sprintf("f%04d.ns", i), Revision: 1, Min: 1, Max: 9, Slots: 1, Batch: 1}
				f.Demand, f.Service = plan.Demand{Known: true, Rate: 10.25, CV: 1.5}, plan.Service{Known: true, Mean: 123456789}
				f.Replicas = []plan.Replica{{Name: f.Name + "-1", Revision: 1, Node: "n", State: plan.Ready}}
				s.Functions = append(s.Functions, f)
			}
			set, err := policy.Names{}.Choose()
			if err != nil {
				b.Fatal(err)
			}
			_, memory, _, err := set.Decide(s, nil)
			if err != nil {
				b.Fatal(err)
			}
			p, _, _, err := set.Decide(s, memory)
			if err != nil {
				b.Fatal(err)
			}
			d := Decision{Policies: set.Names(), Snapshot: s, Memory: memory, Plan: p}
			size := 0
			for b.Loop() {
				line, err := d.line()
				if err != nil {
					b.Fatal(err)
				}
				size = len(line)
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}

// kept is a Recorder in memory.
type kept []Decision

func (k *kept) Record(d Decision) { *k = append(*k, d) }

// TestEveryDecisionIsRecorded checks that decisions that are not applied, or that give no plan, are
// recorded too, each with its memory.
func TestEveryDecisionIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, got := newFake(function("f")), &kept{}
		refused := 0
		f.apply = func(plan.Plan) error {
			if refused++; refused < 3 {
				return fmt.Errorf("too late: %w", plan.ErrStale)
			}
			return nil
		}
		l, log, stop := start(t, f, func(l *Loop) { l.cfg.Recorder = got })
		time.Sleep(3500 * time.Millisecond) // the bubble's clock
		f.mu.Lock()
		// twice, which makes every plan invalid.
		f.s.Functions = append(f.s.Functions, function("f"))
		f.mu.Unlock()
		time.Sleep(time.Second)
		trouble := l.Trouble()
		stop()
		var memories []bool
		for _, d := range *got {
			memories = append(memories, len(d.Memory) > 0)
			if d.Policies != l.Policies() || d.Snapshot.Rev != d.Plan.Rev {
				t.Errorf("%+v", d)
			}
		}
		if want := []bool{false, false, false, true, true}; !slices.Equal(memories, want) {
			t.Errorf("made from a memory: %v, want %v: none before a plan was applied", memories, want)
		}
		last := (*got)[len(*got)-1]
		if last.Err == nil || !strings.Contains(trouble, firstLine(last.Err)) {
			t.Errorf("the last decision: %v, trouble %q", last.Err, trouble)
		}
		if got := counted(t, l.ticks.WithLabelValues("stale")); got != 2 {
			t.Errorf("%v stale ticks, want 2: %s", got, log)
		}
	})
}

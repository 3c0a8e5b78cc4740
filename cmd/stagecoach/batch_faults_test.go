package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// batchRig is a rig with the function batches, which runs the program testdata/batches.
type batchRig struct {
	*rig
	largest atomic.Int64 // batch that was answered
}

func startBatches(t *testing.T) *batchRig {
	t.Helper()
	images := t.TempDir()
	program := filepath.Join(images, "test", "batches", "1", "stage")
	if out, err := exec.Command("go", "build", "-o", program, "./testdata/batches").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return &batchRig{rig: start(t, "--images", images)}
}

// deploy deploys the function, with up to 32 calls per batch.
func (r *batchRig) deploy(limits *client.Resources, env map[string]string, annotations map[string]string) {
	r.t.Helper()
	all := map[string]string{"batch": "32", "batch-wait": "5ms"}
	for k, v := range annotations {
		all[k] = v
	}
	d := fn{"batches", "test/batches:1", map[string]string{"min": "2", "max": "3"}, all, env}.deployment()
	d.Limits = limits
	if err := r.Deploy(r.t.Context(), d); err != nil {
		r.t.Fatal(err)
	}
	r.until(late, "two replicas", func() bool { return r.line("batches").Ready >= 2 })
}

// check checks that an answer is that of its own input.
func (r *batchRig) check(body string, a client.Answer) error {
	var size int64
	if _, err := fmt.Sscan(string(a.Body), &size); a.Status != http.StatusOK || err != nil || string(a.Body) != fmt.Sprint(size, " ", body) {
		return fmt.Errorf("status %d, %.300q, want 200 and the input", a.Status, a.Body)
	}
	for {
		if was := r.largest.Load(); size <= was || r.largest.CompareAndSwap(was, size) {
			return nil
		}
	}
}

// formed waits until a batch of a size has been answered since the call.
func (r *batchRig) formed(size int64) {
	r.t.Helper()
	r.largest.Store(0)
	r.until(late, fmt.Sprintf("a batch of %d", size), func() bool { return r.largest.Load() >= size })
}

// why returns what explain says about the function.
func (r *batchRig) why() string { return r.explained().Why }

func (r *batchRig) explained() schema.ExplainedStage {
	r.t.Helper()
	var e schema.Explanation
	if err := r.Get(r.t.Context(), "/system/pipelines/batches/explain", &e); err != nil {
		r.t.Fatal(err)
	}
	return e.Stages[0]
}

// finish ends the load. Each request must have been answered well.
func (r *batchRig) finish(l *load) {
	r.t.Helper()
	requests, wrong := l.end()
	for _, w := range wrong {
		r.t.Error(w)
	}
	r.t.Logf("%d good requests, %d replicas lost, %v calls retried, slowest good answer %v",
		requests, len(r.events("batches", "lost")), r.value("stagecoach_flow_retries_total"), l.slowest)
}

// TestPoisonInLargeBatches sends requests that end their replica in batches of 32. Each of them
// gets 502 after the second replica, all others get their results, and batches stay as large as
// they were.
func TestPoisonInLargeBatches(t *testing.T) {
	t.Parallel()
	r := startBatches(t)
	r.deploy(nil, nil, nil)
	l := r.load(96, "/function/batches", r.check)
	poisons := 0
	for round := range 3 {
		r.formed(32)
		var wg sync.WaitGroup
		for i := range 2 {
			poisons++
			wg.Go(func() {
				a, err := r.trySend(http.MethodPost, "/function/batches", fmt.Sprint("poison ", round, i))
				if err != nil || a.Status != http.StatusBadGateway || !strings.Contains(string(a.Body), "under this call") {
					t.Errorf("poison: status %d: %s, %v, want 502 with the cause", a.Status, a.Body, err)
				}
			})
		}
		wg.Wait()
		l.turn()
	}
	r.formed(32)
	r.finish(l)
	lost := len(r.events("batches", "lost"))
	if lost == 0 || lost > 2*poisons {
		t.Errorf("%d replicas lost to %d poisons, want some, and at most 2 per poison", lost, poisons)
	}
	// Two slots of 32 calls are the most that a replica has.
	if got := r.value("stagecoach_flow_retries_total"); got > float64(64*poisons+poisons) {
		t.Errorf("%v calls retried, want at most one attempt of each call beside a poison", got)
	}
	if got := r.value("stagecoach_flow_convicted_total"); got != float64(poisons) {
		t.Errorf("%v requests convicted of %d poisons", got, poisons)
	}
	if why := r.why(); strings.Contains(why, "until the next deploy") {
		t.Errorf("explain says %q, want no smaller batches", why)
	}
}

// TestReplicasKilledUnderBatches kills replicas while they run batches. All requests get their
// results.
func TestReplicasKilledUnderBatches(t *testing.T) {
	t.Parallel()
	r := startBatches(t)
	r.deploy(nil, nil, nil)
	l := r.load(96, "/function/batches", r.check)
	const kills = 6
	for n := range kills {
		r.formed(32)
		var pids []int
		r.until(late, "a replica's process", func() bool { pids = r.pids("batches", false); return len(pids) > 0 })
		kill9(t, pids[n%len(pids)])
		r.until(late, "the loss", func() bool { return r.killed() > n })
	}
	r.formed(32)
	l.turn()
	r.finish(l)
	if killed := r.killed(); killed != kills {
		t.Errorf("%d replicas lost, want the %d that were killed", killed, kills)
	}
	if why := r.why(); strings.Contains(why, "until the next deploy") {
		t.Errorf("explain says %q, want no smaller batches", why)
	}
}

// killed returns how many replicas were lost. Those that were killed before they were ready have
// failed.
func (r *batchRig) killed() int {
	r.t.Helper()
	return len(r.events("batches", "lost")) + len(r.events("batches", "failed"))
}

// TestBatchesThatNeedTooMuchMemoryAreHalved has batches of 32 that need more memory than a replica
// may have. No request fails, batches become smaller until replicas survive them, and a deploy with
// more memory lets them grow again.
func TestBatchesThatNeedTooMuchMemoryAreHalved(t *testing.T) {
	needGroups(t)
	t.Parallel()
	r := startBatches(t)
	oneSlot := map[string]string{"max_inflight": "1"}
	r.deploy(&client.Resources{Memory: "120Mi"}, oneSlot, nil)
	l := r.loadOf(96, "/function/batches", func(c, i int) string { return fmt.Sprintf("eat 8 %d of client %d", i, c) }, r.check)
	// 14 calls eat 112 MiB. How large the batches were that ended replicas is up to chance.
	most := int64(0)
	r.until(late, "smaller batches", func() bool {
		_, term, _ := strings.Cut(r.why(), "; batches of at most ")
		_, err := fmt.Sscanf(term, "%d until the next deploy", &most)
		return err == nil && most <= 14
	})
	r.formed(most)
	l.turn() // ends the batches that were sent before
	for _, e := range r.events("batches", "lost") {
		if !strings.Contains(e.Cause, "its limit is 120 MiB") {
			t.Errorf("%s was lost: %s, want the limit of its memory", e.Replica, e.Cause)
		}
	}
	lost := len(r.events("batches", "lost"))
	for range 3 {
		l.turn()
	}
	if says := r.says("batches"); !strings.Contains(says, "batches of at most") {
		t.Errorf("describe says %q, want why batches are smaller", says)
	}
	if now := len(r.events("batches", "lost")); now != lost || r.largest.Load() > most {
		t.Errorf("%d replicas lost after %d, batches of up to %d, want no further one, and at most %d", now, lost, r.largest.Load(), most)
	}
	r.deploy(&client.Resources{Memory: "600Mi"}, oneSlot, nil)
	r.formed(32)
	if why := r.why(); strings.Contains(why, "until the next deploy") {
		t.Errorf("explain says %q, want no smaller batches", why)
	}
	r.finish(l)
}

// TestProfileThatLies stores a profile whose times fall with the size of batches. The batch that is
// chosen from it does not trust the shorter times, and explain says so.
func TestProfileThatLies(t *testing.T) {
	t.Parallel()
	r := startBatches(t)
	r.deploy(nil, nil, map[string]string{"slo": "1s"})
	p := profile.Profile{Version: profile.Version, Relative: 0.05}
	for i, mean := range []float64{0.4, 0.3, 0.001, 0.9} {
		p.Points = append(p.Points, profile.Point{Cell: profile.Cell{CPUMilli: 1000, Batch: 1 << i}, Mean: mean, Err: mean / 100, CV: 0.1, N: 30})
	}
	if err := r.Send(t.Context(), "profile", http.MethodPut, "/system/function/batches/profile", p); err != nil {
		t.Fatal(err)
	}
	r.until(soon, "the bound of a fixed batch", func() bool {
		bounded := r.explained().Bounded
		return len(bounded) == 1 && strings.Contains(bounded[0], "the profile says that a batch of 2 takes less than a smaller one")
	})
	r.deploy(nil, nil, map[string]string{"batch": "auto:32", "slo": "1s"})
	const want = "batch 4 of up to 32: it takes 400ms, at most half of the share 1s of the objective 1s; the profile says that a batch of 2 takes less than a smaller one"
	r.until(soon, "the choice", func() bool { return strings.Contains(r.why(), want) })
	var out bytes.Buffer
	if err := run(t.Context(), []string{"describe", "--gateway", r.Base, "batches"}, &out); err != nil || !strings.Contains(out.String(), "4 of up to 32: it takes 400ms") {
		t.Errorf("%v\n%s\nwant the chosen batch", err, out.String())
	}
	l := r.load(32, "/function/batches", r.check)
	r.formed(4)
	r.finish(l)
	if n := r.largest.Load(); n != 4 {
		t.Errorf("a batch of %d, want at most 4", n)
	}
}

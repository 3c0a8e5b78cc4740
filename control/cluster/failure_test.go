package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestFailedStartsAreRetriedWithBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		broken := true
		w.start = func(context.Context, node.Order) error {
			if broken {
				return errors.New("no such file: stage")
			}
			return nil
		}
		w.waiting["f.ns"] = 5
		begin := time.Now()
		var tries []time.Duration
		for time.Since(begin) < 40*time.Second {
			n := len(l.Events(pipeline.ParseKey("f.ns")))
			w.want(2)
			if got := l.Events(pipeline.ParseKey("f.ns")); len(got) > n {
				tries = append(tries, time.Since(begin))
			}
			time.Sleep(100 * time.Millisecond)
		}
		if got, want := fmt.Sprint(tries), "[0s 500ms 1.5s 3.5s 7.5s 15.5s 31.5s]"; got != want {
			t.Errorf("tried after %s, want %s", got, want)
		}
		// Two failures side by side count as one. From then on, one replica is tried at a time.
		if n := l.nodes["a"].hands.(*fakeNode).starts; n != len(tries)+1 {
			t.Errorf("%d starts, want %d", n, len(tries)+1)
		}
		count, until, cause := l.Failure(pipeline.ParseKey("f.ns"))
		if count != 7 || until.Sub(begin) != 61500*time.Millisecond || cause != "start: no such file: stage" {
			t.Errorf("failure %d until %v: %s", count, until.Sub(begin), cause)
		}
		if s, _ := l.Observe(t.Context()); s.Functions[0].Failing.Count != 7 {
			t.Errorf("observed %+v", s.Functions[0].Failing)
		}
		w.mu.Lock()
		if len(w.failed) == 0 || !strings.Contains(w.failed[0], `function "f.ns": no replica starts, 3 failed in a row`) || !strings.Contains(w.failed[0], "no such file: stage") {
			t.Errorf("waiting tasks were told %q", w.failed)
		}
		broken = false
		w.failed = nil
		w.mu.Unlock()
		time.Sleep(25 * time.Second)
		w.want(2)
		w.expect("one first", w.states(), "f-00009 ready")
		time.Sleep(settle - time.Nanosecond)
		w.want(3)
		w.expect("then another", w.states(), "f-00009 ready, f-00010 ready")
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 7 {
			t.Errorf("%d failures, want them remembered until a replica has settled", count)
		}
		time.Sleep(time.Nanosecond)
		w.want(4)
		w.expect("then all", w.states(), "f-00009 ready, f-00010 ready, f-00011 ready, f-00012 ready")
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 || len(w.failed) != 0 {
			t.Errorf("%d failures, told %q, want it over", count, w.failed)
		}
	})
}

func TestARedeployStartsWithNoFailures(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(_ context.Context, o node.Order) error {
			if revisionOf(o) == 1 {
				return errors.New("bad image")
			}
			return nil
		}
		for range 30 {
			w.want(1)
			time.Sleep(100 * time.Millisecond)
		}
		w.set(func() { w.specs = []FunctionSpec{spec("f", 2)} })
		w.want(1)
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 || !strings.HasSuffix(w.states(), "ready") {
			t.Errorf("%s, %d failures, want it to run at once", w.states(), count)
		}
	})
}

func TestAStartHasADeadline(t *testing.T) {
	for name, hang := range map[string]func(*world){
		"start": func(w *world) {
			w.start = func(ctx context.Context, _ node.Order) error { <-ctx.Done(); return ctx.Err() }
		},
		"attach": func(w *world) {
			w.attach = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world, l *Local) {
				hang(w)
				w.want(1)
				time.Sleep(time.Minute)
				synctest.Wait()
				if _, _, cause := l.Failure(pipeline.ParseKey("f.ns")); !strings.Contains(cause, "not ready within 1m0s") {
					t.Errorf("cause %q", cause)
				}
				w.expect("after the deadline", w.states(), "")
			})
		})
	}
}

// TestADeathUnderTheFirstCallIsNoFailedStart checks a waiting call that reaches a replica, and ends
// it, before anybody else knows that the replica is ready.
func TestADeathUnderTheFirstCallIsNoFailedStart(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.set(func() {
			w.busy["f-00001"] = true
			w.attach = func(_ context.Context, name string) error {
				l.Lost(name, task.Death{Cause: "exit status 1", End: task.EndItself})
				return nil
			}
		})
		w.want(1)
		if count, _, cause := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures, %s, want none", count, cause)
		}
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 started, f-00001 ready, f-00001 lost")
	})
}

func TestStoppedStartIsNoFailure(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(ctx context.Context, _ node.Order) error { <-ctx.Done(); return ctx.Err() }
		w.want(1)
		w.want(0)
		w.expect("taken back", w.states(), "")
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 stopped")
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures, want none", count)
		}
	})
}

func TestAReplicaIsLost(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		time.Sleep(time.Minute)
		l.Lost("f-00001", task.Death{Cause: "exit status 3"})
		l.Lost("f-00001", task.Death{Cause: "and again"})
		l.Lost("f-00099", task.Death{Cause: "who is that"})
		synctest.Wait()
		w.expect("lost", w.states(), "")
		w.expect("told", w.lost["f-00001"], "exit status 3")
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures, want none: it had served for a minute", count)
		}
		w.want(1)
		w.expect("started again", w.states(), "f-00002 ready")
		l.Lost("f-00002", task.Death{Cause: "exit status 4", End: task.EndItself})
		synctest.Wait()
		if count, _, cause := l.Failure(pipeline.ParseKey("f.ns")); count != 1 || cause != "lost 0s after it was ready: exit status 4" {
			t.Errorf("%d failures, %q: one that dies at once has failed", count, cause)
		}
		time.Sleep(firstBackoff)
		w.want(1)
		l.Answered("f-00003", time.Millisecond, time.Millisecond)
		w.set(func() { w.busy["f-00003"] = true })
		l.Lost("f-00003", task.Death{Cause: "exit status 5", End: task.EndItself})
		synctest.Wait()
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failures, want none: the last one had worked, and died under a request", count)
		}
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 started, f-00001 ready, f-00001 lost, "+
			"f-00002 ordered, f-00002 started, f-00002 ready, f-00002 lost, "+
			"f-00003 ordered, f-00003 started, f-00003 ready, f-00003 first answer, f-00003 lost")
	})
}

// TestDeathsThatAreNoFailedStarts checks that a replica that was ready and ended under a request,
// or with its zygote, is replaced at once, however often that happens.
func TestDeathsThatAreNoFailedStarts(t *testing.T) {
	for name, death := range map[string]task.Death{
		"under a request, as the dispatcher knows":   {Cause: "exit status 3", End: task.EndItself},
		"under a request, as the dispatcher reports": {Cause: "it broke the protocol", End: task.EndItself, Busy: true},
		"by somebody else":                           {Cause: "killed by SIGKILL"},
		"with its zygote":                            {Cause: "its zygote ended: killed by SIGKILL", End: task.EndShared},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world, l *Local) {
				w.waiting["f.ns"] = 1
				for i := range 2 * maxSameFailures {
					replica := fmt.Sprintf("f-%05d", i+1)
					w.want(1)
					w.expect("at once", w.states(), replica+" ready")
					w.set(func() { w.busy[replica] = name == "under a request, as the dispatcher knows" })
					l.Lost(replica, death)
					synctest.Wait()
				}
				if count, _, cause := l.Failure(pipeline.ParseKey("f.ns")); count != 0 || len(w.failed) != 0 {
					t.Errorf("%d failures, %q, told %q, want none", count, cause, w.failed)
				}
			})
		})
	}
}

// TestRevisionThatWasReadyMayFailLonger checks that requests wait for the next start if the
// revision has had a ready replica, unless its starts fail repeatedly for the same cause.
func TestRevisionThatWasReadyMayFailLonger(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		causes := []string{"killed after 3ms", "killed after 12ms", "killed", "no such file 1", "no such file 2", "no such file 3", "no such file 4"}
		i := 0
		w.start = func(_ context.Context, o node.Order) error {
			i++
			return fmt.Errorf("replica %q: %s", o.Replica, causes[i-1])
		}
		l.Lost("f-00001", task.Death{Cause: "its zygote ended", End: task.EndShared})
		synctest.Wait()
		for range causes {
			w.want(1)
			_, until, _ := l.Failure(pipeline.ParseKey("f.ns"))
			w.want(1) // during the back-off
			time.Sleep(time.Until(until))
		}
		if i != len(causes) || len(w.failed) != 0 {
			t.Fatalf("%d failed starts, told %q, want %d and nobody", i, w.failed, len(causes))
		}
		causes = append(causes, "no such file 5", "good")
		w.want(1)
		if len(w.failed) == 0 || !strings.Contains(w.failed[0], "no such file 5") {
			t.Errorf("told %q, want the cause that has come five times in a row", w.failed)
		}
	})
}

// TestKilledStartsDoNotCountAsFailed checks starts that something else ends. However many there
// are, the function's waiting tasks must not fail.
func TestKilledStartsDoNotCountAsFailed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		l.Lost("f-00001", task.Death{Cause: "its zygote ended", End: task.EndShared})
		synctest.Wait()
		w.attach = func(_ context.Context, replica string) error {
			l.Lost(replica, task.Death{Cause: "its zygote ended: killed by SIGKILL", End: task.EndShared})
			return errors.New("no hello")
		}
		for range 2 * maxSameFailures {
			w.want(1)
			time.Sleep(time.Second) // while the cause is awaited
			synctest.Wait()
			_, until, _ := l.Failure(pipeline.ParseKey("f.ns"))
			w.want(1) // during the back-off
			time.Sleep(time.Until(until))
		}
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 2*maxSameFailures || len(w.failed) != 0 {
			t.Errorf("%d failures, told %q, want %d and nobody", count, w.failed, 2*maxSameFailures)
		}
	})
}

// TestAReplicaThatDiesIdleAgainAndAgain checks a function whose replicas answer and then die. Its
// requests keep waiting, but its back-off grows.
func TestAReplicaThatDiesIdleAgainAndAgain(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		for i := range 2 * maxSameFailures {
			replica := fmt.Sprintf("f-%05d", i+1)
			w.want(1)
			w.expect("after the back-off", w.states(), replica+" ready")
			time.Sleep(time.Millisecond)
			l.Answered(replica, time.Millisecond, time.Millisecond)
			l.Lost(replica, task.Death{Cause: "exit status 3", End: task.EndItself})
			synctest.Wait()
			count, until, _ := l.Failure(pipeline.ParseKey("f.ns"))
			if wait := time.Until(until); count != i+1 || wait != Backoff(i+1) {
				t.Errorf("after death %d: %d failures, the next start in %v, want %v", i+1, count, wait, Backoff(i+1))
			}
			w.want(1)
			w.expect("in the back-off", w.states(), "")
			time.Sleep(Backoff(i + 1))
		}
		if len(w.failed) != 0 {
			t.Errorf("told %q, want nobody", w.failed)
		}
		w.want(1)
		time.Sleep(settle)
		w.want(1)
		l.Lost("f-00011", task.Death{Cause: "exit status 3", End: task.EndItself})
		synctest.Wait()
		w.want(1)
		w.expect("after one that held", w.states(), "f-00012 ready")
		l.Lost("f-00012", task.Death{Cause: "exit status 3", End: task.EndItself})
		synctest.Wait()
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 1 {
			t.Errorf("%d failures, want 1: the row ended with the one that held", count)
		}
	})
}

func TestBackoffsAreJittered(t *testing.T) {
	now := time.Now()
	for chance, want := range map[float64]time.Duration{0: time.Second, 0.5: 875 * time.Millisecond} {
		var f failure
		r := &replica{begun: now.Add(1)}
		f.add(r, now, "a", false, chance)
		f.add(r, now, "a", false, chance)
		if got := f.Until.Sub(now); got != want {
			t.Errorf("chance %v: %v, want %v", chance, got, want)
		}
	}
}

func TestLostWhileStartingGivesTheCause(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.attach = func(_ context.Context, replica string) error {
			time.AfterFunc(50*time.Millisecond, func() { l.Lost(replica, task.Death{Cause: "exit status 127"}) })
			return errors.New("connection closed")
		}
		w.stop = func(_ context.Context, replica string) error {
			l.Lost(replica, task.Death{Cause: "terminated"})
			return nil
		}
		w.want(1)
		time.Sleep(causeWait)
		synctest.Wait()
		if _, _, cause := l.Failure(pipeline.ParseKey("f.ns")); cause != "exit status 127: connection closed" {
			t.Errorf("cause %q, want the process's end in it", cause)
		}
	})
}

func TestBackoff(t *testing.T) {
	for count, want := range map[int]time.Duration{
		-1: 0, 0: 0, 1: 500 * time.Millisecond, 2: time.Second, 6: 16 * time.Second, 7: 30 * time.Second, 1 << 40: 30 * time.Second,
	} {
		if got := Backoff(count); got != want {
			t.Errorf("Backoff(%d) = %v, want %v", count, got, want)
		}
	}
}

func TestCausesAreComparedWithoutNames(t *testing.T) {
	now := time.Now()
	f := failure{ready: true}
	for i, name := range []string{"f-abcde", "f-fghij", "f-klmno", "f-pqrst", "f-uvwxy"} {
		r := &replica{name: name, begun: now.Add(time.Duration(i))}
		f.at = now.Add(-1)
		f.add(r, now, fmt.Sprintf("replica %q: no such file", name), false, 0)
	}
	if !f.givesUp() {
		t.Errorf("%d failures of one kind, want %d", f.same, maxSameFailures)
	}
}

package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestStartsThatFail(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		broken := true
		w.start = func(context.Context, Order) error {
			if broken {
				return errors.New("no such file: stage")
			}
			return nil
		}
		w.waiting["f.ns"] = 5
		begin := time.Now()
		var tries []time.Duration
		for time.Since(begin) < 40*time.Second {
			n := len(l.Events("f.ns"))
			w.want(2)
			if got := l.Events("f.ns"); len(got) > n {
				tries = append(tries, time.Since(begin))
			}
			time.Sleep(100 * time.Millisecond)
		}
		if got, want := fmt.Sprint(tries), "[0s 500ms 1.5s 3.5s 7.5s 15.5s 31.5s]"; got != want {
			t.Errorf("tried after %s, want %s", got, want)
		}
		// Two side by side are one failure; from then on one is tried at a time.
		if n := l.nodes["a"].hands.(*fakeNode).starts; n != len(tries)+1 {
			t.Errorf("%d starts, want %d", n, len(tries)+1)
		}
		count, until, cause := l.Failure("f.ns")
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
		if count, _, _ := l.Failure("f.ns"); count != 7 {
			t.Errorf("%d failures, want them remembered until a replica has settled", count)
		}
		time.Sleep(time.Nanosecond)
		w.want(4)
		w.expect("then all", w.states(), "f-00009 ready, f-00010 ready, f-00011 ready, f-00012 ready")
		if count, _, _ := l.Failure("f.ns"); count != 0 || len(w.failed) != 0 {
			t.Errorf("%d failures, told %q, want it over", count, w.failed)
		}
	})
}

func TestARedeployStartsWithNoFailures(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(_ context.Context, o Order) error {
			if o.Function.Revision == 1 {
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
		if count, _, _ := l.Failure("f.ns"); count != 0 || !strings.HasSuffix(w.states(), "ready") {
			t.Errorf("%s, %d failures, want it to run at once", w.states(), count)
		}
	})
}

func TestAStartHasADeadline(t *testing.T) {
	for name, hang := range map[string]func(*world){
		"start": func(w *world) { w.start = func(ctx context.Context, _ Order) error { <-ctx.Done(); return ctx.Err() } },
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
				if _, _, cause := l.Failure("f.ns"); !strings.Contains(cause, "not ready within 1m0s") {
					t.Errorf("cause %q", cause)
				}
				w.expect("after the deadline", w.states(), "")
			})
		})
	}
}

func TestTakingBackAStartIsNoFailure(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(ctx context.Context, _ Order) error { <-ctx.Done(); return ctx.Err() }
		w.want(1)
		w.want(0)
		w.expect("taken back", w.states(), "")
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 stopped")
		if count, _, _ := l.Failure("f.ns"); count != 0 {
			t.Errorf("%d failures, want none", count)
		}
	})
}

func TestAReplicaIsLost(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		time.Sleep(time.Minute)
		l.Lost("f-00001", "exit status 3")
		l.Lost("f-00001", "and again")
		l.Lost("f-00099", "who is that")
		synctest.Wait()
		w.expect("lost", w.states(), "")
		w.expect("told", w.lost["f-00001"], "exit status 3")
		if count, _, _ := l.Failure("f.ns"); count != 0 {
			t.Errorf("%d failures, want none: it had served for a minute", count)
		}
		w.want(1)
		w.expect("started again", w.states(), "f-00002 ready")
		l.Lost("f-00002", "exit status 4")
		synctest.Wait()
		if count, _, cause := l.Failure("f.ns"); count != 1 || cause != "lost 0s after it was ready: exit status 4" {
			t.Errorf("%d failures, %q: one that dies at once has failed", count, cause)
		}
		time.Sleep(firstBackoff)
		w.want(1)
		l.Answered("f-00003", time.Millisecond, time.Millisecond)
		l.Lost("f-00003", "exit status 5")
		synctest.Wait()
		if count, _, _ := l.Failure("f.ns"); count != 0 {
			t.Errorf("%d failures, want none: the last one had worked", count)
		}
		w.expect("timeline", w.kinds(), "f-00001 ordered, f-00001 started, f-00001 ready, f-00001 lost, "+
			"f-00002 ordered, f-00002 started, f-00002 ready, f-00002 lost, "+
			"f-00003 ordered, f-00003 started, f-00003 ready, f-00003 first answer, f-00003 lost")
	})
}

func TestLostWhileStartingGivesTheCause(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.attach = func(_ context.Context, replica string) error {
			time.AfterFunc(50*time.Millisecond, func() { l.Lost(replica, "exit status 127") })
			return errors.New("connection closed")
		}
		w.stop = func(_ context.Context, replica string) error { l.Lost(replica, "terminated"); return nil }
		w.want(1)
		time.Sleep(causeWait)
		synctest.Wait()
		if _, _, cause := l.Failure("f.ns"); cause != "exit status 127: connection closed" {
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

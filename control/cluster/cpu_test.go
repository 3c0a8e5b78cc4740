package cluster

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// give applies a plan twice that wants one replica of f.ns with a CPU limit.
func (w *world) give(milli int) {
	w.t.Helper()
	p, s := w.plan(1)
	p.Wants[0].CPUMilli = milli
	if err := p.Validate(s); err != nil {
		w.t.Fatal(err)
	}
	for range 2 {
		if err := w.l.Apply(w.t.Context(), p); err != nil {
			w.t.Fatal(err)
		}
	}
	synctest.Wait()
}

// has checks the CPU limit and the number of threads that the first replica was given last.
func (w *world) has(milli, threads int) {
	w.t.Helper()
	w.set(func() {
		if w.cpu["f-00001"] != milli || w.threads["f-00001"] != threads {
			w.t.Errorf("cpu %v, threads %v, want %d and %d", w.cpu, w.threads, milli, threads)
		}
	})
}

func TestCPUFollowsThePlan(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, l *Local) {
		w.give(500)
		w.has(0, 0) // it was started like this
		w.give(1500)
		w.has(1500, 2)
		w.give(1000)
		w.has(1000, 2)
		tries := 0
		w.setCPU = func(string) error {
			if tries++; tries < 4 {
				return errors.New("no")
			}
			return nil
		}
		w.give(3000)
		w.has(1000, 2)
		l.Leave("a")
		time.Sleep(10 * time.Second)
		w.has(1000, 2)
		l.Join(w.node("a"))
		l.Running("a", w.runs("a"))
		time.Sleep(time.Minute)
		w.has(3000, 3)
		if tries != 4 {
			t.Errorf("%d tries, want 4", tries)
		}
		w.setCPU = func(string) error { return fmt.Errorf("no cgroups: %w", errors.ErrUnsupported) }
		w.give(4000)
		w.has(3000, 4)
		var causes []string
		for _, e := range l.Events(pipeline.ParseKey("f.ns")) {
			if e.Kind == CPU {
				causes = append(causes, e.Cause)
			}
		}
		w.expect("events", strings.Join(causes, "; "),
			"500m → 1500m; 1500m → 1000m; 1000m → 3000m; 3000m → 4000m, in threads alone: the node does not limit CPU")
	})
}

// TestDeclaredCPULimitGivesThreadsBack checks that a replica that was started with a smaller limit
// gets as many threads as the declared limit can use, once that limit applies again.
func TestDeclaredCPULimitGivesThreadsBack(t *testing.T) {
	for name, tc := range map[string]struct {
		limit int
		cpu   []int // limits of consecutive plans
		want  int   // threads it was asked for last; 0: it was not asked
	}{
		"more than it has":         {4000, []int{500, 0}, 4},
		"all there are":            {0, []int{500, 0}, math.MaxUint16},
		"what it was started with": {4000, []int{0, 500, 0}, 4}, // It has them already.
		"more than is declared":    {1000, []int{0, 3000}, 3},
		"less than it has":         {1000, []int{3000, 0}, 0},
		"less than there are":      {0, []int{0, 500}, 0},
		"of as many cores":         {1000, []int{500, 0}, 0},
		"a part of a core counts":  {1500, []int{1000, 0}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(_ *testing.T, w *world, _ *Local) {
				w.set(func() { w.specs[0].CPULimit = tc.limit })
				for _, milli := range tc.cpu {
					w.give(milli)
				}
				w.has(tc.cpu[len(tc.cpu)-1], tc.want)
			})
		})
	}
}

// TestCPULimitIsSentAgainAfterALostAnswer checks that a node is told the present limit again after
// the answer to an earlier change was lost.
func TestCPULimitIsSentAgainAfterALostAnswer(t *testing.T) {
	bubble(t, func(_ *testing.T, w *world, _ *Local) {
		w.give(500)
		w.setCPU = func(replica string) error {
			w.cpu[replica] = 3000
			return errors.New("no answer")
		}
		w.give(3000)
		w.set(func() { w.setCPU = nil })
		w.give(500)
		w.has(500, 0)
	})
}

package cluster

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
)

// thinker lets time pass between an autoscaler's Snapshot and its plan.
type thinker struct {
	*Local
	thinks time.Duration
	stale  int // number of plans refused as stale
}

func (a *thinker) Apply(ctx context.Context, p plan.Plan) error {
	time.Sleep(a.thinks) // the bubble's clock
	err := a.Local.Apply(ctx, p)
	if errors.Is(err, plan.ErrStale) {
		a.stale++
	}
	return err
}

// TestSlowerAutoscalerIsRefused runs two loops on one cluster. The plans of the slower one must be
// refused, and it must say so. Nothing may be started twice. When the faster one ends, the other
// must go on.
func TestSlowerAutoscalerIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		autoscaler := func(thinks time.Duration) (a *thinker, log *strings.Builder, stop func()) {
			// Used by the loop's goroutine alone until stop.
			a, log = &thinker{Local: l, thinks: thinks}, &strings.Builder{}
			loop, err := control.New(l, a, control.Config{}, slog.New(slog.NewTextHandler(log, nil)), prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				_ = loop.Run(ctx) // ctx's error
			}()
			return a, log, func() { cancel(); <-done }
		}
		slow, slowLog, stopSlow := autoscaler(1200 * time.Millisecond)
		time.Sleep(300 * time.Millisecond)
		fast, fastLog, stopFast := autoscaler(0)
		time.Sleep(10 * time.Second)
		w.expect("with both", w.states(), "f-00001 ready")
		stopFast()
		time.Sleep(10 * time.Second)
		stopSlow()
		synctest.Wait()
		w.expect("with the slow one", w.states(), "f-00001 ready")
		if w.nodes["a"].starts != 1 {
			t.Errorf("%d starts, want 1", w.nodes["a"].starts)
		}
		if slow.stale == 0 || fast.stale > 0 {
			t.Errorf("%d stale plans of the slow autoscaler and %d of the fast one, want some and none", slow.stale, fast.stale)
		}
		for _, text := range []string{"another autoscaler steers this cluster, too", "control works again"} {
			if n := strings.Count(slowLog.String(), text); n != 1 {
				t.Errorf("the slow one said %q %d times, want once:\n%s", text, n, slowLog)
			}
		}
		if fastLog.Len() > 0 {
			t.Errorf("the fast one said %s", fastLog)
		}
	})
}

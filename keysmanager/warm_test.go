package keysmanager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// hangs is a function whose zygote never reports that it has loaded.
func hangs(name string) node.Spec {
	s := withModel
	s.Function, s.Namespace, s.Process = "f."+name, name, "./stubborn"
	return s
}

// wish makes a function want a zygote, with this expected size in bytes.
func (n *rig) wish(s node.Spec, bytes int64) {
	n.t.Helper()
	image, err := n.cfg.Images.Resolve(s.Image)
	if err != nil {
		n.t.Fatal(err)
	}
	n.store.mu.Lock()
	defer n.store.mu.Unlock()
	key := n.store.key(s, onnxRuntime, image)
	// Keys and sizes that nobody uses are forgotten at any time.
	n.store.uses[s.Function], n.store.sizes[key] = key, bytes
}

// states returns the states of the zygotes by function, "" for a missing one.
func (n *rig) states() map[string]string {
	out := map[string]string{}
	for _, z := range n.Inventory().Zygotes {
		out[z.Function] = z.State
	}
	return out
}

// warming runs Warm in the background. end cancels it and returns its error.
func (n *rig) warming(wanted ...node.Wanted) (end func() error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.t.Context()), time.Minute)
	done := make(chan error, 1)
	go func() { done <- n.Warm(ctx, wanted) }()
	n.t.Cleanup(cancel)
	return func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(time.Minute):
			return errors.New("Warm has not returned a minute after its context ended")
		}
	}
}

// TestALoadThatHangsHoldsUpNoOther checks that other zygotes load while one load hangs, as long as
// there is room. No idle zygote may be evicted for a zygote that no order needs.
func TestALoadThatHangsHoldsUpNoOther(t *testing.T) {
	n, g := newGauged(t, nil)
	idle, large, small := withModel, withModel, withModel
	idle.Function, idle.Namespace = "f.idle", "idle"
	large.Function, large.Namespace = "f.large", "large"
	small.Function, small.Namespace = "f.small", "small"
	hung := hangs("hung")
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: idle}}); err != nil {
		t.Fatal(err)
	}
	bytes := n.Inventory().Zygotes[0].Bytes
	n.wish(hung, 10*bytes)
	n.wish(large, bytes+bytes/2) // it would fit beside the hung one if the idle one were evicted
	n.wish(small, 1)
	n.press(g, 85*gb-10*bytes-bytes*9/10)
	end := n.warming(node.Wanted{Spec: hung}, node.Wanted{Spec: large}, node.Wanted{Spec: small})
	proctest.Until(t, "the small one to be loaded", func() bool { return n.states()["f.small"] == Ready })
	if now := n.states(); now["f.hung"] != Loading || now["f.idle"] != Ready || now["f.large"] != "" {
		t.Errorf("zygotes %v, want the hung one loading, the idle one there, and not the large one", now)
	}
	if err := end(); err == nil || !strings.Contains(err.Error(), `warm "f.hung": its zygote still loads`) || strings.Contains(err.Error(), "f.large") {
		t.Errorf("got %v, want that the hung one loads", err)
	}
	if inv := n.Inventory(); inv.Evictions != 0 || inv.Refused != 0 {
		t.Errorf("%d evictions, %d refused, want none", inv.Evictions, inv.Refused)
	}
}

// TestWarmLoadsAFewAtATime checks that each zygote is loaded once, however many functions want it.
func TestWarmLoadsAFewAtATime(t *testing.T) {
	n := newNode(t, nil)
	var wanted []node.Wanted
	for i := range warmAtOnce + 1 {
		s := hangs(fmt.Sprint("h", i))
		twin := s
		twin.Function += "-twin"
		wanted = append(wanted, node.Wanted{Spec: s}, node.Wanted{Spec: twin})
	}
	end := n.warming(wanted...)
	proctest.Until(t, "loads to begin", func() bool { return len(n.states()) >= warmAtOnce })
	last := fmt.Sprintf("f.h%d", warmAtOnce)
	if err := end(); err == nil || !strings.Contains(err.Error(), `warm "`+last+`": not begun`) || strings.Contains(err.Error(), "twin") {
		t.Errorf("got %v, want that %s was not begun", err, last)
	}
	for f, state := range n.states() {
		if state != Loading || f == last || strings.HasSuffix(f, "twin") {
			t.Errorf("%s is %s, want the first %d, loading", f, state, warmAtOnce)
		}
	}
	if k := len(n.states()); k != warmAtOnce {
		t.Errorf("%d load, want %d", k, warmAtOnce)
	}
}

package flow

import (
	"net/http"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestLostReplicasDuringRedeploys checks replicas that die under their calls, with old revisions
// started again. No request may end because its function was redeployed.
func TestLostReplicasDuringRedeploys(t *testing.T) {
	g := graph(t, "a>b;b*>c;c")
	all := map[int]int{}
	revived := 0
	for seed := range uint64(3) {
		w := newSimulation(t, seed)
		w.rough = 100
		for status, n := range w.play(g, 60) {
			all[status] += n
		}
		revived += w.revived
	}
	if all[http.StatusServiceUnavailable] > 0 || all[0] < 150 || revived < 5 {
		t.Errorf("ends %v and %d replicas revived back, want none of 503, most well, and some revived back", all, revived)
	}
	t.Log(all, revived)
}

// TestFunctionIsToldThatRequestLeaves checks that a function with several calls in a request is
// told when the last of them is answered or the request ends.
func TestFunctionIsToldThatRequestLeaves(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a*>b;b*>c;c*"), "x", "y", "z")
	for range 3 {
		w.expectLeft()
		w.okOf(w.take("a"), 7)
	}
	w.expectLeft("a.ns")
	w.okOf(w.take("b"), 7)
	w.okOf(w.take("b"), 7)
	w.expectLeft("a.ns")
	w.step(Replied{&task.Reply{Key: w.take("b").Key, Code: task.Failed, Message: "broken"}})
	w.failed(http.StatusInternalServerError, "b", "broken")
	w.expectLeft("a.ns", "b.ns")

	w = newWorld(t)
	w.start(graph(t, "a*>b;b"), "x") // one call each
	w.okOf(w.take("a"), 7)
	w.okOf(w.take("b"), 7)
	w.expectLeft()
}

func (w *world) expectLeft(functions ...string) {
	w.t.Helper()
	if !slices.Equal(w.left, functions) {
		w.t.Errorf("left %v, want %v", w.left, functions)
	}
}

package flow

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// asks starts a request for a pipeline whose stages a and b have variants, with X-Variants.
func (w *world) asks(variants string) {
	w.t.Helper()
	g := graph(w.t, "a>b;b*")
	for i := range g.Stages {
		g.Stages[i].Variants = []pipeline.Function{{Name: g.Stages[i].Name + "-small", Namespace: "ns", Variant: pipeline.Variant{VariantOf: g.Stages[i].Name}}}
	}
	r := task.Request{ID: "r", Target: g.Key().String(), Deadline: w.now.Add(time.Minute), Input: texts("x"), Header: []task.Header{{Name: task.HeaderVariants, Value: variants}}}
	w.step(Start{Request: r, Graph: g, Loads: make([]task.Load, len(g.Stages))})
}

func (w *world) okFrom(function string, revision uint64, t *task.Task, items ...string) {
	w.t.Helper()
	w.step(Replied{&task.Reply{Key: t.Key, Replica: "r1", Variant: function, Revision: revision, Output: texts(items...)}})
}

// TestVariantsOfARequest checks that tasks name the functions that the client wants, also after the
// first of several calls has fixed a revision, and when a call runs again.
func TestVariantsOfARequest(t *testing.T) {
	w := newWorld(t)
	w.asks("b-small, a")
	a := w.take("a")
	if a.Only() != "a.ns" {
		t.Errorf("pins of a: %+v, want a itself", a.Pins)
	}
	w.okFrom("a.ns", 3, a, "1", "2", "3")
	first, lost := w.take("b"), w.take("b")
	w.okFrom("b-small.ns", 7, first, "x")
	w.lost(lost)
	w.take("b") // sent before the first answer
	again := w.take("b")
	if again.Only() != "b-small.ns" || again.Pinned("b-small.ns") != 7 || again.Attempt != 2 {
		t.Errorf("pins of the second attempt: %+v, want b-small in revision 7", again.Pins)
	}
	w = newWorld(t)
	w.asks("a-small")
	w.okFrom("a-small.ns", 1, w.take("a"), "1")
	if b := w.take("b"); len(b.Pins) != 0 {
		t.Errorf("pins of b: %+v, want none", b.Pins)
	}
}

// TestVariantsRefused checks wishes that cannot be met, and an owner that does not know pins to
// functions.
func TestVariantsRefused(t *testing.T) {
	for header, want := range map[string]string{
		"c":          `header X-Variants: got "c", want a function that serves a stage of "p": one of a, a-small, b, b-small`,
		"":           `got ""`,
		"a, a-small": `got "a-small", want one function per stage; a.ns is for stage "a", too`,
	} {
		w := newWorld(t)
		if w.asks(header); w.end == nil || w.end.Error == nil || w.end.Error.Status != http.StatusBadRequest || !strings.Contains(w.end.Error.Cause, want) {
			t.Errorf("%q: %+v, want 400 with %s", header, w.end, want)
		}
	}
	w := newWorld(t)
	w.asks("a-small")
	if w.okFrom("a.ns", 1, w.take("a"), "1"); w.end == nil || w.end.Error == nil || !strings.Contains(w.end.Error.Cause, "a.ns answered, and the request asks for a-small.ns") {
		t.Errorf("another function answered: %+v, want an error", w.end)
	}
}

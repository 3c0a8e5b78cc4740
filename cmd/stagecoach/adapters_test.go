package main

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// graphOf has one pipeline, whatever it is asked for.
type graphOf pipeline.Pipeline

func (g graphOf) Graph(pipeline.Key) (pipeline.Pipeline, bool) { return pipeline.Pipeline(g), true }

// TestLined: a pipeline can be invoked once each of its stages has a line.
func TestLined(t *testing.T) {
	g := graphOf{Name: "p", Namespace: "ns"}
	for _, name := range []string{"a", "b"} {
		g.Stages = append(g.Stages, pipeline.Stage{Function: pipeline.Function{Name: name, Namespace: "ns"}})
	}
	lines := map[pipeline.Key]bool{}
	l := lined{g, func(k pipeline.Key) bool { return lines[k] }}
	for _, name := range []string{"a", "b"} {
		if _, ok := l.Graph(pipeline.Key{Name: "p", Namespace: "ns"}); ok {
			t.Errorf("it can be invoked without a line of %s", name)
		}
		lines[pipeline.Key{Name: name, Namespace: "ns"}] = true
	}
	if got, ok := l.Graph(pipeline.Key{Name: "p", Namespace: "ns"}); !ok || got.Name != "p" {
		t.Errorf("got %+v, %t, want the pipeline", got, ok)
	}
}

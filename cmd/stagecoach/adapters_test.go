package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/control/events"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// graphOf has one pipeline, for every key.
type graphOf pipeline.Pipeline

func (g graphOf) Graph(pipeline.Key) (pipeline.Pipeline, bool) { return pipeline.Pipeline(g), true }

// TestPipelineRunsOnceAllStagesHaveALine checks that a pipeline can be invoked once each of its
// stages has a line.
func TestPipelineRunsOnceAllStagesHaveALine(t *testing.T) {
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

// TestWordsOfEvents checks that clients know the cluster's kinds of events by other names, and that
// top shows events as they are streamed.
func TestWordsOfEvents(t *testing.T) {
	for word, kind := range map[string]cluster.Kind{
		schema.Ordered: cluster.Ordered, schema.Process: cluster.Process, schema.Ready: cluster.Ready, schema.Answered: cluster.Answered,
		schema.Stopped: cluster.Stopped, schema.Failed: cluster.Failed, schema.Lost: cluster.Lost,
	} {
		if word != string(kind) {
			t.Errorf("package schema says %q, want %q, as package cluster", word, kind)
		}
	}
	from, to := 1, 2
	e := events.Event{
		At: time.Unix(1, 0).UTC(), Kind: "kind", Function: pipeline.Key{Name: "f", Namespace: "ns"}, Replica: "r", Node: "n", Call: "c", Path: "fork",
		Phases: map[string]string{"load": "1s"}, From: &from, To: &to, Why: "why",
	}
	streamed, err := json.Marshal(e)
	shown, err2 := json.Marshal(schema.TopEvent(e))
	if err != nil || err2 != nil || !bytes.Equal(streamed, shown) {
		t.Errorf("top shows %s (%v), want %s (%v)", shown, err2, streamed, err)
	}
}

// TestLoadOfARemovedFunctionSaysThatItIsNotDeployed loads parameters of a function that was removed
// after its request was checked.
func TestLoadOfARemovedFunctionSaysThatItIsNotDeployed(t *testing.T) {
	t.Parallel()
	nodes := parameterNodes{functions: deployed{Registry: &provider.Registry{}}}
	if _, err := nodes.Load(t.Context(), "n", pipeline.Key{Name: "f", Namespace: "ns"}); !errors.Is(err, admin.ErrNotDeployed) {
		t.Errorf("error %v, want that it is not deployed", err)
	}
}

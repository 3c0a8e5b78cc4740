package client

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

func TestReplicaStarts(t *testing.T) {
	begin := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	e := func(ms int, replica, kind, path string) schema.Event {
		return schema.Event{At: begin.Add(time.Duration(ms) * time.Millisecond), Replica: replica, Kind: kind, Path: path}
	}
	loads := func(e schema.Event) schema.Event { e.Phases = map[string]string{"load": "80ms"}; return e }
	events := []schema.Event{
		e(0, "old", "ready", "fork"), // ordered before what is looked at
		e(5, "a", "ordered", ""), e(10, "b", "ordered", ""), e(11, "c", "ordered", ""),
		loads(e(20, "a", "started", "fork")), e(21, "b", "started", "fork"),
		e(30, "b", "ready", "fork"), e(105, "a", "ready", "fork"),
		e(130, "b", "first answer", ""), e(200, "a", "draining", ""), e(210, "a", "stopped", ""),
		e(300, "c", "failed", ""),
	}
	want := []ReplicaStart{
		{Replica: "a", Path: "fork", Loaded: true, Ready: 100 * time.Millisecond},
		{Replica: "b", Path: "fork", Ready: 20 * time.Millisecond, Answered: 120 * time.Millisecond},
		{Replica: "c"},
	}
	if got := ReplicaStarts(events); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	var out bytes.Buffer
	if err := WriteStarts(&out, want); err != nil || !strings.Contains(out.String(), "120.0 ms") {
		t.Errorf("%v:\n%s", err, out.String())
	}
}

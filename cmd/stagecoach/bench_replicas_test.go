package main

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestReplicaSeconds counts replicas from their orders to their ends, within the window.
func TestReplicaSeconds(t *testing.T) {
	zero := time.Unix(1000, 0)
	at := func(s int, replica, kind string) schema.Event {
		return schema.Event{At: zero.Add(time.Duration(s) * time.Second), Replica: replica, Kind: kind}
	}
	events := []schema.Event{
		at(-9, "before", "ordered"), at(-8, "before", "ready"), at(-9, "past", "ordered"), at(-2, "past", "stopped"),
		at(4, "step", "ordered"), at(5, "step", "ready"), at(6, "step", "first answer"), at(7, "step", "draining"), at(8, "step", "stopped"),
		at(8, "broken", "ordered"), at(9, "broken", "failed"), at(9, "late", "ordered"), at(11, "late", "ready"), at(12, "late", "first answer"),
		at(12, "later", "ordered"),
	}
	if got := replicaSeconds(events, zero, zero.Add(10*time.Second)); got != 10+4+1+1 {
		t.Errorf("%g replica-seconds, want 10 of one that was there before, 4, 1 of one that failed, 1 of one that starts", got)
	}
	forgotten := []schema.Event{at(3, "old", "stopped")} // its order is no longer in the timeline
	if got := replicaSeconds(forgotten, zero, zero.Add(10*time.Second)); got != 3 {
		t.Errorf("%g replica-seconds, want 3", got)
	}
	for _, tc := range []struct{ from, to, want int }{{0, 10, 6}, {5, 10, 12}, {10, 20, 0}, {-10, 3, 0}} {
		got := firstAnswer(events, zero.Add(time.Duration(tc.from)*time.Second), zero.Add(time.Duration(tc.to)*time.Second))
		if tc.want == 0 && !got.IsZero() || tc.want > 0 && !got.Equal(at(tc.want, "", "").At) {
			t.Errorf("of those ordered from %d to %d the first answered at %v, want %d", tc.from, tc.to, got, tc.want)
		}
	}
}

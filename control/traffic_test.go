package control

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

// TestTrafficCountsRequests checks what a line of a record says about requests.
func TestTrafficCountsRequests(t *testing.T) {
	t.Parallel()
	traffic := NewTraffic(func(app string) time.Duration { return map[string]time.Duration{"strict": time.Nanosecond}[app] })
	begun := traffic.Begun("strict")
	traffic.Begun("strict")
	traffic.Begun("loose")
	traffic.Ended("strict", begun, true)
	traffic.Ended("strict", begun, false)
	traffic.Ended("loose", begun.Add(-time.Second), true)
	first := traffic.Take()
	if len(first.Apps) != 2 || first.To.Before(first.From) {
		t.Fatalf("%+v, want two applications", first)
	}
	loose, strict := first.Apps[0], first.Apps[1]
	if strict.Arrived != 2 || len(strict.Gaps) != 2 || strict.Answered != 1 || strict.InTime != 0 || strict.Failed != 1 || len(strict.Latencies) > 1 {
		t.Errorf("%+v, want two arrivals, one late answer and one failure", strict)
	}
	if loose.Arrived != 1 || loose.InTime != 1 || loose.Sum < time.Second || len(loose.Latencies) != 1 || loose.Latencies[0][0] < 1e6*63/64 || loose.Latencies[0][1] != 1 {
		t.Errorf("%+v, want one answer after a second", loose)
	}
	at := first.From
	for _, gap := range strict.Gaps {
		at = at.Add(time.Duration(gap) * time.Microsecond)
	}
	if at.Before(begun.Add(-10*time.Microsecond)) || at.After(first.To) {
		t.Errorf("the last arrival is at %v, want %v to %v", at, begun, first.To)
	}
	if second := traffic.Take(); len(second.Apps) != 0 || !second.From.Equal(first.To) {
		t.Errorf("%+v, want nothing since %v", second, first.To)
	}
}

// TestTrafficIsBounded checks that a line has no more gaps than MostGaps, and that counts are exact
// when requests come at the same time.
func TestTrafficIsBounded(t *testing.T) {
	t.Parallel()
	traffic := NewTraffic(func(string) time.Duration { return 0 })
	var group sync.WaitGroup
	for i := range 4 {
		group.Go(func() {
			app := fmt.Sprint("app", i%2)
			for range record.MostGaps/2 + i%2 {
				traffic.Ended(app, traffic.Begun(app), true)
			}
		})
	}
	group.Wait()
	got := traffic.Take()
	few, many := got.Apps[0], got.Apps[1]
	if few.Arrived != record.MostGaps || len(few.Gaps) != few.Arrived || few.CV != 0 || slices.Min(few.Gaps) < 0 {
		t.Errorf("%d arrivals with %d gaps and CV %v, want a gap per arrival", few.Arrived, len(few.Gaps), few.CV)
	}
	if many.Arrived != record.MostGaps+2 || many.Gaps != nil || many.CV <= 0 || many.InTime != many.Arrived {
		t.Errorf("%d arrivals with %d gaps and CV %v, want a CV in place of gaps", many.Arrived, len(many.Gaps), many.CV)
	}
}

// TestNoRecordCountsNoTraffic checks the Traffic of a loop that records nothing.
func TestNoRecordCountsNoTraffic(t *testing.T) {
	t.Parallel()
	var none *Traffic
	none.Ended("a", none.Begun("a"), true)
	if got := none.Take(); got != nil {
		t.Errorf("%+v, want nothing", got)
	}
}

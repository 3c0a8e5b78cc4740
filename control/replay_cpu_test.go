package control

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

// TestTheRecordOfCPUCompensation replays a real run in which a stage got CPU, because a budget kept
// its second replica from starting. The quota must be raised more than once, must be in force one
// decision later, and must make the stage faster. If a policy was changed on purpose, `make
// record-cpu` makes a new record.
func TestTheRecordOfCPUCompensation(t *testing.T) {
	t.Parallel()
	path := filepath.Join("..", "autoscaler", "testdata", "cpu-live.jsonl.gz")
	got := replayed(t, path)
	for _, d := range got.Diffs[:min(len(got.Diffs), 10)] {
		t.Errorf("line %d, %s %s:\nrecorded %s\ngot      %s", d.Line, d.Function, d.Field, d.Recorded, d.Got)
	}
	if !got.Same() || got.Decisions < 100 {
		t.Errorf("%d decisions, %d differences, unread %v, want a run of minutes without any", got.Decisions, len(got.Diffs), got.Unread)
	}
	// of one decision about the stage: quotas in thousandths of a core; planned 0: as declared
	type step struct {
		at            time.Time
		planned, used int
		service       time.Duration
	}
	var steps []step
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = record.Scan(f, func(_ int, text []byte) error {
		l, err := record.Decode(text)
		if err == nil && len(l.Snapshot.Functions) == 1 && len(l.Plan.Wants) == 1 {
			f := l.Snapshot.Functions[0]
			steps = append(steps, step{l.Snapshot.At, l.Plan.Wants[0].CPUMilli, max(f.CPUNow, f.CPULimit), f.Service.Mean})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	raises, first, last := 0, 0, 0
	for i := 1; i < len(steps); i++ {
		s, next := steps[i], steps[min(i+1, len(steps)-1)]
		if s.planned <= max(steps[i-1].planned, s.used) {
			continue
		}
		if raises++; raises == 1 {
			first = i
		}
		if last = i; next.used != s.planned {
			t.Errorf("at %v the plan gave %dm, and the replica had %dm afterwards", s.at, s.planned, next.used)
		}
	}
	if raises < 2 {
		t.Fatalf("%d raises of the quota, want two at least", raises)
	}
	for _, s := range steps[last:] {
		if s.at.Sub(steps[last].at) < 45*time.Second { // the measurement has a time constant of 30 s
			continue
		}
		if before := steps[first].service; s.service >= before*95/100 {
			t.Errorf("service takes %v with %dm, and %v with %dm, want a fall of 5 %% at least", before, steps[first].used, s.service, s.used)
		}
		return
	}
	t.Error("the record ends less than 45 s after the last raise")
}

package sandbox

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// child starts a process that runs, with its descendants, until the test ends.
func child(t *testing.T, argv ...string) int {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); _ = cmd.Wait() })
	return cmd.Process.Pid
}

// TestMeterCountsTheWorkOfChildren checks three loads. An idle process uses nothing. A busy process
// uses one core. The work of children counts for their parent.
func TestMeterCountsTheWorkOfChildren(t *testing.T) {
	t.Parallel()
	idle := child(t, "sleep", "100")
	busy := child(t, "sh", "-c", "(while :; do :; done) & wait")
	var m Meter
	var rate float64
	proctest.Until(t, "the busy child's work to show", func() bool {
		r, bytes, err := m.Measure("busy", []int{busy})
		if err != nil || bytes <= 0 {
			t.Fatalf("%d bytes, %v", bytes, err)
		}
		rate = r
		return rate > 50 // other processes want the processor, too
	})
	if most := 1000 * 1.2; rate > most {
		t.Errorf("%.0f thousandths, want at most one core (1000)", rate)
	}
	proctest.Until(t, "the idle child's start not to count any more", func() bool {
		r, bytes, err := m.Measure("idle", []int{idle})
		if err != nil || bytes <= 0 || bytes > 50<<20 {
			t.Fatalf("idle: %d bytes, %v", bytes, err)
		}
		return r < 50
	})
	before := m.last["busy"][busy]
	if _, _, err := m.Measure("busy", []int{busy, idle}); err != nil || m.last["busy"][busy] != before && time.Since(before.at) < window/2 {
		t.Errorf("second measurement at once: %v, %+v, want the sample of a moment ago", err, m.last["busy"])
	}
	both, err := PSS(idle, busy)
	if one, _ := PSS(idle); err != nil || both <= one {
		t.Errorf("%d bytes of both, %d of one (%v)", both, one, err)
	}
}

// TestMeterForgetsEndedProcesses checks that ended processes count as 0, and that no sample of them
// is kept.
func TestMeterForgetsEndedProcesses(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	m := Meter{last: map[string]map[int]sample{"f": {1: {}}, "g": {1: {}}}}
	if rate, bytes, err := m.Measure("f", []int{cmd.Process.Pid}); rate != 0 || bytes != 0 || err != nil {
		t.Errorf("%v, %d, %v", rate, bytes, err)
	}
	m.Forget("g")
	if len(m.last) != 0 {
		t.Errorf("%v is kept", m.last)
	}
	if _, err := PSS(cmd.Process.Pid); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("PSS of what has ended: %v", err)
	}
}

// TestRateCoversTheTimeSinceTheLastMeasurement checks that the rate covers the time since the last
// measurement.
func TestRateCoversTheTimeSinceTheLastMeasurement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Meter
		me := os.Getpid()
		if _, _, err := m.Measure("me", []int{me}); err != nil {
			t.Fatal(err)
		}
		s := m.last["me"][me]
		s.cpu -= 500 * time.Millisecond // as if it had used this much since
		m.last["me"][me] = s
		time.Sleep(time.Hour) // a fake hour: the processor does little meanwhile
		rate, _, err := m.Measure("me", []int{me})
		if want := 1000 * 0.5 / 3600; err != nil || rate < want || rate > 10*want {
			t.Errorf("%v (%v), want about %v", rate, err, want)
		}
	})
}

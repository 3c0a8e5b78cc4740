package sandbox

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

func TestThrottle(t *testing.T) {
	for name, tc := range map[string]struct {
		perSecond, size int
		passed          [2]int // lines passed in 20 seconds: at least, at most
	}{
		"few":            {perSecond: 100, size: 100, passed: [2]int{2000, 2000}},
		"as many as may": {perSecond: LinesPerSecond, size: 10, passed: [2]int{20 * LinesPerSecond, 20 * LinesPerSecond}},
		"too many":       {perSecond: 50_000, size: 1, passed: [2]int{20 * LinesPerSecond, 25 * LinesPerSecond}},
		"too long":       {perSecond: 1000, size: MaxLine, passed: [2]int{20 * BytesPerSecond / MaxLine, 25 * BytesPerSecond / MaxLine}},
	} {
		var th throttle
		now, passed, told, firsts := time.Unix(1, 0), 0, 0, 0
		for range 20 * tc.perSecond {
			now = now.Add(time.Second / time.Duration(tc.perSecond))
			ok, first, dropped := th.pass(now, tc.size)
			if ok {
				passed++
			}
			if first {
				firsts++
			}
			told += dropped
		}
		if passed < tc.passed[0] || passed > tc.passed[1] {
			t.Errorf("%s: %d lines passed in 20 s, want %v", name, passed, tc.passed)
		}
		if all := passed + told + th.dropped; all != 20*tc.perSecond {
			t.Errorf("%s: %d lines passed or counted, want %d", name, all, 20*tc.perSecond)
		}
		if firsts > 20/burst*2 {
			t.Errorf("%s: began to drop %d times", name, firsts)
		}
	}
}

func TestPace(t *testing.T) {
	for _, size := range []int{2, 100, MaxLine} {
		var p pace
		now, read := time.Unix(1, 0), 0
		for end := now.Add(10 * time.Second); now.Before(end); now = now.Add(time.Microsecond) {
			read += size + lineCost
			now = now.Add(p.pause(now, size))
		}
		if most := 11 * readPerSecond; read > most || read < 5*readPerSecond {
			t.Errorf("lines of %d bytes: %d bytes' worth in 10 s, want %d at most", size, read, most)
		}
	}
}

// TestAProcessThatPrintsForever checks that such a process costs little, and that a line says how
// many lines were dropped.
func TestAProcessThatPrintsForever(t *testing.T) {
	p, o, l := start(t, newSpawner(t), Command{Dir: "/", Process: "yes told"})
	const began = "stderr: stagecoach: lines are dropped from here on: it prints more than 2000 lines"
	proctest.Until(t, "lines to be dropped", func() bool {
		lines := l.sorted()
		return len(lines) > burst*LinesPerSecond && strings.HasPrefix(lines[0], began)
	})
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	o.Finish(10 * time.Second)
	lines, dropped := l.sorted(), 0
	for _, line := range lines[:4] {
		var n int
		if _, err := fmt.Sscanf(line, "stderr: stagecoach: %d lines were dropped here", &n); err == nil {
			dropped += n
		}
	}
	if dropped == 0 {
		t.Errorf("%q: no line says how many were dropped", lines[:4])
	}
	if last := o.LastError(); last != "" {
		t.Errorf("Stagecoach's own line counts as the process's last: %q", last)
	}
}

package watchdog

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// oom knows how often the kernel has killed processes of this replica because of its memory limit.
type oom struct {
	file string // of the replica's cgroup: memory.events or, in version 1, memory.oom_control
	text string // what happened then, for people
}

// kills returns how many processes were killed so far; 0 if nobody knows.
func (o oom) kills() int {
	if o.file == "" {
		return 0
	}
	b, _ := os.ReadFile(o.file) // without it nobody knows
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			kills, _ := strconv.Atoi(strings.TrimSpace(n)) // the kernel's own
			return kills
		}
	}
	return 0
}

// why returns how a process was killed that was started when there had been before kills.
func (o oom) why(s unix.WaitStatus, before int) string {
	if s.Signal() == unix.SIGKILL && o.kills() > before {
		return "killed: " + o.text
	}
	return "killed by " + unix.SignalName(s.Signal())
}

// killFirst makes the kernel kill a process of the function, and not this one, when the replica is out
// of memory. Files in memory count for no process, so the watchdog may be the largest.
func killFirst(pid int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("1000"), 0) // fails when it has ended, or is another user's
}

package watchdog

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// oom counts how often the kernel has killed processes of this replica because of its memory limit.
type oom struct {
	file string // in the replica's cgroup: memory.events or, in version 1, memory.oom_control
	text string // error text for a process that was killed for its memory
}

// kills returns the number of processes killed so far, or 0 if it is unknown.
func (o oom) kills() int {
	if o.file == "" {
		return 0
	}
	b, _ := os.ReadFile(o.file) // without the file the number is unknown
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			kills, _ := strconv.Atoi(strings.TrimSpace(n)) // the kernel writes a number
			return kills
		}
	}
	return 0
}

// why returns the cause of death of a process that a signal has ended. before is the number of
// kills when the process was started.
func (o oom) why(s unix.WaitStatus, before int) string {
	if s.Signal() == unix.SIGKILL && o.kills() > before {
		return "killed: " + o.text
	}
	return "killed by " + unix.SignalName(s.Signal())
}

// killFirst makes the kernel kill the function's process pid, and not the watchdog, when the
// replica is out of memory. By itself, the kernel kills the largest process. That may be the
// watchdog, because files in memory belong to no process.
func killFirst(pid int) {
	// Fails if the process has ended or belongs to another user.
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("1000"), 0)
}

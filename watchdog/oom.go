package watchdog

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// oom knows how often the kernel has killed processes of this replica because of its memory limit.
type oom struct {
	file string // in the replica's cgroup: memory.events or, in version 1, memory.oom_control
	text string // says that a process was killed for its memory, for error messages
}

// kills returns how many processes were killed so far; 0 if that is not known.
func (o oom) kills() int {
	if o.file == "" {
		return 0
	}
	b, _ := os.ReadFile(o.file) // without the file the number is not known
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

// killFirst makes the kernel kill the function's process pid, not the watchdog, when the replica is
// out of memory. Files in memory count for no process, so the watchdog may be the largest process.
func killFirst(pid int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("1000"), 0) // fails if the process has ended or belongs to another user
}

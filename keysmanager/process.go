package keysmanager

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/sandbox"
)

// process is a replica's process: a zygote's child, or one of our own.
type process struct {
	replica, function string
	pid               int
	path              string
	phases            []Phase
	started           time.Time
	output            *sandbox.Output
	running           bool // its Start has returned; guarded by the manager's mutex

	zygote *zygote   // its parent, or
	cmd    *exec.Cmd // itself

	once   sync.Once
	gone   chan struct{} // closed when it has ended and was reported
	report func(p *process, cause string)
}

// end says once why the process has ended. It waits a moment for what the process had still to say.
func (p *process) end(cause string) {
	p.once.Do(func() {
		go func() { // p.gone says when it is done; the manager waits for that
			defer close(p.gone)
			drained := make(chan struct{})
			go func() { p.output.Wait(); close(drained) }()
			select {
			case <-drained:
				if last := p.output.LastError(); last != "" && !strings.HasPrefix(cause, "exited") {
					cause = fmt.Sprintf("%s: %s", cause, last)
				}
			case <-time.After(100 * time.Millisecond): // something still holds its output
			}
			p.report(p, cause)
		}()
	})
}

func (p *process) signal(s syscall.Signal) {
	if p.zygote != nil {
		p.zygote.signal(p.pid, s)
		return
	}
	_ = p.cmd.Process.Signal(s) // an ended process needs none
}

// pss returns the proportional set size of a process in bytes; 0 when it cannot be read.
func pss(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		var kb int64
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			if _, err := fmt.Sscan(rest, &kb); err == nil {
				return kb << 10
			}
		}
	}
	return 0
}

package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Command is a process to be started.
type Command struct {
	Dir            string            // where it runs, usually an image's root
	Process        string            // as the env fprocess has it: program and arguments by spaces; empty: ./stage
	Env            map[string]string // all that it gets beside PATH, HOME and TMPDIR
	Files          []*os.File        // descriptors 3, 4, …; the caller's to close
	Stdin          *os.File          // nil: empty; the caller's to close
	Stdout, Stderr *os.File          // the caller's to close
}

// Spawner starts processes that end when this process does: the kernel sends them SIGKILL then. It does so when the
// *thread* that started them ends, so a Spawner keeps one thread of its own.
type Spawner struct {
	jobs chan func()
	done sync.WaitGroup
	once sync.Once
	quit chan struct{}
}

// ErrClosed says that a Spawner starts nothing any more.
var ErrClosed = errors.New("sandbox: closed")

// NewSpawner returns a Spawner; the caller closes it, after the processes have ended. Descriptors that this process was
// itself started with are closed in what it starts (from Linux 5.11 on; Go's own always are).
func NewSpawner() *Spawner {
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC) // older kernels: they stay open
	s := &Spawner{jobs: make(chan func()), quit: make(chan struct{})}
	s.done.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for {
			select {
			case job := <-s.jobs:
				job()
			case <-s.quit:
				return
			}
		}
	})
	return s
}

// Close ends the Spawner's thread, and with it what it has started.
func (s *Spawner) Close() {
	s.once.Do(func() { close(s.quit) })
	s.done.Wait()
}

// Start starts the process as the leader of a session, and so of a process group, of its own. The caller waits for it, with
// [Wait].
func (s *Spawner) Start(c Command) (*exec.Cmd, error) {
	argv := strings.Fields(c.Process)
	if len(argv) == 0 {
		argv = []string{"./" + Executable}
	}
	program := argv[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(c.Dir, program)
	}
	cmd := exec.Command(program, argv[1:]...)
	cmd.Dir, cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = c.Dir, c.Files, c.Stdout, c.Stderr
	if c.Stdin != nil { // a nil *os.File is no nil io.Reader
		cmd.Stdin = c.Stdin
	}
	cmd.Env = environment(c.Env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	select {
	case s.jobs <- func() { started <- cmd.Start() }:
	case <-s.quit:
		return nil, ErrClosed
	}
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", argv[0], c.Dir, err)
	}
	return cmd, nil
}

// Wait returns how a process that a Spawner started has ended, once it has; it is called once, in place of cmd.Wait. What the
// process has left in its process group is killed: it belonged to it, and nobody else would end it.
func Wait(cmd *exec.Cmd) unix.WaitStatus {
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
	if err == nil {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // not reaped yet, so the group's number is still its own
	}
	_ = cmd.Wait() // the state says how it ended
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		return unix.WaitStatus(status)
	}
	return 0
}

func environment(env map[string]string) []string {
	out := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "TMPDIR=/tmp"}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" { // coverage of a stage binary built for it
		out = append(out, "GOCOVERDIR="+dir)
	}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}

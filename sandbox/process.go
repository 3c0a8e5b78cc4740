package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
)

// Command is a process to be started.
type Command struct {
	Dir            string            // where it runs, usually an image's root
	Process        string            // as the env fprocess has it: program and arguments by spaces; empty: ./stage
	Env            map[string]string // all that it gets beside PATH, HOME and TMPDIR
	Files          []*os.File        // descriptors 3, 4, …; the caller's to close
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

// NewSpawner returns a Spawner; the caller closes it, after the processes have ended.
func NewSpawner() *Spawner {
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

// Start starts the process. The caller waits for it.
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

func environment(env map[string]string) []string {
	out := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "TMPDIR=/tmp"}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" { // coverage of a stage binary built for it
		out = append(out, "GOCOVERDIR="+dir)
	}
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	return out
}

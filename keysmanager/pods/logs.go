package pods

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// notes has a file for each pod of this machine, by its replica. The file says which process is the
// first one of the pod.
const notes = sandbox.RunFolder + "/pods"

// noteOf returns the file of a replica; empty: none.
func noteOf(replica string) string {
	if replica == "" {
		return ""
	}
	return filepath.Join(notes, url.PathEscape(replica))
}

func writeNote(path, uid string, pid int) error {
	if path == "" {
		return nil
	}
	if err := os.MkdirAll(notes, 0o700); err != nil {
		return err
	}
	part := path + ".part"
	return errors.Join(os.WriteFile(part, fmt.Appendf(nil, "%s %d\n", uid, pid), 0o600), os.Rename(part, path))
}

// removeNote removes a file of writeNote, unless another pod has it now.
func removeNote(path string, pid int) {
	if _, now, err := readNote(path); err == nil && now == pid {
		_ = os.Remove(path) // one that is left over names a process that is in no such pod
	}
}

func readNote(path string) (uid string, pid int, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		_, err = fmt.Sscan(string(b), &uid, &pid)
	}
	return uid, pid, err
}

// Bounds of Logs.
const (
	logLines = 256              // that wait for a pod
	logIdle  = 10 * time.Second // after which the pod is looked for again
	logFind  = 10 * time.Second // for a pod to be found
	logPause = 100 * time.Millisecond
	logWrite = time.Second // for a line to be taken
)

// Logs writes lines that functions print to where `kubectl logs` finds them: to the standard output
// of their pods' first programs. It drops lines that are not taken soon enough. Its methods are
// safe for concurrent use.
type Logs struct {
	find func(replica string) (pid int, ok bool)

	open  context.Context // ends with Close
	shut  context.CancelFunc
	tasks sync.WaitGroup

	mu     sync.Mutex
	closed bool
	lines  map[string]chan string // by replica
}

// NewLogs returns Logs. processOf returns the process of a replica, or 0. The caller closes the
// Logs.
func NewLogs(processOf func(replica string) int) *Logs {
	l := &Logs{lines: map[string]chan string{}}
	l.open, l.shut = context.WithCancel(context.Background())
	l.find = func(replica string) (int, bool) { return firstProgram(replica, processOf) }
	return l
}

// firstProgram returns the first program of a replica's pod.
func firstProgram(replica string, processOf func(replica string) int) (pid int, ok bool) {
	if uid, pid, err := readNote(noteOf(replica)); err == nil && isOf(pid, uid) {
		return pid, true
	}
	// A replica that was forked is in the pod of its zygote.
	its := processOf(replica)
	if its == 0 {
		return 0, false
	}
	pid, err := sandbox.PIDsOf(its).Outside(1)
	return pid, err == nil && pid > 1 // 1: it is in no pod
}

// Add writes a line of a replica. It does not wait.
func (l *Logs) Add(replica, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	lines := l.lines[replica]
	if lines == nil {
		lines = make(chan string, logLines)
		l.lines[replica] = lines
		l.tasks.Go(func() { l.write(replica, lines) })
	}
	select {
	case lines <- line:
	default:
	}
}

// Close ends what is under way.
func (l *Logs) Close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.shut()
	l.tasks.Wait()
}

// write writes the lines of a replica until there are none for a while, or its pod is not found.
func (l *Logs) write(replica string, lines <-chan string) {
	out := l.stdout(replica)
	if out == nil {
		l.forget(replica, true)
		return
	}
	defer out.Close()
	idle := time.NewTimer(logIdle)
	defer idle.Stop()
	for {
		select {
		case line := <-lines:
			idle.Reset(logIdle)
			err := out.SetWriteDeadline(time.Now().Add(logWrite))
			if err == nil {
				_, err = out.WriteString(line + "\n")
			}
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // the pod has ended
				l.forget(replica, true)
				return
			}
		case <-idle.C:
			if l.forget(replica, false) {
				return
			}
			idle.Reset(logIdle)
		case <-l.open.Done():
			return
		}
	}
}

// forget removes a replica. If the replica still has lines, forget needs force, and returns false
// otherwise.
func (l *Logs) forget(replica string, force bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines[replica]) > 0 && !force {
		return false
	}
	delete(l.lines, replica)
	return true
}

// stdout opens the standard output of the first program of a replica's pod; nil: none is found.
func (l *Logs) stdout(replica string) *os.File {
	ctx, cancel := context.WithTimeout(l.open, logFind)
	defer cancel()
	for {
		if pid, ok := l.find(replica); ok {
			f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/1", pid), os.O_WRONLY|unix.O_NONBLOCK, 0)
			if err == nil {
				return f
			}
		}
		select {
		case <-time.After(logPause):
		case <-ctx.Done():
			return nil
		}
	}
}

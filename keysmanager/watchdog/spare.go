package watchdog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// spare is a process that waits to become the program of mode http.
type spare struct {
	sandbox.Process
	holder sandbox.Holder
	ended  chan struct{} // closed when it has ended; then status is set
	status unix.WaitStatus
}

// Bounds of the waits for a spare.
const (
	spareReady = 10 * time.Second // after its container has started
	spareGoes  = 3 * time.Second
)

// newSpare starts a process that waits. The end of ctx ends the start.
func newSpare(ctx context.Context, r sandbox.Runtime, c *config) (_ *spare, err error) {
	s := &spare{ended: make(chan struct{})}
	holder, its, err := sandbox.NewHolder()
	if err != nil {
		return nil, err
	}
	defer its.Close()
	s.holder = holder
	command := c.childCommand()
	command.Held, command.Files = true, []*os.File{its}
	if s.Process, err = r.Start(ctx, command); err != nil {
		holder.Close()
		return nil, err
	}
	go func() { // ends with the process, which ends with this one
		s.status = s.Process.Wait()
		close(s.ended)
	}()
	_ = its.Close() // so that an end of the process closes the socket
	if err := holder.Ready(time.Now().Add(spareReady)); err != nil {
		holder.Close() // which ends the process
		return nil, err
	}
	return s, nil
}

// begin lets the program run, with these variables in addition to its own.
func (s *spare) begin(own map[string]string) (sandbox.Process, error) {
	defer s.holder.Close()
	return s, s.holder.Go(own, time.Now().Add(spareGoes))
}

// Wait implements sandbox.Process.
func (s *spare) Wait() unix.WaitStatus {
	<-s.ended
	return s.status
}

// await returns true at once if this process is not a spare, and else when it is needed. The
// program of mode http runs by then. fd is the descriptor of the holder, or empty.
func (w *watchdog) await(ctx context.Context, fd string) (needed bool, err error) {
	if fd == "" {
		return true, nil
	}
	n, err := strconv.Atoi(fd)
	if err != nil {
		return false, fmt.Errorf("descriptor %q of a spare: %w", fd, err)
	}
	held, err := sandbox.NewHeld(n)
	if err != nil {
		return false, err
	}
	defer held.Close()
	defer context.AfterFunc(ctx, held.Close)()
	var waits *spare
	if w.c.mode == modeHTTP {
		if waits, err = newSpare(ctx, w.runtime, w.c); err != nil {
			return false, err
		}
		go func() { // ends with the process, which ends with this one
			<-waits.ended
			held.Close() // so the daemon does not use this spare
		}()
	}
	env, err := held.Wait()
	if errors.Is(err, sandbox.ErrNotNeeded) || ctx.Err() != nil {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		if err := os.Setenv(name, value); err != nil {
			return false, err
		}
	}
	if waits != nil {
		w.begun, err = w.c.startChild(w.runtime, waits.begin)
	}
	held.Begun(err)
	return err == nil, err
}

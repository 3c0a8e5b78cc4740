// Package child runs this program in processes of their own, as operators do.
package child

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Listening begins the line of standard output in which a server says its address.
const Listening = "listening on "

// Process is a process that serves on an address of its own choice.
type Process struct {
	Addr string // host:port
	Cmd  *exec.Cmd
	Done chan error // gets how the process has ended, once
	out  sync.WaitGroup
}

// Start runs this program with arguments, and waits until it says that it listens. Its standard
// error goes to log.
func Start(ctx context.Context, log io.Writer, args ...string) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return StartProgram(ctx, self, log, args...)
}

// StartProgram does the same as Start with another build of the program.
func StartProgram(ctx context.Context, program string, log io.Writer, args ...string) (*Process, error) {
	c := &Process{Cmd: exec.CommandContext(ctx, program, args...), Done: make(chan error, 1)}
	c.Cmd.Stderr = log
	c.Cmd.Cancel = func() error { return c.Cmd.Process.Signal(syscall.SIGTERM) }
	c.Cmd.WaitDelay = time.Minute
	stdout, err := c.Cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan string, 1)
	c.out.Go(func() {
		defer close(ready)
		said := false
		for sc := bufio.NewScanner(stdout); sc.Scan(); {
			if addr, ok := strings.CutPrefix(sc.Text(), Listening); ok && !said {
				said = true
				ready <- strings.TrimPrefix(addr, "http://")
			}
		}
	})
	const limit = 30 * time.Second
	select {
	case addr, ok := <-ready:
		if ok {
			c.Addr = addr
			go func() { c.out.Wait(); c.Done <- c.Cmd.Wait() }() // ends with the process; stop waits for it
			return c, nil
		}
		err = c.Cmd.Wait()
	case <-time.After(limit):
		_ = c.Cmd.Process.Kill()
		c.out.Wait()
		_ = c.Cmd.Wait()
		err = fmt.Errorf("silent for %v", limit)
	}
	return nil, fmt.Errorf("stagecoach %s did not come up: %w", strings.Join(args, " "), err)
}

// Stop asks the process to end, and waits until it has ended. After a minute it kills the process.
func (c *Process) Stop() error {
	if err := c.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-c.Done:
		return err
	case <-time.After(time.Minute):
		_ = c.Cmd.Process.Kill()
		return fmt.Errorf("%s: still there a minute after SIGTERM, killed", c.Cmd)
	}
}

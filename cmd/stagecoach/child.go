package main

import (
	"bufio"
	"cmp"
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

// listening starts the line on standard output by which a server says where it is.
const listening = "listening on "

// child is a server of ours in a process of its own, on an address of its own choice.
type child struct {
	addr string // host:port
	cmd  *exec.Cmd
	done chan error
	out  sync.WaitGroup
}

// startChild runs this program with args and waits until it says that it listens. Its standard error goes to log.
func startChild(ctx context.Context, log io.Writer, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return startProgram(ctx, self, log, args...)
}

// startProgram does the same as startChild with another build of this program.
func startProgram(ctx context.Context, program string, log io.Writer, args ...string) (*child, error) {
	c := &child{cmd: exec.CommandContext(ctx, program, args...), done: make(chan error, 1)}
	c.cmd.Stderr = log
	c.cmd.Cancel = func() error { return c.cmd.Process.Signal(syscall.SIGTERM) }
	c.cmd.WaitDelay = time.Minute
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan string, 1)
	c.out.Go(func() {
		defer close(ready)
		said := false
		for sc := bufio.NewScanner(stdout); sc.Scan(); {
			if addr, ok := strings.CutPrefix(sc.Text(), listening); ok && !said {
				said = true
				ready <- strings.TrimPrefix(addr, "http://")
			}
		}
	})
	const limit = 30 * time.Second
	select {
	case addr, ok := <-ready:
		if ok {
			c.addr = addr
			go func() { c.out.Wait(); c.done <- c.cmd.Wait() }() // ends with the process; stop waits for it
			return c, nil
		}
		err = c.cmd.Wait()
	case <-time.After(limit):
		_ = c.cmd.Process.Kill()
		c.out.Wait()
		_ = c.cmd.Wait()
		err = fmt.Errorf("silent for %v", limit)
	}
	return nil, fmt.Errorf("stagecoach %s did not come up: %w", strings.Join(args, " "), err)
}

// stop asks the process to end and waits until it has.
func (c *child) stop() error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-c.done:
		return err
	case <-time.After(time.Minute):
		_ = c.cmd.Process.Kill()
		return fmt.Errorf("%s: still there a minute after SIGTERM, killed", c.cmd)
	}
}

// onUp runs f against an `up` of its own, on a state folder of its own, which it ends.
func onUp(ctx context.Context, flags []string, f func(api *client) error) error {
	state, err := os.MkdirTemp("", "stagecoach-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	up, err := startChild(ctx, os.Stderr, append([]string{"up", "--listen", "127.0.0.1:0", "--state", state, "--log", "error"}, flags...)...)
	if err != nil {
		return err
	}
	err = f(newClient("http://" + up.addr))
	return cmp.Or(err, up.stop())
}

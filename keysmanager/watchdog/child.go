package watchdog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// command returns how to start the function's program, without its files.
func (c *config) command() sandbox.Command {
	cmd := sandbox.Command{Dir: c.image.Root, Argv: c.process, Env: c.env, Stdout: os.Stdout, Stderr: os.Stderr, As: c.account, Secrets: c.secrets}
	cmd.Labels, cmd.Options = map[string]string{sandbox.LabelImage: c.image.Name}, c.image.Options
	cmd.Hosts, cmd.Resolv = c.network.Hosts, c.network.Resolv
	if c.image.Rootfs {
		cmd.Chroot, cmd.As, cmd.Dir, cmd.User = c.image.Root, nil, cmp.Or(c.image.WorkDir, "/"), c.image.User
		// From the order, not from the function.
		cmd.ReadOnly, cmd.GPUs = c.image.ReadOnly, c.env["CUDA_VISIBLE_DEVICES"] != ""
		// The folder named in c.env must not be used. The function could name any folder, and this
		// process may be able to read it.
		if c.secrets != "" {
			cmd.Binds = []sandbox.Bind{{From: c.secrets, To: secretsFolder, Copy: true}}
			cmd.Env = maps.Clone(c.env)
			cmd.Env[envSecrets] = secretsFolder
		}
	}
	return cmd
}

// hide returns a text for clients. It replaces the paths of the image's files by paths that the
// function sees, or by paths relative to the image's folder.
func (c *config) hide(text string) string {
	switch root := c.image.Root; {
	case root == "" || root == "/":
		return text
	case c.image.Rootfs:
		return strings.ReplaceAll(text, root, "")
	default:
		return strings.ReplaceAll(text, root, ".")
	}
}

// envSecrets names the folder with a function's secrets. In its own root, a program finds them
// where OpenFaaS has them.
const (
	envSecrets    = "secret_mount_path"
	secretsFolder = "/var/openfaas/secrets"
)

// child is the program of a function in mode http. It runs as long as the replica.
type child struct {
	process sandbox.Process
	at      url.URL       // address on which it listens
	root    int           // see guard
	guard   *guard        // guards that port; nil: nobody else can listen there
	network *os.File      // namespace with that port; nil: that of this process
	gone    chan struct{} // closed when it has ended; then status is set
	status  unix.WaitStatus
	heard   atomic.Int64 // time of its last answer, in nanoseconds since 1970
}

// startChild starts the program. It returns before the program is ready.
func startChild(ctx context.Context, s sandbox.Runtime, c *config) (*child, error) {
	return c.startChild(s, func(own map[string]string) (sandbox.Process, error) {
		command := c.childCommand()
		command.Env = maps.Clone(command.Env)
		maps.Copy(command.Env, own)
		return s.Start(ctx, command)
	})
}

// startChild starts the program by start, which gives the program these variables in addition to
// its own, and uses s.
func (c *config) startChild(s sandbox.Runtime, start func(own map[string]string) (sandbox.Process, error)) (*child, error) {
	p := &child{gone: make(chan struct{})}
	apart, _ := s.(sandbox.Apart)
	own := map[string]string{}
	if c.upstream != nil {
		p.at = *c.upstream
	} else {
		port := ownPort
		if !c.network.Own && apart == nil {
			var err error
			if port, err = freePort(); err != nil {
				return nil, err
			}
		}
		p.at = url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", port)}
		for _, name := range []string{"port", "PORT", "http_port", "HTTP_PORT"} {
			own[name] = port
		}
	}
	g, err := newGuard(p.at)
	if err != nil {
		return nil, err
	}
	if apart == nil {
		// Also in a separate network, where the port may be in use already.
		if err := g.claim(); err != nil {
			return nil, err
		}
		if !c.network.Own {
			p.guard = g
		}
	}
	if err := p.begin(apart, own, start); err != nil {
		g.close()
		return nil, err
	}
	g.root = p.root
	go func() { // ends with the child, which ends with this process
		p.noteEnd(p.process.Wait())
		g.close()
		close(p.gone)
	}()
	return p, nil
}

// begin starts the program, and opens its network if that is not this process's.
func (p *child) begin(apart sandbox.Apart, own map[string]string, start func(own map[string]string) (sandbox.Process, error)) (err error) {
	if p.process, err = start(own); err != nil {
		return err
	}
	if apart != nil {
		if p.network, err = apart.Network(p.process); err != nil {
			p.kill()
			p.noteEnd(p.process.Wait())
			return err
		}
	}
	p.root = rootOf(p.process.PID())
	killFirst(p.process.PID())
	return nil
}

// noteEnd notes how the program has ended, and removes what is left of it.
func (p *child) noteEnd(status unix.WaitStatus) {
	p.status = status
	p.process.Forget()
	if p.network != nil {
		_ = p.network.Close() // nothing was written
	}
}

// childCommand returns how to start a program that runs as long as the replica, without its files.
func (c *config) childCommand() sandbox.Command {
	command := c.command()
	// Everything that it starts ends with this process, however this process ends.
	command.Stays = true
	return command
}

// ownPort is the port of a program in its own network. Many images listen on it whatever their
// environment says.
const ownPort = "8080"

// freePort returns a free port of this machine.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("a port for the function: %w", err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// stop ends the program with SIGTERM, and with SIGKILL when ctx ends. It returns when the program
// has ended.
func (p *child) stop(ctx context.Context) {
	_ = p.process.Signal(syscall.SIGTERM) // it may have ended already
	select {
	case <-p.gone:
		return
	case <-ctx.Done():
	}
	p.kill()
	<-p.gone
}

// kill kills the program.
func (p *child) kill() { _ = p.process.Signal(syscall.SIGKILL) } // it may have ended already

// end describes how the program has ended.
func (p *child) end() string {
	switch s := p.status; {
	case s.Signaled():
		return "it was killed by " + unix.SignalName(s.Signal())
	default:
		return "it ended with exit status " + strconv.Itoa(s.ExitStatus())
	}
}

// Waits between two probes of a program that starts.
const (
	firstLook = 2 * time.Millisecond
	laterLook = 200 * time.Millisecond
	lookTime  = 5 * time.Second // longest wait for an answer
)

// wait returns when the program is ready or has ended, or when ctx ends.
func (p *child) wait(ctx context.Context, path string) error {
	client := probeClient(p)
	var said error // last answer
	var taken takenError
	for pause := firstLook; ; pause = min(2*pause, laterLook) {
		ready, err := p.probe(ctx, client, path)
		if ready {
			return nil
		}
		if errors.As(err, &taken) {
			return taken
		}
		if said == nil || ctx.Err() == nil { // a canceled probe says nothing
			said = err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-p.gone:
			t.Stop()
			return fmt.Errorf("the function's program was never ready: %s", p.end())
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("the function's program was not ready in time: %w", p.notReady(ctx.Err(), said))
		}
	}
}

// notReady returns the error for a program that is not ready in time. It says where the program
// listens instead, or what it answered last.
func (p *child) notReady(end, said error) error {
	if elsewhere := p.listensAt(); p.process != nil && elsewhere != "" {
		return fmt.Errorf("%w; %s", end, elsewhere)
	}
	if said != nil {
		return fmt.Errorf("%w; %w", end, said)
	}
	return end
}

// failures is the number of consecutive failed probes after which a program is given up; Kubernetes
// uses the same number.
const failures = 3

// check probes the program's health until ctx ends, and then returns nil. It returns an error if
// the program is given up.
func (p *child) check(ctx context.Context, path string, delay, period time.Duration) error {
	client := probeClient(p)
	t := time.NewTimer(delay)
	defer t.Stop()
	for bad := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		t.Reset(period)
		if _, err := p.probe(ctx, client, path); err == nil {
			bad = 0
		} else if bad++; bad == failures && ctx.Err() == nil {
			return fmt.Errorf("the function's program is given up, its health was bad %d times in a row: %w", bad, err)
		}
	}
}

// dial connects to the program.
func (p *child) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if p.guard == nil {
		return sandbox.DialIn(ctx, p.network, network, address)
	}
	return p.guard.dial(ctx, network, address)
}

// probeClient returns an HTTP client for probes.
func probeClient(p *child) *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DialContext: p.dial},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       lookTime,
	}
}

// probe asks once whether the program is ready.
func (p *child) probe(ctx context.Context, client *http.Client, path string) (ready bool, err error) {
	if path != "" {
		status, err := p.get(ctx, client, path)
		if err == nil && (status < 200 || status > 299) {
			err = fmt.Errorf("%s answered %d, want 2xx", path, status)
		}
		return err == nil, err
	}
	for _, path := range []string{"/_/ready", "/_/health"} {
		status, err := p.get(ctx, client, path)
		switch {
		case err != nil:
			return false, err
		case status >= 200 && status <= 299:
			return true, nil
		case status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests:
			return false, fmt.Errorf("%s answered %d", path, status)
		}
	}
	return true, nil // the program answers, but knows neither path
}

func (p *child) get(ctx context.Context, client *http.Client, path string) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.at.Host+path, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.CopyN(io.Discard, resp.Body, 64<<10)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return resp.StatusCode, err
}

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
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/sandbox"
)

// command is how the function's program is started, but for its files.
func (c *config) command() sandbox.Command {
	cmd := sandbox.Command{Dir: c.image.Root, Argv: c.process, Env: c.env, Stdout: os.Stdout, Stderr: os.Stderr, As: c.account, Secrets: c.secrets}
	cmd.Hosts, cmd.Resolv = c.network.Hosts, c.network.Resolv
	if c.image.Rootfs {
		cmd.Chroot, cmd.As, cmd.Dir, cmd.User = c.image.Root, nil, cmp.Or(c.image.WorkDir, "/"), c.image.User
		cmd.ReadOnly, cmd.GPUs = c.image.ReadOnly, c.env["CUDA_VISIBLE_DEVICES"] != "" // the order's, not the function's
		// Not the folder in c.env, which the function could name: this process may read any folder.
		if c.secrets != "" {
			cmd.Binds = []sandbox.Bind{{From: c.secrets, To: secretsFolder, Copy: true}}
			cmd.Env = maps.Clone(c.env)
			cmd.Env[envSecrets] = secretsFolder
		}
	}
	return cmd
}

// hide returns a text for clients, in which the image's files have the paths that the function
// sees, or paths relative to the image's folder.
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

// envSecrets names the folder with a function's secrets; in a root of its own that is where OpenFaaS has it.
const (
	envSecrets    = "secret_mount_path"
	secretsFolder = "/var/openfaas/secrets"
)

// child is the program of a function in mode http, for as long as the replica lives.
type child struct {
	cmd    *exec.Cmd
	at     url.URL       // where it listens
	guard  *guard        // of that port; nil: nobody else can listen there
	gone   chan struct{} // closed when it has ended; then status is set
	status unix.WaitStatus
	heard  atomic.Int64 // when it last answered anything, in ns since 1970
}

// startChild starts the program and returns before it is ready.
func startChild(s *sandbox.Spawner, c *config) (*child, error) {
	command := c.command()
	command.Stays = true // what it starts ends with this process, however that ends
	p := &child{gone: make(chan struct{})}
	if c.upstream != nil {
		p.at = *c.upstream
	} else {
		port := ownPort
		if !c.network.Own {
			var err error
			if port, err = freePort(); err != nil {
				return nil, err
			}
		}
		p.at = url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", port)}
		command.Env = maps.Clone(command.Env)
		for _, name := range []string{"port", "PORT", "http_port", "HTTP_PORT"} {
			command.Env[name] = port
		}
	}
	g, err := newGuard(p.at)
	if err != nil {
		return nil, err
	}
	if err := g.claim(); err != nil { // in a network of its own, too: then it has been used before
		return nil, err
	}
	if !c.network.Own {
		p.guard = g
	}
	if p.cmd, err = s.Start(command); err != nil {
		g.close()
		return nil, err
	}
	killFirst(p.cmd.Process.Pid)
	go func() { // ends with the process, which ends with this one
		p.status = sandbox.Wait(p.cmd)
		g.close()
		close(p.gone)
	}()
	return p, nil
}

// ownPort is the port of a program in a network of its own. Many images listen there whatever their environment says.
const ownPort = "8080"

// freePort returns a port of this machine that nobody listens on.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("a port for the function: %w", err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// stop ends the program: SIGTERM, and SIGKILL when ctx ends. It returns when it has ended.
func (p *child) stop(ctx context.Context) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.gone:
		return
	case <-ctx.Done():
	}
	_ = p.cmd.Process.Kill()
	<-p.gone
}

// end says how the program has ended.
func (p *child) end() string {
	switch s := p.status; {
	case s.Signaled():
		return "it was killed by " + unix.SignalName(s.Signal())
	default:
		return "it ended with exit status " + strconv.Itoa(s.ExitStatus())
	}
}

// Waits between two looks at a program that starts.
const (
	firstLook = 2 * time.Millisecond
	laterLook = 200 * time.Millisecond
	lookTime  = 5 * time.Second // for an answer
)

// wait returns when the program is ready, has ended, or ctx has.
func (p *child) wait(ctx context.Context, path string) error {
	client := looker(p)
	var said error // what it answered last
	var taken takenError
	for pause := firstLook; ; pause = min(2*pause, laterLook) {
		ready, err := p.ask(ctx, client, path)
		if ready {
			return nil
		}
		if errors.As(err, &taken) {
			return taken
		}
		if said == nil || ctx.Err() == nil { // one that was cut short says nothing
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
			return fmt.Errorf("the function's program was not ready in time: %w", p.late(ctx.Err(), said))
		}
	}
}

// late returns why the program is not ready when the wait ends: where it listens instead, or what it answered last.
func (p *child) late(end, said error) error {
	if elsewhere := p.elsewhere(); p.cmd != nil && elsewhere != "" {
		return fmt.Errorf("%w; %s", end, elsewhere)
	}
	if said != nil {
		return fmt.Errorf("%w; %w", end, said)
	}
	return end
}

// failures is after how many looks in a row that found it ill a program is given up, as Kubernetes does.
const failures = 3

// check looks at the program's health until ctx ends, which is no error, or until the program is given up.
func (p *child) check(ctx context.Context, path string, delay, period time.Duration) error {
	client := looker(p)
	t := time.NewTimer(delay)
	defer t.Stop()
	for bad := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		t.Reset(period)
		if _, err := p.ask(ctx, client, path); err == nil {
			bad = 0
		} else if bad++; bad == failures && ctx.Err() == nil {
			return fmt.Errorf("the function's program is given up, its health was bad %d times in a row: %w", bad, err)
		}
	}
}

// dial connects to the program.
func (p *child) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if p.guard == nil {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	return p.guard.dial(ctx, network, address)
}

// looker is a client that looks at the program.
func looker(p *child) *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DialContext: p.dial},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       lookTime,
	}
}

// ask looks once whether the program is ready.
func (p *child) ask(ctx context.Context, client *http.Client, path string) (ready bool, err error) {
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
	return true, nil // it answers, and knows neither path
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

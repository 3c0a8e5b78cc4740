// Package natstest runs a cluster of nats-servers for tests, each as a process of its own, so that
// tests can kill them.
package natstest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// variable has a server's settings as JSON. It makes a test binary run as a server.
const variable = "STAGECOACH_TEST_NATS"

// settings are those of one server.
type settings struct {
	Name, Dir   string
	Host        string
	Port, Route int
	Routes      []string // addresses of all servers' routes; none: it is alone
	Config      string   // file in Dir, in place of the other settings; empty: none
	Signals     bool     // the server writes its log, and SIGTERM stops it, as with nats-server
}

// Main runs this process as a server if a test has started it as one. Then it does not return. The
// TestMain of each package that uses [Start] calls it first.
func Main() {
	text := os.Getenv(variable)
	if text == "" {
		return
	}
	if err := serve(text); err != nil {
		fmt.Fprintln(os.Stderr, "nats-server:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve(text string) error {
	var is settings
	if err := json.Unmarshal([]byte(text), &is); err != nil {
		return err
	}
	if is.Config != "" {
		return serveConfig(is)
	}
	o := &server.Options{
		ServerName: is.Name, Host: is.Host, Port: is.Port, StoreDir: is.Dir, JetStream: true, JetStreamMaxStore: 1 << 40, NoSigs: true,
		MaxPayload: 8 << 20, NoLog: true,
	}
	if len(is.Routes) > 0 {
		o.Cluster = server.ClusterOpts{Name: "test", Host: is.Host, Port: is.Route}
		for _, at := range is.Routes {
			o.Routes = append(o.Routes, &url.URL{Scheme: "nats", Host: at})
		}
	}
	s, err := server.NewServer(o)
	if err != nil {
		return err
	}
	s.Start()
	s.WaitForShutdown() // the test kills this process
	return nil
}

// serveConfig runs a server as the program nats-server does when it is started in the folder of its
// configuration.
func serveConfig(is settings) error {
	if err := os.Chdir(is.Dir); err != nil {
		return err
	}
	o, err := server.ProcessConfigFile(is.Config)
	if err != nil {
		return err
	}
	o.NoSigs, o.NoLog = !is.Signals, !is.Signals
	s, err := server.NewServer(o)
	if err != nil {
		return err
	}
	if is.Signals {
		s.ConfigureLogger()
	}
	s.Start()
	s.WaitForShutdown() // the test kills this process
	return nil
}

// Program writes a program with the command line of nats-server: nats-server -c FILE.
func Program(t testing.TB, file string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("#!/bin/sh\n%s='{\"Dir\":\".\",\"Config\":\"'\"$2\"'\",\"Signals\":true}' exec %q\n", variable, self)
	if err := os.WriteFile(file, []byte(text), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
}

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// Cluster is a running cluster.
type Cluster struct {
	t       testing.TB
	servers []settings
	hosts   []Host
	running []*exec.Cmd // nil: killed
}

// Start runs n servers until the end of the test. They store their streams in temporary folders.
func Start(t testing.TB, n int) *Cluster {
	t.Helper()
	var dirs []string
	for range n {
		dirs = append(dirs, t.TempDir())
	}
	return StartIn(t, dirs...)
}

// StartIn runs one server per folder until the end of the test. A server stores its streams in its
// folder.
func StartIn(t testing.TB, dirs ...string) *Cluster {
	t.Helper()
	n := len(dirs)
	ports := proctest.Ports(t, 2*n)
	c := &Cluster{t: t}
	for i := range n {
		c.servers = append(c.servers, settings{Dir: dirs[i], Host: "127.0.0.1", Port: ports[i], Route: ports[n+i]})
		c.hosts = append(c.hosts, local)
	}
	c.start()
	return c
}

// Host is where a server runs, such as a machine of netnstest.
type Host struct {
	IP      string
	Dial    func(ctx context.Context, network, address string) (net.Conn, error)
	Command func(program string, args ...string) *exec.Cmd
}

// local is this machine.
var local = Host{
	IP: "127.0.0.1", Dial: (&net.Dialer{}).DialContext,
	Command: func(program string, args ...string) *exec.Cmd {
		return exec.Command(program, args...) //nolint:noctx // the cleanup kills it
	},
}

// StartOn runs one server per host until the end of the test, on the ports that servers have by
// default.
func StartOn(t testing.TB, hosts ...Host) *Cluster {
	t.Helper()
	c := &Cluster{t: t, hosts: hosts}
	for _, h := range hosts {
		c.servers = append(c.servers, settings{Dir: t.TempDir(), Host: h.IP, Port: 4222, Route: 6222})
	}
	c.start()
	return c
}

// StartConfigured runs one server per folder until the end of the test, with the configuration in
// it. ports are those that the servers listen on.
func StartConfigured(t testing.TB, config string, dirs []string, ports []int) *Cluster {
	t.Helper()
	c := &Cluster{t: t}
	for i, dir := range dirs {
		c.hosts = append(c.hosts, local)
		c.servers = append(c.servers, settings{Dir: dir, Host: "127.0.0.1", Port: ports[i], Config: config})
	}
	c.start()
	return c
}

// StartConfiguredOn runs one server per host until the end of the test, with the configuration in
// its folder. The servers listen on the port that servers have by default.
func StartConfiguredOn(t testing.TB, config string, dirs []string, hosts ...Host) *Cluster {
	t.Helper()
	c := &Cluster{t: t, hosts: hosts}
	for i, h := range hosts {
		c.servers = append(c.servers, settings{Dir: dirs[i], Host: h.IP, Port: 4222, Config: config})
	}
	c.start()
	return c
}

// start runs all servers until the end of the test.
func (c *Cluster) start() {
	c.t.Helper()
	n := len(c.servers)
	c.running = make([]*exec.Cmd, n)
	var routes []string
	for _, s := range c.servers {
		routes = append(routes, address(s.Host, s.Route))
	}
	for i := range n {
		s := &c.servers[i]
		if s.Config != "" {
			continue
		}
		s.Name, s.Dir = "n"+strconv.Itoa(i), filepath.Join(s.Dir, "nats")
		if n > 1 {
			s.Routes = routes
		}
	}
	c.t.Cleanup(func() {
		for i := range n {
			c.Kill(i)
		}
	})
	for i := range n {
		c.Run(i)
	}
	for i := range n {
		c.await(i)
	}
}

// URLs returns the addresses of all servers.
func (c *Cluster) URLs() []string {
	var out []string
	for _, s := range c.servers {
		out = append(out, "nats://"+address(s.Host, s.Port))
	}
	return out
}

// String returns the addresses with commas between.
func (c *Cluster) String() string { return strings.Join(c.URLs(), ",") }

// Run starts a server that does not run. It does not wait until the server answers.
func (c *Cluster) Run(i int) {
	c.t.Helper()
	text, err := json.Marshal(c.servers[i])
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := c.hosts[i].Command(os.Args[0])
	cmd.Env = append(os.Environ(), variable+"="+string(text))
	cmd.Stderr = os.Stderr
	if err := proctest.Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	c.running[i] = cmd
}

// await waits until a server takes connections.
func (c *Cluster) await(i int) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		conn, err := c.hosts[i].Dial(context.Background(), "tcp", address(c.servers[i].Host, c.servers[i].Port))
		if err == nil {
			_ = conn.Close()
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatal("a nats-server does not answer: ", err)
		}
	}
}

// Kill kills a server with SIGKILL, if it runs.
func (c *Cluster) Kill(i int) {
	if cmd := c.running[i]; cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		c.running[i] = nil
	}
}

// Pause stops all servers that run, with SIGSTOP, until goOn is called.
func (c *Cluster) Pause() (goOn func()) {
	c.t.Helper()
	signal := func(s syscall.Signal) {
		for _, cmd := range c.running {
			if cmd == nil {
				continue
			}
			if err := cmd.Process.Signal(s); err != nil {
				c.t.Error(err)
			}
		}
	}
	signal(syscall.SIGSTOP)
	return func() { signal(syscall.SIGCONT) }
}

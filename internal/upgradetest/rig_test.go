// Package upgradetest_test upgrades a running cluster from the previous version to this one, and
// back. `make test-upgrade` builds both programs and runs it.
package upgradetest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

func TestMain(m *testing.M) {
	natstest.Main()
	goleak.VerifyTestMain(tests{m})
}

// tests closes the connections that tests keep for each other, before leaks are looked for.
type tests struct{ *testing.M }

func (t tests) Run() int {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	return t.M.Run()
}

// limit bounds waits. Tests normally need a fraction of it.
const limit = 2 * time.Minute

// program is a version of the program.
type program struct{ name, path string }

// versions are the two programs.
type versions struct{ old, new program }

// programs returns both programs. Without `make test-upgrade`, the test is skipped.
func programs(t *testing.T) versions {
	t.Helper()
	old := os.Getenv("STAGECOACH_PREVIOUS")
	if old == "" {
		t.Skip("STAGECOACH_PREVIOUS names no program of the previous version: run make test-upgrade")
	}
	return versions{program{"old", old}, program{"new", proctest.Built(t, "bin", "stagecoach")}}
}

// process is a control plane or a daemon, of one version after the other.
type process struct {
	t     *testing.T
	name  string
	state string
	args  []string
	logs  []*proctest.Buffer // of all its processes
	up    *child.Process     // nil: it does not run
	// Of a control plane. Load uses it while the process is replaced.
	client atomic.Pointer[client.Client]
}

// run starts a process of a version, on the state of the earlier one.
func (p *process) run(program string) {
	p.t.Helper()
	log := &proctest.Buffer{}
	p.logs = append(p.logs, log)
	up, err := child.StartProgram(context.Background(), program, io.MultiWriter(log, p.keep()), p.args...)
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", p.name, err, log)
	}
	p.up = up
	if p.args[0] == "up" {
		api := client.New("http://" + p.up.Addr)
		api.HTTP.Timeout = limit
		p.client.Store(api)
	}
}

// keep returns what keeps the log of the present process in a file of UPGRADE_LOGS, if that is set.
func (p *process) keep() io.Writer {
	dir := os.Getenv("UPGRADE_LOGS")
	if dir == "" {
		return io.Discard
	}
	return appended(filepath.Join(dir, fmt.Sprintf("%s-%s-%d.log", strings.ReplaceAll(p.t.Name(), "/", "-"), p.name, len(p.logs))))
}

// appended is a file that is open only while something is written.
type appended string

func (a appended) Write(b []byte) (int, error) {
	f, err := os.OpenFile(string(a), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	n, err := f.Write(b)
	return n, errors.Join(err, f.Close())
}

// api returns a client of a control plane.
func (p *process) api() *client.Client { return p.client.Load() }

// stop ends the process as an operator does.
func (p *process) stop() {
	p.t.Helper()
	if err := p.up.Stop(); err != nil {
		p.t.Errorf("%s ended with %v, want exit status 0", p.name, err)
	}
	p.up = nil
}

// kill ends a daemon so that its replicas go on.
func (p *process) kill() {
	p.t.Helper()
	if err := p.up.Cmd.Process.Signal(syscall.SIGKILL); err != nil {
		p.t.Error(err)
	}
	<-p.up.Done
	p.up = nil
}

// says waits for a line in the log of the present process.
func (p *process) says(what, pattern string) {
	p.t.Helper()
	is := regexp.MustCompile(pattern)
	proctest.Until(p.t, p.name+": "+what, func() bool { return is.MatchString(p.logs[len(p.logs)-1].String()) })
}

// stands waits until a control plane leads, or knows who leads.
func (p *process) stands() {
	p.t.Helper()
	p.says("to lead or stand by", `this control plane leads|this control plane stands by" holder="\S+ at`)
}

// leads reports whether a control plane leads.
func (p *process) leads() bool {
	if p.up == nil {
		return false
	}
	v, err := p.api().Metric(context.Background(), "stagecoach_control_leading ")
	return err == nil && v == 1
}

// cluster is control planes, daemons and NATS.
type cluster struct {
	t        *testing.T
	program  string // of its first processes
	nats     string // URLs
	controls []*process
	daemons  []*process
}

// add starts a process. It is stopped at the end of the test.
func (c *cluster) add(name string, args ...string) *process {
	c.t.Helper()
	p := &process{t: c.t, name: name, state: c.t.TempDir()}
	// Other tests on this machine use the network that is the default.
	p.args = append(args, "--network-cidr", "10.229.0.0/16", "--state", p.state, "--images", proctest.Built(c.t, "images"), "--ort", proctest.Built(c.t, "ort", "libonnxruntime.so.1"))
	c.t.Cleanup(func() {
		if p.up != nil {
			p.stop()
		}
		p.examine()
	})
	p.run(c.program)
	return p
}

// daemon starts a daemon.
func (c *cluster) daemon(name string, args ...string) {
	c.t.Helper()
	p := c.add(name, append([]string{"keysmanager", "--node", name, "--nats", c.nats, "--memory", "1Gi", "--cpus", "1", "--devices", "none"}, args...)...)
	c.daemons = append(c.daemons, p)
	c.ready(p)
}

// startOutside runs two control planes of one version on three NATS servers, with two daemons.
func startOutside(t *testing.T, program string) *cluster {
	t.Helper()
	c := &cluster{t: t, program: program, nats: natstest.Start(t, 3).String()}
	for _, name := range []string{"a", "b"} {
		p := c.add(name, "up", "--listen", freePort(t), "--nats", c.nats, "--no-node")
		p.stands()
		c.controls = append(c.controls, p)
	}
	c.daemon("left", "--nats-outside")
	c.daemon("right", "--nats-outside")
	return c
}

// startInside runs one control plane with NATS inside, a daemon, and another one that is reached
// over TLS, as on another machine.
func startInside(t *testing.T, program string) *cluster {
	t.Helper()
	at := freePort(t)
	c := &cluster{t: t, program: program, nats: "nats://" + at}
	a := c.add("a", "up", "--listen", freePort(t), "--nats-listen", at, "--no-node")
	c.controls = append(c.controls, a)
	token := filepath.Join(a.state, "nats-token")
	c.daemon("left", "--token", token)
	c.daemon("right", "--token", token, "--listen", freePort(t), "--remote")
	return c
}

// freePort returns an address where nothing listens. A control plane that begins again keeps it.
func freePort(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", proctest.Ports(t, 1)[0])
}

// faults are words in logs that show that the versions do not understand each other.
var faults = regexp.MustCompile(`(?i)panic|data race|unknown field|version \d+, want|cannot unmarshal|invalid character|decod`)

// examine looks for faults in the logs of all processes of p.
func (p *process) examine() {
	for i, log := range p.logs {
		for line := range strings.Lines(log.String()) {
			if faults.MatchString(line) {
				p.t.Errorf("process %d of %s: %s", i+1, p.name, line)
				break // many more of that kind may follow
			}
		}
	}
}

// leader returns the control plane that leads.
func (c *cluster) leader() *process {
	c.t.Helper()
	var leader *process
	proctest.Until(c.t, "a control plane to lead", func() bool {
		time.Sleep(20 * time.Millisecond)
		i := slices.IndexFunc(c.controls, (*process).leads)
		if i >= 0 {
			leader = c.controls[i]
		}
		return i >= 0
	})
	return leader
}

// standby returns the control plane that does not lead.
func (c *cluster) standby() *process {
	if c.leader() == c.controls[0] {
		return c.controls[1]
	}
	return c.controls[0]
}

// ready waits until the leader uses the daemon's present process.
func (c *cluster) ready(d *process) {
	c.t.Helper()
	proctest.Until(c.t, d.name+" to be ready", func() bool {
		time.Sleep(50 * time.Millisecond)
		var all []struct {
			Name, Status string
			PID          int
		}
		if err := c.leader().api().Get(c.t.Context(), "/system/nodes", &all); err != nil {
			return false
		}
		for _, n := range all {
			if n.Name == d.name && n.PID == d.up.Cmd.Process.Pid && n.Status == "ready" {
				return true
			}
		}
		return false
	})
}

// send sends a request to a control plane, and returns the status and the body of the answer.
func (p *process) send(ctx context.Context, method, path, body string, header ...string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, p.api().Base+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "text/plain")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := p.api().HTTP.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// must sends a request that has to succeed, and decodes the answer into v unless that is nil.
func (p *process) must(method, path string, v any, body any) {
	p.t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		p.t.Fatal(err)
	}
	status, got, err := p.send(p.t.Context(), method, path, string(b), "Content-Type", "application/json")
	if err != nil || status/100 != 2 {
		p.t.Fatalf("%s: %s %s: status %d, %v: %s", p.name, method, path, status, err, got)
	}
	if v != nil {
		if err := json.Unmarshal([]byte(got), v); err != nil {
			p.t.Fatalf("%s: %s %s: %v: %s", p.name, method, path, err, got)
		}
	}
}

// Package remote measures a pipeline on nodes of this machine and on nodes that are reached over
// TLS, as those on other machines are.
package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// cluster is an up that is no node, with daemons.
type cluster struct {
	name    string
	far     bool     // its daemons are reached over TLS
	flags   []string // of its daemons
	daemons int
	up      *child.Process
	api     *client.Client
	stops   []func() error
}

// turns is one size of items at one concurrency, on one cluster.
type turns struct {
	on       *cluster
	size, c  int
	rate     []float64 // requests per second, one per round
	p50, p99 []float64 // milliseconds, one per round
	requests int
	bytes    float64 // over TLS, both directions, per request
}

func (t *turns) name() string {
	size := fmt.Sprintf("%dKB", t.size>>10)
	if t.size >= 1<<20 {
		size = fmt.Sprintf("%dMB", t.size>>20)
	}
	return fmt.Sprintf("%s_%s_c%d", t.on.name, size, t.c)
}

// Run measures requests to a pipeline of two stages that do nothing. On the cluster `unix`, both
// stages are on one node of this machine. On the other two, they are on two nodes that are reached
// over TLS over loopback. On `tls`, the second node gets a large item from the first one. So the
// item crosses the control plane's connections twice, and that of the nodes once. On `relay`, it
// goes through the control plane: four times. The cases take turns.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench nodes", flag.ContinueOnError)
	asJSON, images := bench.Flags(fs)
	rounds := fs.Int("rounds", 5, "turns of every case")
	window := fs.Duration("window", 2*time.Second, "of load in a turn")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("nodes", os.Stderr)
	var all []*turns
	clusters := []*cluster{
		{name: "unix", daemons: 1}, {name: "tls", far: true, daemons: 2}, {name: "relay", far: true, daemons: 2, flags: []string{"--items", "0"}},
	}
	for _, c := range clusters {
		defer c.close()
		if err := c.open(ctx, *images); err != nil {
			return fmt.Errorf("cluster %s: %w", c.name, err)
		}
		all = append(all, &turns{on: c, size: 64 << 10, c: 1}, &turns{on: c, size: 64 << 10, c: 8}, &turns{on: c, size: 16 << 20, c: 1}, &turns{on: c, size: 16 << 20, c: 4})
	}
	slices.SortStableFunc(all, func(a, b *turns) int { return a.size*100 + a.c - b.size*100 - b.c })
	for r := range *rounds + 1 { // the first round warms up
		for _, t := range all {
			if err := t.turn(ctx, *window, r > 0); err != nil {
				return err
			}
		}
		console.Progress("bench nodes: round %d of %d", r, *rounds)
	}
	for _, t := range all {
		report.Add(t.name(), "requests_per_second", bench.Median(t.rate), t.requests)
		report.Add(t.name(), "p50_ms", bench.Median(t.p50), t.requests)
		report.Add(t.name(), "p99_ms", bench.Median(t.p99), t.requests)
		report.Add(t.name(), "tls_bytes_per_request", t.bytes, t.requests)
	}
	for _, direct := range all {
		for _, relay := range all {
			if direct.on.name == "tls" && relay.on.name == "relay" && direct.size == relay.size && direct.c == relay.c {
				report.Add(direct.name()+"_over_relay", "rate_ratio", ratio(direct.rate, relay.rate), direct.requests)
				report.Add(direct.name()+"_over_relay", "p50_ratio", ratio(direct.p50, relay.p50), direct.requests)
			}
		}
	}
	return bench.Print(report, *asJSON, out)
}

// ratio returns the median of the ratios of two cases, round by round. Rounds in which no request
// has ended do not count.
func ratio(a, b []float64) float64 {
	var all []float64
	for i := range a {
		if a[i] > 0 && b[i] > 0 {
			all = append(all, a[i]/b[i])
		}
	}
	if len(all) == 0 {
		return 0
	}
	return bench.Median(all)
}

// open starts the cluster and deploys the pipeline.
func (c *cluster) open(ctx context.Context, images string) error {
	images, err := filepath.Abs(images)
	if err != nil {
		return err
	}
	state, err := os.MkdirTemp("", "stagecoach-nodes-")
	if err != nil {
		return err
	}
	c.stops = append(c.stops, func() error { return os.RemoveAll(state) })
	nats, err := freeAddress()
	if err != nil {
		return err
	}
	start := func(args ...string) (*child.Process, error) {
		p, err := child.Start(ctx, os.Stderr, append(args, "--images", images, "--log", "warn")...)
		if err == nil {
			c.stops = append(c.stops, p.Stop)
		}
		return p, err
	}
	if c.up, err = start("up", "--no-node", "--listen", "127.0.0.1:0", "--nats-listen", nats, "--state", filepath.Join(state, "up")); err != nil {
		return err
	}
	c.api = client.New("http://" + c.up.Addr)
	for i := range c.daemons {
		name := c.node(i)
		args := []string{
			"keysmanager", "--node", name, "--nats", "nats://" + nats, "--nats-token", filepath.Join(state, "up", "nats-token"),
			"--state", filepath.Join(state, name), "--memory", "2Gi", "--devices", "none",
		}
		if c.far {
			args = append(args, "--listen", "127.0.0.1:0", "--remote")
		}
		args = append(args, c.flags...)
		if _, err := start(args...); err != nil {
			return err
		}
	}
	return c.deploy(ctx)
}

func (c *cluster) close() {
	for _, stop := range slices.Backward(c.stops) {
		_ = stop() // the report is complete
	}
}

// deploy deploys a pipeline of two stages, and waits until each node has one of them.
func (c *cluster) deploy(ctx context.Context) error {
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	until := func(what string, done func() bool) error {
		for !done() {
			select {
			case <-tick.C:
			case <-limit.Done():
				return fmt.Errorf("waited for %s: %w", what, limit.Err())
			}
		}
		return nil
	}
	inventories := func() (all []node.Inventory) {
		_ = c.api.Get(limit, "/system/nodes", &all) // asked again
		return all
	}
	if err := until("nodes", func() bool { return len(inventories()) == c.daemons }); err != nil {
		return err
	}
	labels := map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"}
	for i := 1; i <= 2; i++ {
		if err := c.steer(ctx, i-1); err != nil {
			return err
		}
		a := map[string]string{"stagecoach.dev/pipeline": "two"}
		if i == 1 {
			a["stagecoach.dev/next"] = "bench-2"
		}
		d := client.Deployment{Service: fmt.Sprintf("bench-%d", i), Image: "stagecoach/noop:0.1.0", Labels: labels, EnvVars: map[string]string{"max_inflight": "16"}, Annotations: a}
		if err := c.api.Deploy(ctx, d); err != nil {
			return err
		}
		if err := until(d.Service, func() bool { return runs(inventories(), d.Service) }); err != nil {
			return err
		}
	}
	link := node.LinkUnix
	if c.far {
		link = node.LinkTLS
	}
	return until("the stages, spread over the nodes", func() bool {
		for _, inv := range inventories() {
			if len(inv.Replicas) != 2/c.daemons || inv.Link != link {
				return false
			}
		}
		return true
	})
}

// steer cordons all daemons but one, so that the next replica starts on that one.
func (c *cluster) steer(ctx context.Context, to int) error {
	for i := range c.daemons {
		word := "cordon"
		if i == to%c.daemons {
			word = "uncordon"
		}
		if err := c.api.Send(ctx, word, http.MethodPost, "/system/nodes/"+c.node(i)+"/"+word, nil); err != nil {
			return err
		}
	}
	return nil
}

// runs reports whether a replica of a function runs.
func runs(all []node.Inventory, function string) bool {
	return slices.ContainsFunc(all, func(inv node.Inventory) bool {
		return slices.ContainsFunc(inv.Replicas, func(r node.Replica) bool { return strings.HasPrefix(r.Function, function+".") })
	})
}

// node returns the name of a daemon.
func (c *cluster) node(i int) string { return fmt.Sprintf("bench-%s-%d", c.name, i) }

// turn sends load for a while.
func (t *turns) turn(ctx context.Context, window time.Duration, counts bool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	before := t.on.carried(ctx)
	var stdout bytes.Buffer
	cmd := exec.CommandContext(ctx, self, "bench", "load", "--client", string(bench.Lean), "--addr", t.on.up.Addr, "--path", "/function/two",
		"--c", strconv.Itoa(t.c), "--duration", window.String(), "--size", strconv.Itoa(t.size))
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("load of %s: %w", t.name(), err)
	}
	var r bench.LoadResult
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		return fmt.Errorf("load of %s: %w", t.name(), err)
	}
	if r.Failed > 0 {
		return fmt.Errorf("%s: %d of %d requests failed: %s", t.name(), r.Failed, r.Requests, r.Cause)
	}
	if counts {
		ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
		t.rate = append(t.rate, float64(r.Requests)/r.Elapsed.Seconds())
		t.p50, t.p99 = append(t.p50, ms(r.P50)), append(t.p99, ms(r.P99))
		t.requests += r.Requests
		t.bytes = (t.on.carried(ctx) - before) / float64(r.Requests)
	}
	return nil
}

// carried returns how many bytes the control plane has sent and received over TLS.
func (c *cluster) carried(ctx context.Context) float64 {
	sum := 0.0
	for _, direction := range []string{"sent", "received"} {
		sample := fmt.Sprintf("stagecoach_tunnel_bytes_total{direction=%q} ", direction)
		v, _ := c.api.Metric(ctx, sample) // 0: unknown
		sum += v
	}
	return sum
}

// freeAddress returns an address where nobody listens.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// Package nodes measures a control plane with many nodes. The nodes start no processes, but they
// speak the node protocol over connections and sockets of their own.
package nodes

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// replicasPerNode is how many replicas are started per node. There are as many functions as nodes.
const replicasPerNode = 5

// joinLimit and readyLimit bound the waits of a run.
const (
	joinLimit  = 3 * time.Minute
	readyLimit = 5 * time.Minute
)

// Run measures control planes with some numbers of nodes. The nodes are in a process of their own,
// so that their CPU time and memory do not count.
func Run(ctx context.Context, adapt func(*node.Client) cluster.Node, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench nodes-scale", flag.ContinueOnError)
	asJSON := fs.Bool("json", false, "print JSON instead of a table")
	counts := fs.String("nodes", "100,300,1000", "numbers of nodes, joined by commas")
	window := fs.Duration("window", 10*time.Second, "of each measurement without changes")
	profile := fs.String("profile", "", "folder for CPU profiles of the control plane; empty: none")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	var sizes []int
	for count := range strings.SplitSeq(*counts, ",") {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			return fmt.Errorf("--nodes: %q, want numbers above 0", *counts)
		}
		sizes = append(sizes, n)
	}
	report := bench.NewReport("nodes-scale", os.Stderr)
	for _, n := range sizes {
		r := &run{report: report, name: fmt.Sprintf("%d_nodes", n), nodes: n, window: *window, profile: *profile}
		if err := r.run(ctx, adapt); err != nil {
			return fmt.Errorf("%d nodes: %w", n, err)
		}
		debug.FreeOSMemory()
	}
	return bench.Print(report, *asJSON, out)
}

// run is one number of nodes.
type run struct {
	report  *bench.Report
	name    string
	nodes   int
	window  time.Duration
	profile string
	plane   *plane
}

func (r *run) run(ctx context.Context, adapt func(*node.Client) cluster.Node) error {
	dir, err := os.MkdirTemp("", "stagecoach-nodes-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	if r.plane, err = openPlane(dir, adapt, log); err != nil {
		return err
	}
	var fleet *child.Process
	defer func() {
		r.plane.close() // while the nodes still answer
		if fleet != nil {
			_ = fleet.Cmd.Process.Kill()
			<-fleet.Done
		}
	}()
	start := time.Now()
	console.Progress("bench nodes-scale: %d nodes join", r.nodes)
	fleet, err = child.Start(ctx, os.Stderr, "bench", "nodes-scale-fleet", "--url", r.plane.nats.URL(), "--token", r.plane.token, "--dir", filepath.Join(dir, "nodes"), "--nodes", strconv.Itoa(r.nodes))
	if err != nil {
		return err
	}
	if err := until(ctx, joinLimit, "join", func() bool { return len(r.plane.directory.Clients()) == r.nodes }); err != nil {
		return fmt.Errorf("%w; %d have joined", err, len(r.plane.directory.Clients()))
	}
	r.report.Add(r.name, "join_s", time.Since(start).Seconds(), r.nodes)
	if err := r.measure(ctx, "idle"); err != nil {
		return err
	}
	if err := r.start(ctx); err != nil {
		return err
	}
	if err := r.measure(ctx, "busy"); err != nil {
		return err
	}
	return r.silence(ctx, fleet.Addr)
}

// start deploys functions, and measures until their replicas are ready.
func (r *run) start(ctx context.Context) error {
	want := replicasPerNode * r.nodes
	console.Progress("bench nodes-scale: %d replicas start", want)
	return r.profiled("start", func() error {
		before, start := r.usage(), time.Now()
		if err := r.plane.deploy(r.nodes, replicasPerNode); err != nil {
			return err
		}
		shares := []float64{0.5, 0.9, 0.99, 1}
		if err := until(ctx, readyLimit, "start", func() bool {
			for len(shares) > 0 && r.plane.ready() >= int(shares[0]*float64(want)) {
				r.report.Add(r.name, fmt.Sprintf("ready_%g_percent_s", 100*shares[0]), time.Since(start).Seconds(), want)
				shares = shares[1:]
			}
			return len(shares) == 0
		}); err != nil {
			return fmt.Errorf("%w; %d are ready", err, r.plane.ready())
		}
		used := r.usage().since(before)
		r.report.Add(r.name, "start_cpu_s", used.cpu.Seconds(), 1)
		r.report.Add(r.name, "start_messages_per_replica", float64(used.messages)/float64(want), want)
		return nil
	})
}

// measure measures the plane while nothing changes.
func (r *run) measure(ctx context.Context, state string) error {
	console.Progress("bench nodes-scale: %s for %v", state, r.window)
	if err := until(ctx, r.window+time.Second, "", func() bool { return false }); ctx.Err() != nil {
		return err // the first seconds after a change do not count
	}
	return r.profiled(state, func() error {
		r.plane.ticks.take()
		before := r.usage()
		select {
		case <-time.After(r.window):
		case <-ctx.Done():
			return ctx.Err()
		}
		used := r.usage().since(before)
		secs := r.window.Seconds()
		add := func(metric string, value float64, n int) { r.report.Add(r.name, state+"_"+metric, value, n) }
		add("announcements_per_s", float64(used.announcements)/secs, int(used.announcements))
		add("announcement_bytes", float64(used.bytes)/float64(max(used.announcements, 1)), int(used.announcements))
		add("messages_per_s", float64(used.messages)/secs, int(used.messages))
		add("cpu_percent", 100*used.cpu.Seconds()/secs, 1)
		add("allocated_mb_per_s", float64(used.allocated)/1e6/secs, 1)
		observe, decide, apply := r.plane.ticks.take()
		for part, took := range map[string][]time.Duration{"observe": observe, "decide": decide, "apply": apply} {
			r.report.AddMillis(r.name, state+"_"+part+"_p50_ms", took, 0.5)
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		add("heap_mb", float64(m.HeapAlloc)/1e6, 1)
		add("memory_mb", float64(resident())/1e6, 1)
		add("goroutines", float64(runtime.NumGoroutine()), 1)
		return nil
	})
}

// silence cuts off one node in ten, and measures until the plane has seen that.
func (r *run) silence(ctx context.Context, fleet string) error {
	count := max(r.nodes/10, 1)
	console.Progress("bench nodes-scale: %d nodes fall silent", count)
	return r.profiled("silence", func() error {
		start := time.Now()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+fleet+"/silence?count="+strconv.Itoa(count), nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		_ = resp.Body.Close() // it is empty
		if err := until(ctx, time.Minute, "silence", func() bool { n, _ := r.plane.silent(start); return n >= count }); err != nil {
			return err
		}
		_, last := r.plane.silent(start)
		r.report.Add(r.name, "silence_seen_s", last.Sub(start).Seconds(), count)
		if n := len(r.plane.directory.Clients()); n != r.nodes-count {
			r.report.Note(r.name, fmt.Sprintf("%d nodes left though they were not silent", r.nodes-count-n))
		}
		return nil
	})
}

// profiled calls f, with a CPU profile if one is asked for.
func (r *run) profiled(state string, f func() error) error {
	if r.profile == "" {
		return f()
	}
	file, err := os.Create(filepath.Join(r.profile, r.name+"-"+state+".pprof"))
	if err != nil {
		return err
	}
	defer file.Close()
	if err := pprof.StartCPUProfile(file); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	return f()
}

// RunFleet runs nodes in this process until ctx ends. A request to /silence cuts some of them off.
func RunFleet(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench nodes-scale-fleet", flag.ContinueOnError)
	url := fs.String("url", "", "of the control plane's NATS")
	token := fs.String("token", "", "keys of NATS, as text")
	dir := fs.String("dir", "", "for the nodes' sockets")
	count := fs.Int("nodes", 0, "that join")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	f, err := openFleet(*url, *token, *dir, *count, log)
	if err != nil {
		return err
	}
	defer f.close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /silence", func(_ http.ResponseWriter, req *http.Request) {
		n, _ := strconv.Atoi(req.FormValue("count")) // a fault means none
		f.silence(n)
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }() // ends when server is closed
	defer server.Close()
	fmt.Fprintln(out, child.Listening+l.Addr().String())
	<-ctx.Done()
	return nil
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/cli"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// profiled is an up with the function spin, which uses 10 ms of a core per call, in one replica
// that may use one core.
type profiled struct {
	*client.Client
	t   *testing.T
	up  *up
	url string
	pid int
}

func newProfiled(t *testing.T) *profiled {
	t.Helper()
	needGroups(t)
	cfg, log, err := upConfig([]string{"--listen", "127.0.0.1:0", "--state", t.TempDir(), "--images", proctest.Built(t, "images"), "--log", "error"})
	if err != nil {
		t.Fatal(err)
	}
	u, err := newUp(t.Context(), cfg, log)
	t.Cleanup(func() {
		if err := u.close(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(u.handler)
	t.Cleanup(server.Close)
	p := &profiled{client.New(server.URL), t, u, server.URL, 0}
	d := fn{"spin", "spin", map[string]string{"min": "2"}, map[string]string{"batch": "4", "example": "x"}, map[string]string{"spin_base": "10ms", "spin_call": "0ms"}}.deployment()
	d.Limits = &client.Resources{CPU: "1"}
	if err := p.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	return p
}

// replicas waits until there are this many, each with a quota.
func (p *profiled) replicas(n, milli int) {
	p.t.Helper()
	proctest.Until(p.t, fmt.Sprintf("%d replicas with %dm each", n, milli), func() bool { return p.has(n, milli) })
}

// has reports whether there are this many, each with a quota.
func (p *profiled) has(n, milli int) bool {
	all := p.up.nodes.Inventories()[0].Replicas
	for _, r := range all {
		if got, err := quotaOf(r.PID); err != nil || got != milli {
			return false
		}
	}
	return len(all) == n && len(p.up.local.Replicas(pipeline.ParseKey("spin.openfaas-fn"))) == n
}

// run is the command in this process, for it to be interrupted.
func (p *profiled) run(ctx context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	err := run(ctx, append([]string{"profile", "--gateway", p.url}, args...), &out)
	return out.String(), err
}

// TestItemsOfAProfile checks the header X-Items of calls that measure a function. A stage of a
// pipeline gets lists of items, as in the pipeline, unless it declares items. Calls to a function
// in no pipeline have no X-Items.
func TestItemsOfAProfile(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(
		fn{"first", "noop", nil, map[string]string{"pipeline": "both", "next": "second"}, nil},
		fn{"second", "noop", nil, map[string]string{"pipeline": "both", "items": "one"}, nil},
		fn{"alone", "noop", nil, nil, nil},
	)
	for name, want := range map[string]string{"first": "many", "second": "", "alone": ""} {
		if got, err := cli.ProfileItems(t.Context(), r.Client, "/system/function/"+name); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
}

// TestProfileCommand measures a real stage whose time depends on its CPU quota. A higher quota must
// give a shorter time, and batches must have the requested size. The profile is stored and reaches
// policies. Afterwards, the function runs as before.
func TestProfileCommand(t *testing.T) {
	t.Parallel()
	p := newProfiled(t)
	p.replicas(2, 1000)
	svg := filepath.Join(t.TempDir(), "chart.svg")
	if out, err := p.run(t.Context(), "spin", "--show"); err == nil || !strings.Contains(err.Error(), "has no profile") {
		t.Errorf("before: %q, %v, want that there is none", out, err)
	}
	out, err := p.run(t.Context(), "spin", "--cpu", "50m,1", "--batch", "1,2", "--most", "10", "--chart", svg)
	if err != nil {
		t.Fatal(err)
	}
	p.replicas(2, 1000)
	var got profile.Profile
	if text, err := p.run(t.Context(), "spin", "--show", "--json"); err != nil || json.Unmarshal([]byte(text), &got) != nil {
		t.Fatalf("%q, %v", text, err)
	}
	means := map[profile.Cell]float64{}
	for _, pt := range got.Points {
		means[pt.Cell] = pt.Mean
		if pt.Err < 0 || pt.N < profile.Least {
			t.Errorf("point %+v", pt)
		}
	}
	for batch := 1; batch <= 2; batch++ {
		slow, fast := means[profile.Cell{CPUMilli: 50, Batch: batch}], means[profile.Cell{CPUMilli: 1000, Batch: batch}]
		if !(slow > fast && fast >= 0.010) {
			t.Errorf("batches of %d: %.3g s with 50m, %.3g s with 1000m, want the first longer, and 10 ms of a core at least: %s", batch, slow, fast, out)
		}
	}
	for _, want := range []string{"spin.openfaas-fn, image stagecoach/spin:0.1.0, on node ", "CPU    BATCH", "\n50m    1 ", "\n1000m  2 "} {
		if !strings.Contains(out, want) {
			t.Errorf("printed %q, want %q in it", out, want)
		}
	}
	if b, err := os.ReadFile(svg); err != nil || bytes.Count(b, []byte("<polyline")) != 2 {
		t.Errorf("%v, a chart of %d bytes, want one with a line a batch size", err, len(b))
	}
	s, err := p.up.local.Observe(t.Context())
	if err != nil || len(s.Functions[0].Profile) != 4 || s.Functions[0].Profile[0].CPUMilli != 50 {
		t.Errorf("policies see %+v, %v, want the four points", s.Functions[0].Profile, err)
	}
	if f := s.Functions[0]; f.Demand.Known || f.Service.Known || f.Wait.Known {
		t.Errorf("policies see what was measured as demand %+v, service %+v, waits %+v", f.Demand, f.Service, f.Wait)
	}
	for args, want := range map[string]string{
		"spin --batch 9": "at most 4", "spin --cpu 100000": "--cpu 100000000m, want 10m to", "nobody": "no function", "spin --input /nobody": "no such file",
		"spin --relative 0": "above 0 and below 1", "spin --cpu x": `"x", want numbers above 0`, "spin --input 0=x": "LENGTH=FILE", "spin --most 3": "at least 10",
	} {
		if _, err := p.run(t.Context(), strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	p.replicas(2, 1000)
	d := fn{"spin", "noop", nil, nil, nil}.deployment()
	if err := p.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if out, err := p.run(t.Context(), "spin", "--show"); err != nil || !strings.Contains(out, "\nstale: ") {
		t.Errorf("of another image: %q, %v, want it to be stale", out, err)
	}
	if _, err := p.run(t.Context(), "spin"); err == nil || !strings.Contains(err.Error(), "want --input FILE, or an annotation stagecoach.dev/example") {
		t.Errorf("without an input: %v, want what to do", err)
	}
}

// TestProfileLetsGo checks that an interrupted measurement releases the function, and that a killed
// one loses it soon after.
func TestProfileLetsGo(t *testing.T) {
	t.Parallel()
	p := newProfiled(t)
	p.replicas(2, 1000)
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := p.run(ctx, "spin", "--cpu", "60m")
		ended <- err
	}()
	p.replicas(1, 60)
	if _, err := p.run(t.Context(), "spin", "--cpu", "70m"); err == nil || !strings.Contains(err.Error(), "status 409") {
		t.Errorf("a second one: %v, want that the first has it", err)
	}
	var s struct{ Annotations map[string]string }
	var x schema.Explanation
	if err := p.Get(t.Context(), "/system/pipelines/spin/explain", &x); err != nil || !slices.ContainsFunc(x.Notes, func(n string) bool {
		return strings.HasPrefix(n, "spin: held at one replica to be measured")
	}) {
		t.Errorf("explained: %v, %v", x.Notes, err)
	}
	if err := p.Get(t.Context(), "/system/function/spin", &s); err != nil || !strings.Contains(s.Annotations["stagecoach.dev/status"], "held at one replica to be measured") {
		t.Errorf("%v, annotations %q, want the status to say what goes on", err, s.Annotations)
	}
	interrupt()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), context.Canceled.Error()) {
		t.Errorf("interrupted: %v", err)
	}
	if until, ok := p.up.local.PinnedUntil(pipeline.ParseKey("spin.openfaas-fn")); ok {
		t.Errorf("interrupted, it is held until %v, want it to be let go at once", until)
	}
	p.replicas(2, 1000)
	if err := p.Get(t.Context(), "/system/function/spin/profile", new(profile.Profile)); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v, want that nothing is stored", err)
	}

	order := map[string]any{"holder": "who dies", "cpuMilli": 80, "seconds": 30}
	pin := func() error { return p.Send(t.Context(), "pin", http.MethodPut, "/system/function/spin/pin", order) }
	proctest.Until(t, "one replica with 80m", func() bool { return pin() == nil && p.has(1, 80) })
	order["seconds"] = 1
	if err := pin(); err != nil {
		t.Fatal(err)
	}
	p.replicas(2, 1000)
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/stagecoach-serving/stagecoach/internal/otlptest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// three is a pipeline of three stages, of which the second holds a slot for a while.
func three() []fn {
	slow := waitFn("hold", "150ms", map[string]string{"max": "2"}, map[string]string{"pipeline": "three", "next": "last"})
	return []fn{
		{"first", "noop", nil, map[string]string{"pipeline": "three", "next": "hold", "slo": "5s"}, nil},
		slow,
		{"last", "noop", nil, map[string]string{"pipeline": "three"}, nil},
	}
}

// traced runs up with a collector.
func traced(t *testing.T) (*rig, *otlptest.Receiver) {
	t.Helper()
	flags, collector := collected(t)
	return start(t, append(flags, "--nats-listen", "127.0.0.1:0")...), collector
}

// collected starts a collector and returns the flags with which up sends its spans there.
func collected(t *testing.T) (flags []string, collector *otlptest.Receiver) {
	t.Helper()
	collector = otlptest.Start(t)
	config := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(config, []byte("telemetry: {otlp: "+collector.URL+"}\nlog: {level: debug, format: json}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--config", config}, collector
}

// trace waits for a trace with a span of this name and returns its spans by name.
func (r *rig) trace(c *otlptest.Receiver, id, root string) map[string]otlptest.Span {
	r.t.Helper()
	all := map[string]otlptest.Span{}
	r.until(soon, "the trace "+id, func() bool {
		for _, s := range c.Spans() {
			if s.Trace == id {
				all[s.Name] = s
			}
		}
		_, ok := all[root]
		return ok
	})
	return all
}

// TestTracesHaveASpanPerCall sends traced requests through three stages and checks the spans at a
// collector. The requests are a good one, one whose replica is killed, one past its deadline, and
// an async one.
func TestTracesHaveASpanPerCall(t *testing.T) {
	t.Parallel()
	r, collector := traced(t)
	r.deployAll(three()...)
	const id = "0af7651916cd43dd8448eb211c80319c"
	parent := func(last string) string { return id[:31] + last + "-b7ad6b7169203331-01" }
	a := r.must(http.StatusOK, http.MethodPost, "/function/three", "x", "Traceparent", "00-"+parent("1"), "Tracestate", "vendor=1")
	spans := r.trace(collector, id[:31]+"1", "POST /function/three")
	root := spans["POST /function/three"]
	if root.Parent != "b7ad6b7169203331" || root.State != "vendor=1" || root.Attributes["stagecoach.call"] != a.Header.Get("X-Call-Id") || root.Error != "" || root.Kind != "SPAN_KIND_SERVER" {
		t.Errorf("root %+v", root)
	}
	before := root.Start
	for _, stage := range []string{"first", "hold", "last"} {
		s, ok := spans["call "+stage]
		if !ok || s.Parent != root.ID || s.Start.Before(before) || s.End.After(root.End) || !strings.HasPrefix(s.Attributes["stagecoach.replica"], stage+"-") || s.Attributes["stagecoach.batch.size"] != "1" {
			t.Errorf("call %s %t: %+v, want it below the root and after the stage before", stage, ok, s)
		}
		before = s.End
	}
	// The map has the last span of each name.
	if s := spans["inference"]; s.Parent != spans["call last"].ID {
		t.Errorf("inference %+v, want it below its call", s)
	}
	hold := time.Duration(0)
	for _, s := range collector.Spans() {
		if s.Name == "inference" && s.Parent == spans["call hold"].ID {
			hold = s.End.Sub(s.Start)
		}
	}
	if hold < 150*time.Millisecond || hold > spans["call hold"].End.Sub(spans["call hold"].Start) {
		t.Errorf("the second stage's inference took %v, want 150 ms at least and no longer than its call", hold)
	}

	// The replica takes the request, and is killed before it can answer.
	for _, pid := range r.pids("wait", false) {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	killed := make(chan client.Answer, 1)
	go func() {
		killed <- r.send(http.MethodPost, "/function/three", "x", "Traceparent", "00-"+parent("2"))
	}()
	r.until(soon, "the request to be in its second stage", func() bool { return r.line("hold").Running == 1 })
	for _, pid := range r.pids("wait", false) {
		kill9(t, pid)
	}
	<-killed
	r.trace(collector, id[:31]+"2", "POST /function/three")
	var outcomes []string
	linked := false
	starts := map[string]bool{}
	for _, s := range collector.Spans() {
		if s.Trace == id[:31]+"2" && s.Name == "call hold" {
			outcomes = append(outcomes, s.Attributes["stagecoach.outcome"]+" "+s.Attributes["stagecoach.attempt"])
		}
		if s.Name == "replica start" && s.Error == "" {
			starts[s.ID] = true
		}
	}
	for _, s := range collector.Spans() {
		linked = linked || s.Name == "queue" && len(s.Links) == 1 && starts[s.Links[0]]
	}
	if !slices.Equal(outcomes, []string{"replica lost 1", "ok 2"}) {
		t.Errorf("attempts of the second stage %q, want one that lost its replica, then a good one", outcomes)
	}
	if !linked {
		t.Errorf("no wait is linked to one of %d starts", len(starts))
	}

	stopped := r.pids("wait", false)
	for _, pid := range stopped {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/three", "x", "Traceparent", "00-"+parent("3"), "X-Timeout", "3s")
	for _, pid := range stopped {
		_ = syscall.Kill(pid, syscall.SIGCONT) // it may have been given up
	}
	spans = r.trace(collector, id[:31]+"3", "POST /function/three")
	if e := spans["POST /function/three"].Error; !strings.Contains(e, "deadline") || spans["call hold"].Error == "" {
		t.Errorf("root's error %q, the call's %q, want the deadline", e, spans["call hold"].Error)
	}

	r.must(http.StatusAccepted, http.MethodPost, "/async-function/first", "x", "Traceparent", "00-"+parent("4"))
	spans = r.trace(collector, id[:31]+"4", "run first")
	if accept := spans["POST /async-function/first"]; accept.Parent != "b7ad6b7169203331" || spans["run first"].Parent != accept.ID || spans["call first"].Parent != spans["run first"].ID {
		t.Errorf("async spans %+v, want accept, run below it, the call below that", spans)
	}

	callID := a.Header.Get("X-Call-Id")
	found := false
	for line := range strings.Lines(r.log.String()) {
		var l struct{ Msg, Level, Call, Function, Trace string }
		if strings.Contains(line, callID) && json.Unmarshal([]byte(line), &l) == nil && l.Msg == "request" {
			found = l.Level == "DEBUG" && l.Call == callID && l.Function == "three.openfaas-fn" && l.Trace == id[:31]+"1"
		}
	}
	if !found {
		t.Errorf("no line of call %s in the log, in JSON, with its function and trace", callID)
	}
}

// TestEventStreamContinuesAfterAReconnect reads the event stream while a function is deployed,
// called, killed and removed, and reconnects after a while.
func TestEventStreamContinuesAfterAReconnect(t *testing.T) {
	t.Parallel()
	r := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), late)
	defer cancel()
	kinds := make(chan string, 1000)
	listen := func(query, after string) (stop func()) {
		ctx, leave := context.WithCancel(ctx)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.Base+"/system/events?"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Last-Event-ID", after)
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
			t.Fatalf("events: %v, %v", resp, err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer resp.Body.Close()
			for s := bufio.NewScanner(resp.Body); s.Scan(); {
				if kind, ok := strings.CutPrefix(s.Text(), "event: "); ok {
					kinds <- kind
				}
			}
		}()
		return func() { leave(); <-done }
	}
	want := func(all ...string) {
		t.Helper()
		for _, kind := range all {
			for got := ""; got != kind; {
				select {
				case got = <-kinds:
				case <-time.After(soon):
					t.Fatalf("no event %s", kind)
				}
			}
		}
	}
	stop := listen("function=watched", "")
	r.deployAll(waitFn("watched", "10ms", map[string]string{"max": "2"}, nil))
	r.deployAll(waitFn("other", "10ms", map[string]string{"min": "0", "zero": "true"}, nil))
	want("function.deployed", "replica.ordered", "replica.started", "replica.ready")
	r.must(http.StatusOK, http.MethodPost, "/function/watched", "x")
	want("replica.first-answer")
	kill9(t, r.pids("wait", false)[0])
	want("replica.lost", "replica.ready")
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"watched"}`)
	want("function.removed")
	stop()

	for len(kinds) > 0 {
		<-kinds
	}
	defer listen("function=watched", "earlier-1")()
	want("function.deployed", "function.scaled", "replica.lost", "function.removed")

	var out strings.Builder
	if err := run(t.Context(), []string{"top", "--once", "--gateway", r.Base}, &out); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"PIPELINE", "FUNCTION", "other", "NODE", "EVENT", "function.removed"} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("top --once: want %q in\n%s", part, out.String())
		}
	}
	out.Reset()
	if err := run(t.Context(), []string{"top", "--json", "--gateway", r.Base}, &out); err != nil {
		t.Fatal(err)
	}
	var v schema.Top
	if err := json.Unmarshal([]byte(out.String()), &v); err != nil || len(v.Functions) != 1 || len(v.Nodes) != 1 || len(v.Pipelines) == 0 || v.Pipelines[0].Rate == 0 {
		t.Logf("the answers may have left the window: %v, %+v", err, v)
		if err != nil || len(v.Functions) != 1 || len(v.Nodes) != 1 {
			t.Errorf("top --json: %v: %s", err, out.String())
		}
	}
	for _, e := range v.Events {
		if e.Kind == "function.scaled" && *e.From == *e.To {
			t.Errorf("%s was scaled from %d to %d", e.Function, *e.From, *e.To)
		}
	}
}

// official are names that OpenFaaS has chosen, which the linter would not.
var official = []string{"gateway_function_invocation_started", "gateway_service_count"}

// TestMetricsAreDocumented scrapes up after some traffic. docs/metrics.md must have each metric
// with its type and labels, and no other. The names must follow the conventions of Prometheus.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	r, _ := traced(t)
	functions := three()
	functions[0].labels = map[string]string{"type": "rps"}
	functions[2].labels = map[string]string{"type": "cpu", "target": "1000"}
	r.deployAll(functions...)
	if err := r.Deploy(t.Context(), client.Deployment{Service: "other-first", Image: "stagecoach/noop:0.1.0", Annotations: map[string]string{"stagecoach.dev/variant-of": "first"}}); err != nil {
		t.Fatal(err)
	}
	for range 5 { // arrivals are known from the fifth on
		r.must(http.StatusOK, http.MethodPost, "/function/three", "x")
	}
	exported := map[string]string{} // TYPE by name
	var a client.Answer
	r.until(soon, "a replica to be lost and another one ready, an async request to wait, and spans to be sent", func() bool {
		// These exist while an async request is pending.
		if exported["stagecoach_async_pending"] == "" || exported["stagecoach_async_in_work"] == "" {
			r.must(http.StatusAccepted, http.MethodPost, "/async-function/hold", "x")
		}
		for _, pid := range r.pids("wait", false) {
			kill9(t, pid)
		}
		a = r.must(http.StatusOK, http.MethodGet, "/metrics", "")
		for line := range strings.Lines(string(a.Body)) {
			if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" {
				exported[f[2]] = f[3]
			}
		}
		return strings.Contains(string(a.Body), `dispatch_replicas_lost_total{function="hold`) && strings.Contains(string(a.Body), "telemetry_spans_total") &&
			strings.Contains(string(a.Body), "replica_ends_total") && strings.Contains(string(a.Body), `cluster_target_load{function="last`) &&
			strings.Contains(string(a.Body), `cluster_target_load{function="first`) && exported["stagecoach_async_pending"] != "" && exported["stagecoach_async_in_work"] != ""
	})

	documented := documentedMetrics(t)
	for name, kind := range exported {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue // client_golang's own
		}
		if d, ok := documented[name]; !ok || d.kind != kind {
			t.Errorf("%s is a %s, docs/metrics.md says %q", name, kind, d.kind)
			continue
		}
		for line := range strings.Lines(string(a.Body)) {
			labels, ok := strings.CutPrefix(strings.Replace(line, "_bucket{", "{", 1), name+"{")
			if ok {
				for label := range strings.SplitSeq(labels[:strings.LastIndexByte(labels, '}')], `",`) {
					label, _, _ = strings.Cut(label, "=")
					if label != "le" && !slices.Contains(documented[name].labels, label) {
						t.Errorf("%s has the label %s, docs/metrics.md says %v", name, label, documented[name].labels)
					}
				}
			}
		}
	}
	for name := range documented {
		// A coordinator may cancel before the task expires.
		if exported[name] == "" && name != "stagecoach_dispatch_expired_total" &&
			name != "stagecoach_dispatch_dropped_total" && // no policy drops a task here
			name != "stagecoach_control_record_dropped_total" && // of a record that could not be written
			name != "stagecoach_model_error_ratio" && // TestLoopComparesPredictions looks at it
			!strings.HasPrefix(name, "stagecoach_items_") && // TestItemMetricsAreDocumented looks at them
			!strings.HasPrefix(name, "stagecoach_device_") { // TestDeviceMetrics looks at them
			t.Errorf("docs/metrics.md has %s, which is not there", name)
		}
	}
	problems, err := promlint.New(strings.NewReader(string(a.Body))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if !slices.Contains(official, p.Metric) {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

type documentedMetric struct {
	kind   string
	labels []string
}

// documentedMetrics reads the tables of docs/metrics.md: name, type, labels, meaning.
func documentedMetrics(t *testing.T) map[string]documentedMetric {
	t.Helper()
	b, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]documentedMetric{}
	for line := range strings.Lines(string(b)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			continue
		}
		d := documentedMetric{kind: strings.TrimSpace(cells[2])}
		for label := range strings.SplitSeq(cells[3], ",") {
			d.labels = append(d.labels, strings.Trim(label, " `"))
		}
		out[strings.Trim(cells[1], " `")] = d
		if strings.TrimSpace(cells[4]) == "" {
			t.Error(fmt.Sprint(cells[1], " has no meaning"))
		}
	}
	return out
}

package telemetry

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/otlptest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

var t0 = time.Unix(1_000_000, 0)

func at(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }

// open returns a Tracer that the test closes.
func open(t *testing.T, endpoint string) *Tracer {
	t.Helper()
	tr, err := Open(t.Context(), Config{Endpoint: endpoint, Version: "v1", Node: "n1", Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func shut(t *testing.T, tr *Tracer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := tr.Close(ctx); err != nil {
		t.Error(err)
	}
}

// TestTracingIsOffByDefault checks that tracing is off by default, and if the standard's variables
// say so.
func TestTracingIsOffByDefault(t *testing.T) {
	for name, env := range map[string][2]string{
		"nothing is set":   {},
		"the SDK is off":   {"OTEL_SDK_DISABLED", "true"},
		"the exporter is ": {"OTEL_TRACES_EXPORTER", "none"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
			if env[0] != "" {
				t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
				t.Setenv(env[0], env[1])
			}
			if tr := open(t, ""); tr != nil {
				t.Error("a tracer, want none")
			}
		})
	}
}

// TestSpansOfARequestFormATree ends a request with two attempts on a replica that had to be
// started, and checks the spans at the collector.
func TestSpansOfARequestFormATree(t *testing.T) {
	r := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", r.URL)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
	tr := open(t, "")
	step := func(ms int, kind, path string, phases ...node.Phase) {
		tr.Replica(ReplicaEvent{At: at(ms), Function: "f.openfaas-fn", Replica: "f-1", Node: "n1", Kind: kind, Path: path, Phases: phases, Cause: "why"})
	}
	s := tr.Begin(at(0), client, "vendor=1")
	parent, recorded := s.Context()
	if !recorded || !strings.HasPrefix(parent, client[:36]) || parent == client || !strings.HasSuffix(parent, "-01") {
		t.Fatalf("context %q, recorded %t, want a span of its own in the client's trace", parent, recorded)
	}
	step(12, "ordered", "")
	step(30, "started", "cold", node.Phase{Name: "load", Took: 14 * time.Millisecond}, node.Phase{Name: "fork", Took: 4 * time.Millisecond})
	step(40, "ready", "", node.Phase{Name: "place", Took: 5 * time.Millisecond})
	s.End(task.Ended{
		CallID: "id", Target: "f.openfaas-fn", Method: "POST", Path: "/", Status: 200, Start: at(0), End: at(70),
		Calls: []task.Timing{
			{Stage: "f", Function: "f.openfaas-fn", Task: 1, Attempt: 1, Code: task.ReplicaLost, Message: "killed", Replica: "f-0", Start: at(1), End: at(10), Wait: time.Millisecond},
			{Stage: "f", Function: "f.openfaas-fn", Task: 1, Attempt: 2, Replica: "f-1", Batch: 3, BatchSize: 2, Start: at(10), End: at(61), Wait: 31 * time.Millisecond, Service: 19 * time.Millisecond},
			{Stage: "f", Function: "f.openfaas-fn", Task: 2, Attempt: 1, Code: task.Dropped, Replica: "f-1", Variant: "small.openfaas-fn", Start: at(50), End: at(60), Wait: 3 * time.Millisecond},
		},
	})
	step(80, "lost", "")
	shut(t, tr)

	spans := map[string]otlptest.Span{}
	for _, s := range r.Spans() {
		name := s.Name
		if a := s.Attributes["stagecoach.attempt"]; a != "" {
			name += " " + a
		}
		switch {
		case name == "queue" && s.Start.Equal(at(1)):
			name = "first queue"
		case name == "queue" && s.Start.Equal(at(50)):
			name = "last queue"
		case s.Attributes["stagecoach.task"] == "2":
			name = "second call"
		}
		spans[name] = s
	}
	want := []struct {
		name, parent string
		start, end   int
	}{
		{"POST /function/f", "", 0, 70},
		{"call f 1", "POST /function/f", 1, 10},
		{"first queue", "call f 1", 1, 2},
		{"call f 2", "POST /function/f", 10, 61},
		{"queue", "call f 2", 10, 41},
		{"inference", "call f 2", 42, 61},
		{"second call", "POST /function/f", 50, 60},
		{"last queue", "second call", 50, 53},
		{"replica start", "", 12, 40},
		{"load", "replica start", 12, 26},
		{"fork", "replica start", 26, 30},
		{"place", "replica start", 35, 40},
	}
	if len(spans) != len(want) {
		t.Errorf("%d spans, want %d: %v", len(spans), len(want), spans)
	}
	for _, w := range want {
		s, ok := spans[w.name]
		if !ok || !s.Start.Equal(at(w.start)) || !s.End.Equal(at(w.end)) {
			t.Errorf("%s: there %t, from %v to %v, want %d to %d ms", w.name, ok, s.Start.Sub(t0), s.End.Sub(t0), w.start, w.end)
		}
		if w.parent != "" && (s.Parent != spans[w.parent].ID || s.Trace != spans[w.parent].Trace) {
			t.Errorf("%s: parent %s, want %s of %s", w.name, s.Parent, spans[w.parent].ID, w.parent)
		}
	}
	root := spans["POST /function/f"]
	if root.Trace != client[3:35] || root.Parent != client[36:52] || root.ID != parent[36:52] || root.State != "vendor=1" || root.Attributes["http.response.status_code"] != "200" {
		t.Errorf("root %+v, want one below the client's span, with its tracestate", root)
	}
	if root.Resource["service.name"] != "stagecoach" || root.Resource["deployment.environment"] != "test" || root.Resource["host.name"] != "n1" {
		t.Errorf("resource %v", root.Resource)
	}
	second := spans["call f 2"]
	if id := task.CallParent(parent, 1, 2)[36:52]; second.ID != id || second.Attributes["stagecoach.batch.size"] != "2" || second.Attributes["stagecoach.replica"] != "f-1" || second.Error != "" {
		t.Errorf("second attempt %+v, want id %s, which the function has", second, id)
	}
	if e := spans["call f 1"]; e.Error != "killed" || e.Attributes["stagecoach.outcome"] != "replica lost" {
		t.Errorf("first attempt %+v, want an error", e)
	}
	if a := spans["second call"].Attributes; a["stagecoach.outcome"] != "dropped" || a["stagecoach.variant"] != "small.openfaas-fn" || second.Attributes["stagecoach.variant"] != "" {
		t.Errorf("second call %v, want it dropped by its variant", a)
	}
	if l := spans["queue"].Links; len(l) != 1 || l[0] != spans["replica start"].ID || len(spans["first queue"].Links)+len(spans["last queue"].Links) != 0 {
		t.Errorf("links %v, want one to the start that it waited for", l)
	}
	if spans["replica start"].Error != "" || spans["replica start"].Trace == root.Trace {
		t.Errorf("start %+v, want a trace of its own", spans["replica start"])
	}
}

// TestUnsampledRequestHasNoSpans checks that a request that the client does not sample has no
// spans, and that its functions are told so.
func TestUnsampledRequestHasNoSpans(t *testing.T) {
	r := otlptest.Start(t)
	tr := open(t, r.URL)
	not := strings.TrimSuffix(client, "01") + "00"
	s := tr.Begin(at(0), not, "")
	if parent, recorded := s.Context(); recorded || !strings.HasPrefix(parent, not[:36]) || !strings.HasSuffix(parent, "-00") {
		t.Errorf("context %q, recorded %t, want the client's trace, not recorded", parent, recorded)
	}
	s.End(task.Ended{Status: 200, Start: at(0), End: at(1)})
	shut(t, tr)
	if got := r.Spans(); len(got) > 0 {
		t.Errorf("%v, want no spans", got)
	}

	t.Setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
	tr = open(t, r.URL)
	recorded := 0
	for range 1000 {
		if _, yes := tr.Begin(at(0), "", "").Context(); yes {
			recorded++
		}
	}
	shut(t, tr)
	if recorded < 150 || recorded > 350 {
		t.Errorf("%d of 1000 recorded, want about 250", recorded)
	}
}

// TestMissingCollectorDelaysNobody checks that a missing collector costs only spans: nobody waits,
// dropped spans are counted, and Close ends by its deadline.
func TestMissingCollectorDelaysNobody(t *testing.T) {
	r := otlptest.Start(t)
	r.Refuse(http.StatusServiceUnavailable)
	tr := open(t, r.URL)
	many := make([]task.Timing, 2*callsTraced)
	end := func() {
		tr.Begin(at(0), "", "").End(task.Ended{Target: "f.openfaas-fn", Status: 200, Start: at(0), End: at(1), Calls: many})
	}
	end()
	for testutil.ToFloat64(tr.dropped) == 0 { // the first export is being retried meanwhile
		end()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	_ = tr.Close(ctx) // it may return an error because it was cut short
	if took := time.Since(begin); took >= exportTimeout {
		t.Errorf("closed after %v, want about 50 ms and not the end of the export", took)
	}
	if failed := testutil.ToFloat64(tr.spans.WithLabelValues("failed")); failed < callsTraced || testutil.ToFloat64(tr.spans.WithLabelValues("exported")) != 0 {
		t.Errorf("%v spans failed, want those of a request at least, and none exported", failed)
	}
}

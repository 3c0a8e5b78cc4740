package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// directory is a Directory with a few keys.
type directory map[string]bool

func (d directory) Known(key pipeline.Key) bool { return d[key.String()] }

// TakesItems reports true for every key but x.team-a.
func (d directory) TakesItems(key pipeline.Key) bool { return key.String() != "x.team-a" }

func (d directory) HasNamespace(name string) bool {
	return name == pipeline.DefaultNamespace || name == "team-a"
}

// invoker records requests and answers with f.
type invoker struct {
	mu    sync.Mutex
	asked []task.Request
	f     func(context.Context, task.Request) (*task.Response, *task.Error)
}

func (i *invoker) Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
	i.mu.Lock()
	i.asked = append(i.asked, r)
	i.mu.Unlock()
	if i.f == nil {
		return echo(r), nil
	}
	return i.f(ctx, r)
}

// last returns the latest request, or fails the test if there is none.
func (i *invoker) last(t *testing.T) task.Request {
	t.Helper()
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.asked) == 0 {
		t.Fatal("nothing was invoked")
	}
	return i.asked[len(i.asked)-1]
}

// echo answers with the input.
func echo(r task.Request) *task.Response {
	return &task.Response{Output: tensor.Input{{From: "echo", Items: r.Input}}}
}

// journal keeps entries in memory, in their binary form.
type journal struct {
	mu      sync.Mutex
	entries [][]byte
	refuse  error
}

func (j *journal) Append(_ context.Context, e Entry) error {
	b, err := e.MarshalBinary()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.entries = append(j.entries, b)
	return errors.Join(err, j.refuse)
}

// front is a gateway under test.
type front struct {
	*Gateway
	handler http.Handler
	invoker *invoker
	journal *journal
	metrics *prometheus.Registry
}

func newFront(t testing.TB, change func(*Config)) *front {
	t.Helper()
	f := &front{invoker: &invoker{}, journal: &journal{}, metrics: prometheus.NewRegistry()}
	c := Config{
		Directory: directory{
			"echo.openfaas-fn": true, "v1.echo.openfaas-fn": true, "x.team-a": true,
		},
		Invoker: f.invoker, Journal: f.journal, Callbacks: NewCallbacks(CallbackTransport(nil), CallbackTransport(nil)), Timeout: time.Minute, MaxTimeout: time.Hour,
		MaxBody: 1 << 20, InFlight: 100, Metrics: f.metrics, Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&c)
	}
	t.Cleanup(c.Callbacks.Close)
	g, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	f.Gateway = g
	f.handler = g.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	return f
}

// do sends a request. header holds name and value pairs.
func (f *front) do(method, path, body string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	f.handler.ServeHTTP(w, r)
	return w
}

// header returns the values of a header that the function got.
func header(r task.Request, name string) (values []string) {
	for _, h := range r.Header {
		if h.Name == name {
			values = append(values, h.Value)
		}
	}
	return values
}

// series returns counters and histogram counts by name and label values.
func (f *front) series(t *testing.T) map[string]float64 {
	t.Helper()
	families, err := f.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, fam := range families {
		for _, m := range fam.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			out[fam.GetName()+"{"+strings.Join(labels, " ")+"}"] = m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}

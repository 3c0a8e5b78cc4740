package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	api "go.opentelemetry.io/otel/trace"
)

// Config configures a [Tracer]. All fields but Endpoint are required.
type Config struct {
	// URL of a collector with OTLP over HTTP, such as http://127.0.0.1:4318; empty: from the
	// environment.
	Endpoint string
	Version  string // of the program
	Node     string
	Log      *slog.Logger
	Metrics  prometheus.Registerer
}

// Bounds of what waits for the collector.
const (
	queued        = 1024             // ended requests and starts without spans so far
	batched       = 512              // spans per export
	patience      = time.Second      // longest wait of a span for others to export with
	exportTimeout = 10 * time.Second // for one export, including retries
)

// Tracer creates and sends spans. Its methods are safe for concurrent use.
type Tracer struct {
	log      *slog.Logger
	registry prometheus.Registerer
	exporter sdk.SpanExporter
	provider *sdk.TracerProvider
	tracer   api.Tracer
	made     *made
	work     chan func()
	quit     chan struct{} // closed by Close
	done     chan struct{}
	ctx      context.Context // context of exports; ends with Close's
	cancel   context.CancelFunc
	once     sync.Once

	spans   *prometheus.CounterVec
	dropped prometheus.Counter

	mu       sync.Mutex
	replicas map[string]*replica
}

// wanted reports whether a collector is configured.
func wanted(endpoint string) bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return endpoint != "" || os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Open returns a Tracer, which the caller closes. If no collector is configured, it returns nil
// without an error. The collector need not be reachable.
func Open(ctx context.Context, cfg Config) (*Tracer, error) {
	if !wanted(cfg.Endpoint) {
		return nil, nil //nolint:nilnil // off is no error
	}
	var options []otlptracehttp.Option
	if cfg.Endpoint != "" {
		options = append(options, otlptracehttp.WithEndpointURL(strings.TrimSuffix(cfg.Endpoint, "/")+"/v1/traces"))
	}
	exporter, err := otlptracehttp.New(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	ours := resource.NewSchemaless(
		attribute.String("service.name", "stagecoach"), attribute.String("service.version", cfg.Version), attribute.String("host.name", cfg.Node),
	)
	res, err := resource.Merge(ours, resource.Environment()) // the environment wins
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	t := &Tracer{
		log: cfg.Log, registry: cfg.Metrics, exporter: exporter, made: &made{}, work: make(chan func(), queued),
		quit: make(chan struct{}), done: make(chan struct{}), replicas: map[string]*replica{},
		spans: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "telemetry", Name: "spans_total", Help: "Spans by result: exported, or failed if the collector did not take them.",
		}, []string{"result"}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "telemetry", Name: "dropped_total",
			Help: "Sampled requests and replica starts without spans, because the queue for the collector was full.",
		}),
	}
	t.provider = sdk.NewTracerProvider(sdk.WithResource(res), sdk.WithIDGenerator(ids{}), sdk.WithSpanProcessor(t.made))
	t.tracer = t.provider.Tracer("github.com/stagecoach-serving/stagecoach")
	for _, c := range []prometheus.Collector{t.spans, t.dropped} {
		if err := t.registry.Register(c); err != nil {
			return nil, fmt.Errorf("telemetry: %w", err)
		}
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	go t.run()
	return t, nil
}

// later runs f on the tracer's goroutine, which is the only one that ends spans. It returns false
// if too many functions wait there.
func (t *Tracer) later(f func()) bool {
	select {
	case <-t.quit:
	case t.work <- f:
		return true
	default:
	}
	t.dropped.Inc()
	return false
}

// run creates and sends spans until Close.
func (t *Tracer) run() {
	defer close(t.done)
	tick := time.NewTicker(patience)
	defer tick.Stop()
	failing := false
	send := func() {
		err := t.send()
		if (err != nil) != failing {
			if failing = err != nil; failing {
				t.log.Warn("the collector does not take spans; they are dropped", "error", err)
			} else {
				t.log.Info("the collector takes spans again")
			}
		}
	}
	for {
		select {
		case f := <-t.work:
			f()
			if len(t.made.spans) >= batched {
				send()
			}
		case <-tick.C:
			if len(t.made.spans) > 0 {
				send()
			}
		case <-t.quit:
			for len(t.work) > 0 && t.ctx.Err() == nil {
				(<-t.work)()
				if len(t.made.spans) >= batched {
					send()
				}
			}
			t.dropped.Add(float64(len(t.work)))
			send()
			return
		}
	}
}

// send exports the collected spans. Spans that the collector does not take are dropped.
func (t *Tracer) send() error {
	var errs []error
	for len(t.made.spans) > 0 {
		n := min(len(t.made.spans), batched)
		if t.ctx.Err() != nil {
			n = len(t.made.spans) // the collector will take none of them
		}
		ctx, cancel := context.WithTimeout(t.ctx, exportTimeout)
		err := t.exporter.ExportSpans(ctx, t.made.spans[:n])
		cancel()
		result := "exported"
		if err != nil {
			result = "failed"
			errs = append(errs, err)
		}
		t.spans.WithLabelValues(result).Add(float64(n))
		t.made.spans = t.made.spans[n:]
	}
	t.made.spans = nil // releases memory, which may be large
	return errors.Join(errs...)
}

// Close sends the waiting spans until ctx ends. Later ones are dropped.
func (t *Tracer) Close(ctx context.Context) error {
	defer context.AfterFunc(ctx, t.cancel)()
	defer t.cancel()
	t.once.Do(func() { close(t.quit) })
	<-t.done
	err := errors.Join(t.provider.Shutdown(ctx), t.exporter.Shutdown(ctx))
	t.registry.Unregister(t.spans)
	t.registry.Unregister(t.dropped)
	if err != nil {
		return fmt.Errorf("telemetry: %w", err)
	}
	return nil
}

// made collects ended spans. They all end on the tracer's goroutine.
type made struct{ spans []sdk.ReadOnlySpan }

// OnStart implements sdk.SpanProcessor.
func (m *made) OnStart(context.Context, sdk.ReadWriteSpan) {}

// OnEnd implements sdk.SpanProcessor.
func (m *made) OnEnd(s sdk.ReadOnlySpan) {
	if s.SpanContext().IsSampled() {
		m.spans = append(m.spans, s)
	}
}

// Shutdown implements sdk.SpanProcessor.
func (m *made) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdk.SpanProcessor.
func (m *made) ForceFlush(context.Context) error { return nil }

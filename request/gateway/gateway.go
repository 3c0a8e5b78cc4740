package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Directory knows which functions and pipelines can be invoked.
type Directory interface {
	// Known reports whether a function or pipeline has this key.
	Known(key pipeline.Key) bool
	// TakesItems reports whether a JSON array sent to this target without X-Items is a list of
	// items.
	TakesItems(key pipeline.Key) bool
	// HasNamespace reports whether the namespace exists.
	HasNamespace(name string) bool
}

// Invoker runs a request through its function or pipeline.
type Invoker interface {
	// Invoke returns a response whose output has no references, or an error. It returns by
	// r.Deadline, or soon after ctx ends.
	Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error)
}

// Journal stores accepted async requests until they are done.
type Journal interface {
	// Append returns once e is on disk. It returns [ErrTooLarge] if e can never be stored.
	Append(ctx context.Context, e Entry) error
}

// ErrTooLarge means that an entry is too large for the journal.
var ErrTooLarge = errors.New("gateway: the request is too large for the journal")

// Config configures a [Gateway]. All fields up to Log are required.
type Config struct {
	Directory  Directory
	Invoker    Invoker
	Journal    Journal
	Callbacks  *Callbacks
	Timeout    time.Duration // default for requests without X-Timeout
	MaxTimeout time.Duration // upper bound of X-Timeout
	MaxBody    int64         // in bytes
	// memory in bytes for all bodies together; requests above it get 503; 0: no bound.
	BodyMemory int64
	// for bodies above 1 MiB that the platform need not parse; nil: memory.
	Spool    Spool
	InFlight int // concurrent requests; more get 429
	Metrics  prometheus.Registerer
	Log      *slog.Logger
	Tracer   Tracer // nil: no tracing

	// Hide removes what clients must not read from an error text, such as paths of the machine. Nil
	// removes nothing. Logs and spans get the whole text.
	Hide func(text string) string

	// Rendezvous is where replicas of functions that speak HTTP pick up their requests. If it is
	// nil, those functions get their requests as stages do.
	Rendezvous *Rendezvous
	HTTP       func(key pipeline.Key) bool
	// Exec returns the exec_timeout of a function that speaks HTTP. It returns 0 if the function
	// has none or does not speak HTTP. Nil means that no function has one.
	Exec func(key pipeline.Key) time.Duration
	// Measures reports whether holder has pinned the function, so that it may see how its calls
	// were batched. Nil allows nobody.
	Measures func(key pipeline.Key, holder string) bool
	// Stall is how long a client may pause while it sends its body or reads its answer; 0: no
	// limit.
	Stall time.Duration
	// Lines returns how many requests wait per function. With it, a client may pause only for less
	// than Stall while others wait. If it is nil, Stall is the only limit.
	Lines   Lines
	Proxies peer.Proxies // proxies trusted to name the client
}

// Gateway is the data path.
type Gateway struct {
	cfg      Config
	metrics  *metrics
	ids      ids
	inFlight atomic.Int64
	memory   atomic.Int64 // bytes of all bodies
	stalls   stalls
}

// New returns a gateway and registers its metrics.
func New(c Config) (*Gateway, error) {
	switch {
	case c.Directory == nil || c.Invoker == nil || c.Journal == nil || c.Callbacks == nil || c.Metrics == nil || c.Log == nil:
		return nil, errors.New("gateway: a field of Config is nil, want all fields set")
	case c.Timeout <= 0 || c.MaxTimeout < c.Timeout || c.MaxBody <= 0 || c.InFlight <= 0:
		return nil, errors.New("gateway: a bound of Config is not positive or Timeout exceeds MaxTimeout")
	}
	m, err := newMetrics(c.Metrics)
	if err != nil {
		return nil, err
	}
	return &Gateway{cfg: c, metrics: m, ids: newIDs()}, nil
}

// Invocations returns the number of ended requests for this function or pipeline, plus the
// function's answered calls as a stage of pipelines in ended requests.
func (g *Gateway) Invocations(key pipeline.Key) float64 { return g.metrics.invocations(key) }

// Tidy drops the metrics of functions and pipelines that no longer exist.
func (g *Gateway) Tidy() {
	g.metrics.tidy(g.cfg.Directory.Known)
}

// Handler serves /function/, /async-function/ and /v2/, and passes all other paths to next.
func (g *Gateway) Handler(next http.Handler) http.Handler { return g.handler(next, false) }

// InsideHandler is Handler for requests that functions send. A function is never trusted as a
// proxy, whatever its address.
func (g *Gateway) InsideHandler(next http.Handler) http.Handler { return g.handler(next, true) }

type insideKey struct{}

// isInside reports whether a function sent the request.
func isInside(r *http.Request) bool { return r.Context().Value(insideKey{}) != nil }

func (g *Gateway) handler(next http.Handler, inside bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w, done := g.paced(w)
		defer done()
		if inside {
			r = r.WithContext(context.WithValue(r.Context(), insideKey{}, true))
		}
		switch way, name, path := split(r.URL.EscapedPath()); way {
		case syncCall:
			g.serve(w, r, call{name: name, path: path}, g.invoke)
		case asyncCall:
			g.serve(w, r, call{name: name, path: path}, g.accept)
		default:
			if rest, ok := strings.CutPrefix(r.URL.EscapedPath(), inferencePrefix); ok {
				g.serveInference(w, r, rest)
				return
			}
			next.ServeHTTP(w, r)
		}
	})
}

// way is the kind of invocation that a path asks for.
type way int

const (
	noCall way = iota
	syncCall
	asyncCall
)

// split splits /function/NAME[/PATH] and /async-function/NAME[/PATH]. It keeps the client's
// escaping. path starts with a slash. name is not validated.
func split(urlPath string) (w way, name, path string) {
	w = syncCall
	rest, ok := strings.CutPrefix(urlPath, "/function/")
	if !ok {
		w = asyncCall
		if rest, ok = strings.CutPrefix(urlPath, "/async-function/"); !ok {
			return noCall, "", ""
		}
	}
	name, path = rest, "/"
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		name, path = rest[:i], rest[i:]
	}
	return w, name, path
}

// call is one request on its way through the gateway.
type call struct {
	key   pipeline.Key // of the target
	name  string       // as in the URL
	path  string       // after the name, escaped
	id    string       // X-Call-Id
	start time.Time
	trace Trace               // nil: no tracing
	calls []task.Timing       // time that its tasks waited and worked
	cause string              // cause of the failure
	hide  func(string) string // Config.Hide

	traceparent string  // passed to the function
	body        *source // body that may still be read; nil: none
	upload      *upload // set for requests with a body to functions that speak HTTP

	// an Open Inference Protocol request, whose errors have the protocol's form.
	protocol bool
	direct   bool   // the function speaks HTTP and gets bodies unchanged
	items    string // X-Items; empty: the function's setting applies
	// inference says how the answer is formed; nil unless the request uses the Open Inference
	// Protocol.
	inference *tensor.Inference

	// sending has one channel per attempt; it is closed when the attempt no longer reads the body.
	sending []<-chan struct{}

	batches bool   // the client may see in which batches its calls ran
	broken  bool   // the answer broke off, so the connection must be closed
	spools  bool   // a large body may be spooled
	spooled string // owner of the spooled body; empty: none
	memory  int64  // bytes of the body counted in Gateway.memory
}

// serve does what sync and async requests share: it finds the target, counts the request and
// enforces bounds. do answers and returns the status. c holds the parts of the URL.
func (g *Gateway) serve(w http.ResponseWriter, r *http.Request, c call, do func(http.ResponseWriter, *http.Request, *call) int) {
	c.start, c.hide = time.Now(), g.cfg.Hide
	h := w.Header()
	given := r.Header.Get("X-Call-Id")
	if c.id = given; !validID(given) {
		c.id = g.ids.next()
	}
	h["X-Call-Id"] = []string{c.id}
	var known bool
	if c.key, known = g.resolve(c.name); !known {
		code := fail(w, &c, g.unknown(c.key, c.name))
		g.ended(nil, "", task.Ended{CallID: c.id, Target: c.name, Status: code, Cause: c.cause, Start: c.start})
		return
	}
	f := g.metrics.function(c.key)
	f.begin()
	c.trace = g.begin(c.start, r.Header.Get("Traceparent"), r.Header.Get("Tracestate"))
	var code int
	defer g.forget(&c)
	defer c.waitSent() // runs after endBody, which ends the readers
	// Runs after the request has left the in-flight count. Only its body's memory is still held.
	defer func() { c.endBody(w, r, code) }()
	defer g.inFlight.Add(-1)
	switch {
	case g.inFlight.Add(1) > int64(g.cfg.InFlight):
		code = fail(w, &c, &task.Error{Status: http.StatusTooManyRequests, Internal: true, Cause: "too many requests in flight; try again later"})
	case given != "" && given != c.id:
		code = fail(w, &c, badHeader("X-Call-Id", given, "1 to 128 letters, digits and -._ that start with a letter or digit"))
	default:
		code = do(w, r, &c)
	}
	f.end(code, time.Since(c.start))
	g.metrics.called(f.name, c.calls)
	e := task.Ended{CallID: c.id, Target: c.key.String(), Method: r.Method, Path: c.path, Status: code, Cause: c.cause, Start: c.start, Calls: c.calls}
	if code == http.StatusAccepted {
		e.Async = "accept"
	}
	g.ended(c.trace, r.Header.Get("Traceparent"), e)
	if c.broken || code == statusClientGone { // returning normally would send an empty answer
		panic(http.ErrAbortHandler)
	}
}

// resolve finds the target of a name in a URL, which may be escaped.
func (g *Gateway) resolve(name string) (key pipeline.Key, ok bool) {
	if strings.IndexByte(name, '%') >= 0 {
		if plain, err := url.PathUnescape(name); err == nil {
			name = plain
		}
	}
	key = pipeline.Named(name, "") // the query belongs to the function
	return key, g.cfg.Directory.Known(key)
}

// speaksHTTP reports whether the function speaks HTTP, that is, is not a stage.
func (g *Gateway) speaksHTTP(key pipeline.Key) bool { return g.cfg.HTTP != nil && g.cfg.HTTP(key) }

// unknown returns the error for a target or namespace that does not exist. name is what the client
// sent.
func (g *Gateway) unknown(key pipeline.Key, name string) *task.Error {
	cause := "no function or pipeline " + quoted(name) + "; it is found as soon as it is deployed"
	if !g.cfg.Directory.HasNamespace(key.Namespace) {
		cause = "no namespace " + quoted(key.Namespace) + ", which " + quoted(name) + " names after its last dot; the deploy of a function creates it"
	}
	return &task.Error{Status: http.StatusNotFound, Cause: cause}
}

// quoted returns the beginning of a name that a client sent, in quotes.
func quoted(name string) string {
	const most = 100
	if len(name) > most {
		name = name[:most] + "…"
	}
	return strconv.Quote(name)
}

// invoke runs a request and answers with its result.
func (g *Gateway) invoke(w http.ResponseWriter, r *http.Request, c *call) int {
	if g.cfg.Rendezvous != nil && g.speaksHTTP(c.key) {
		return g.stream(w, r, c)
	}
	c.spools = true
	req, timeout, err := g.request(w, r, c)
	if err != nil {
		return fail(w, c, err)
	}
	req.Deadline = c.start.Add(timeout)
	resp, err := g.cfg.Invoker.Invoke(r.Context(), req)
	if r.Context().Err() != nil {
		return statusClientGone // nobody would read an answer
	}
	if err != nil {
		return fail(w, c, err)
	}
	return g.succeed(w, c, resp)
}

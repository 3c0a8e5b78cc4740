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
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Directory knows what can be invoked.
type Directory interface {
	// Known reports whether there is a function or a pipeline with this key.
	Known(key pipeline.Key) bool
	// TakesItems reports whether a JSON array that invokes this function or pipeline is a list of
	// items, if the request has no X-Items.
	TakesItems(key pipeline.Key) bool
	// HasNamespace reports whether there is a namespace with this name.
	HasNamespace(name string) bool
}

// Invoker runs a request through its function or pipeline.
type Invoker interface {
	// Invoke returns a response, whose output has no references, or an error: by r.Deadline at the latest, and soon after
	// ctx ended.
	Invoke(ctx context.Context, r task.Request) (*task.Response, *task.Error)
}

// Journal keeps accepted async requests until they are done.
type Journal interface {
	// Append returns once e is on disk; or [ErrTooLarge], when it will never take an entry of that size.
	Append(ctx context.Context, e Entry) error
}

// ErrTooLarge says that an entry is too large for a journal.
var ErrTooLarge = errors.New("gateway: the request is too large for the journal")

// Config is what a [Gateway] is made of. All fields up to Log are needed.
type Config struct {
	Directory  Directory
	Invoker    Invoker
	Journal    Journal
	Callbacks  *Callbacks
	Timeout    time.Duration // of a request that names none
	MaxTimeout time.Duration // that a request may ask for with X-Timeout
	MaxBody    int64         // bytes
	BodyMemory int64         // bytes that bodies may have of memory together; more get 503; 0: no bound
	Spool      Spool         // of bodies above 1 MiB that nobody has to look into; nil: memory
	InFlight   int           // requests at a time; more get 429
	Metrics    prometheus.Registerer
	Log        *slog.Logger
	Tracer     Tracer // nil: no spans

	// Hide removes from an error text what clients must not read, such as paths of the machine;
	// nil: nothing is removed. Logs and spans have the whole text.
	Hide func(text string) string

	// Rendezvous is where functions for which HTTP is true are met; nil: they get their requests as other functions do.
	Rendezvous *Rendezvous
	HTTP       func(key pipeline.Key) bool
	Exec       func(key pipeline.Key) time.Duration       // exec_timeout of a function that speaks HTTP; 0: none, or another kind of function; nil: none has one
	Measures   func(key pipeline.Key, holder string) bool // whether a function is pinned by this holder: who may know how its calls were put together; nil: nobody
	Stall      time.Duration                              // that a client may send nothing of its body and take nothing of its answer; 0: as long as it likes
	Lines      Lines                                      // for which clients may not wait as long as Stall says while others do; nil: they may
	Proxies    peer.Proxies                               // that say whose request they pass on
}

// Gateway is the data path.
type Gateway struct {
	cfg      Config
	metrics  *metrics
	ids      ids
	inFlight atomic.Int64
	memory   atomic.Int64 // of bodies, in bytes
	stalls   stalls
}

// New returns a gateway whose metrics are registered.
func New(c Config) (*Gateway, error) {
	switch {
	case c.Directory == nil || c.Invoker == nil || c.Journal == nil || c.Callbacks == nil || c.Metrics == nil || c.Log == nil:
		return nil, errors.New("gateway: a field of Config is nil, want all")
	case c.Timeout <= 0 || c.MaxTimeout < c.Timeout || c.MaxBody <= 0 || c.InFlight <= 0:
		return nil, errors.New("gateway: a bound of Config is not positive or Timeout exceeds MaxTimeout")
	}
	m, err := newMetrics(c.Metrics)
	if err != nil {
		return nil, err
	}
	return &Gateway{cfg: c, metrics: m, ids: newIDs()}, nil
}

// Invocations returns the number of requests for this function or pipeline that have ended, plus
// the number of its answered calls as a stage of pipelines in requests that have ended.
func (g *Gateway) Invocations(key pipeline.Key) float64 { return g.metrics.invocations(key) }

// Tidy drops the figures of functions and pipelines that are not there any more.
func (g *Gateway) Tidy() {
	g.metrics.tidy(g.cfg.Directory.Known)
}

// Handler serves /function/, /async-function/ and /v2/, and passes all other paths to next.
func (g *Gateway) Handler(next http.Handler) http.Handler { return g.handler(next, false) }

// InsideHandler is Handler for requests that functions send. No function is a proxy that is believed, whatever its address.
func (g *Gateway) InsideHandler(next http.Handler) http.Handler { return g.handler(next, true) }

type insideKey struct{}

// isInside reports whether a function has sent a request.
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

// way is how a path asks for an invocation.
type way int

const (
	noCall way = iota
	syncCall
	asyncCall
)

// split takes /function/NAME[/PATH] and /async-function/NAME[/PATH] apart, as the client has escaped them. path starts with a
// slash. A NAME that no function can have comes out as it is: nobody knows it.
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
	key   pipeline.Key // of its target
	name  string       // as the URL has it
	path  string       // after the name, escaped
	id    string       // X-Call-Id
	start time.Time
	trace Trace               // nil: none
	calls []task.Timing       // what its tasks cost
	cause string              // why it failed
	hide  func(string) string // see Config

	traceparent string  // for the function
	body        *source // that may still be read; nil: none
	upload      *upload // of a request to a function that speaks HTTP, if it has a body

	protocol  bool              // it came on a path of the Open Inference Protocol, and errors have its form
	direct    bool              // the function speaks HTTP: bodies are its own
	items     string            // X-Items; empty: the function decides
	inference *tensor.Inference // the wishes of a request of the Open Inference Protocol for its answer; nil: it is no such request

	sending []<-chan struct{} // each is closed when an attempt at the request does not read its body any more

	batches bool   // the client measures the function, and is told in which batches its calls ran
	broken  bool   // the answer broke off: the connection has to, too
	spools  bool   // a large body may go to the spool
	spooled string // the body's owner there; empty: none
	memory  int64  // that the body has
}

// serve does what sync and async requests have in common: find the target, count, bound; do answers
// and returns the status. c says what the URL says.
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
	defer c.waitSent()                       // which endBody ends
	defer func() { c.endBody(w, r, code) }() // at last: the request has ended, and takes nobody's place but its body's memory
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
	if c.broken || code == statusClientGone { // an empty answer would be one
		panic(http.ErrAbortHandler)
	}
}

// resolve finds the target of a URL's name, which may be escaped.
func (g *Gateway) resolve(name string) (key pipeline.Key, ok bool) {
	if strings.IndexByte(name, '%') >= 0 {
		if plain, err := url.PathUnescape(name); err == nil {
			name = plain
		}
	}
	key = pipeline.Named(name, "") // the query is the function's own
	return key, g.cfg.Directory.Known(key)
}

// speaksHTTP tells whether the function with this key is not a stage.
func (g *Gateway) speaksHTTP(key pipeline.Key) bool { return g.cfg.HTTP != nil && g.cfg.HTTP(key) }

// unknown returns the error for a target that does not exist, or whose namespace does not exist.
// name is the client's name for it.
func (g *Gateway) unknown(key pipeline.Key, name string) *task.Error {
	cause := "no function or pipeline " + quoted(name) + "; it is found as soon as it is deployed"
	if !g.cfg.Directory.HasNamespace(key.Namespace) {
		cause = "no namespace " + quoted(key.Namespace) + ", which " + quoted(name) + " names after its last dot; the deploy of a function creates it"
	}
	return &task.Error{Status: http.StatusNotFound, Cause: cause}
}

// quoted returns the quoted beginning of a name that a client sent.
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
		return statusClientGone // nobody reads an answer
	}
	if err != nil {
		return fail(w, c, err)
	}
	return g.succeed(w, c, resp)
}

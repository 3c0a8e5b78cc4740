package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
)

// DefaultTransfers is how many parts a [Server] sends at the same time.
const DefaultTransfers = 16

// Bounds of a Server.
const (
	writeTimeout = 30 * time.Second // for a chunk of an answer
	idleTimeout  = 30 * time.Second // of a connection without a request
	busyAgain    = time.Second      // when a client that was turned away may ask again
)

// ServerConfig configures a Server.
type ServerConfig struct {
	Store *image.Store
	// Folder returns the digest of the image that a name without a digest stands for. It packs a
	// folder of images if necessary. The error wraps image.ErrNoImage if there is none. nil: only
	// digests are served.
	Folder func(ctx context.Context, name string) (digest string, err error)
	// Fetch gets an image that the store lacks into the store. The error wraps image.ErrNoImage if
	// there is no such image. nil: the store has all images that are served.
	Fetch     func(ctx context.Context, digest string) error
	Transfers int   // parts that are sent at the same time; 0: [DefaultTransfers]
	Rate      int64 // bytes per second of all transfers together; 0: not limited
	Log       *slog.Logger
}

// Server serves the images of a store: manifests by digest (and folders of images by name), and
// blobs by digest, with ranges. It answers 503 with Retry-After while it sends as many parts as it
// may. It is an http.Handler, and is safe for concurrent use.
type Server struct {
	cfg  ServerConfig
	room chan struct{}
	rate *rate
}

// NewServer returns a Server. The caller closes the store after the last request.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Transfers == 0 {
		cfg.Transfers = DefaultTransfers
	}
	return &Server{cfg: cfg, room: make(chan struct{}, cfg.Transfers), rate: newRate(cfg.Rate)}
}

// Serve serves connections until the listener is closed or ctx ends. It returns when all requests
// have ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var conns sync.WaitGroup // with the handlers that run on them
	h := &http.Server{
		Handler: s, ReadHeaderTimeout: idleTimeout, IdleTimeout: idleTimeout,
		ErrorLog:    slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				conns.Add(1)
			case http.StateClosed, http.StateHijacked:
				conns.Done()
			}
		},
	}
	defer context.AfterFunc(ctx, func() { _ = h.Close() })()
	err := h.Serve(l)
	_ = h.Close()
	conns.Wait()
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// ServeConn serves one connection until its client or ctx ends it.
func (s *Server) ServeConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	l := &single{conn: make(chan net.Conn, 1), done: make(chan struct{}), addr: c.LocalAddr()}
	l.end = sync.OnceFunc(func() { close(l.done) })
	l.conn <- &noted{c, l.end}
	_ = s.Serve(ctx, l) // ends with the connection
}

// single is a listener with one connection. It ends with the connection.
type single struct {
	conn chan net.Conn
	done chan struct{}
	end  func() // closes done
	addr net.Addr
}

// Accept implements net.Listener.
func (l *single) Accept() (net.Conn, error) {
	select {
	case c := <-l.conn:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *single) Close() error {
	l.end()
	return nil
}

// Addr implements net.Listener.
func (l *single) Addr() net.Addr { return l.addr }

// noted is a connection that reports its end.
type noted struct {
	net.Conn

	closed func()
}

// Close implements net.Conn.
func (c *noted) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	rest, ok := strings.CutPrefix(q.URL.Path, "/v2/")
	switch {
	case q.Method != http.MethodGet && q.Method != http.MethodHead:
		refuse(w, http.StatusMethodNotAllowed, "UNSUPPORTED", "this store is only read: GET or HEAD")
		return
	case ok && rest == "":
		w.WriteHeader(http.StatusOK)
		return
	}
	if name, digest, ok := cutLast(rest, "/blobs/"); ok && name != "" {
		s.blob(w, q, digest)
		return
	}
	if name, ref, ok := cutLast(rest, "/manifests/"); ok && name != "" {
		s.manifest(w, q, name, ref)
		return
	}
	refuse(w, http.StatusNotFound, "UNSUPPORTED", "want /v2/NAME/manifests/DIGEST or /v2/NAME/blobs/DIGEST")
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+len(sep):], true
}

// refuse answers with an error as the OCI distribution API has it.
func refuse(w http.ResponseWriter, status int, code, text string) {
	type fault struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client may have gone.
	_ = json.NewEncoder(w).Encode(map[string][]fault{"errors": {{code, text}}})
}

// fail answers with the error of a store.
func (s *Server) fail(w http.ResponseWriter, q *http.Request, err error, code string) {
	if errors.Is(err, image.ErrNoImage) {
		refuse(w, http.StatusNotFound, code, err.Error())
		return
	}
	if q.Context().Err() == nil {
		s.cfg.Log.Warn("image is not served", "path", q.URL.Path, "error", err)
	}
	refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
}

func (s *Server) manifest(w http.ResponseWriter, q *http.Request, name, ref string) {
	digest := ref
	if strings.Contains(ref, ":") && !digestForm.MatchString(ref) {
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "want a SHA-256")
		return
	}
	if !strings.Contains(ref, ":") {
		if s.cfg.Folder == nil {
			refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "images are served by digest alone")
			return
		}
		var err error
		if digest, err = s.cfg.Folder(q.Context(), name+":"+ref); err != nil {
			s.fail(w, q, err, "MANIFEST_UNKNOWN")
			return
		}
	}
	e, err := image.OpenExport(q.Context(), s.cfg.Store, digest)
	if errors.Is(err, image.ErrNoImage) && s.cfg.Fetch != nil {
		if err = s.cfg.Fetch(q.Context(), digest); err == nil {
			e, err = image.OpenExport(q.Context(), s.cfg.Store, digest)
		}
	}
	if err != nil {
		s.fail(w, q, err, "MANIFEST_UNKNOWN")
		return
	}
	defer e.Close()
	r, err := e.Open(digest)
	if err != nil {
		s.fail(w, q, err, "MANIFEST_UNKNOWN")
		return
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, image.MaxManifest))
	if err != nil {
		s.fail(w, q, err, "MANIFEST_UNKNOWN")
		return
	}
	w.Header().Set("Content-Type", e.MediaType)
	w.Header().Set("Docker-Content-Digest", digest)
	_, _ = w.Write(b) // the client may have gone
}

func (s *Server) blob(w http.ResponseWriter, q *http.Request, digest string) {
	select {
	case s.room <- struct{}{}:
		defer func() { <-s.room }()
	default:
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusServiceUnavailable, "TOOMANYREQUESTS", "as many transfers as are allowed are under way; try again, or ask another node")
		return
	}
	r, err := image.OpenPart(q.Context(), s.cfg.Store, digest)
	if err != nil {
		s.fail(w, q, err, "BLOB_UNKNOWN")
		return
	}
	defer r.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Docker-Content-Digest", digest)
	w.Header().Set("Etag", `"`+digest+`"`)
	http.ServeContent(&paced{w, http.NewResponseController(w), q.Context(), s.rate}, q, "", time.Time{}, r)
}

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// chunk is how many bytes are read and sent at a time.
const chunk = 256 << 10

// paced sends an answer at the server's rate. A client that reads nothing for writeTimeout is cut
// off.
type paced struct {
	http.ResponseWriter

	control *http.ResponseController
	ctx     context.Context
	rate    *rate
}

// ReadFrom implements io.ReaderFrom, which io.Copy uses.
func (p *paced) ReadFrom(r io.Reader) (n int64, err error) {
	b := buffers.Get().(*[]byte) //nolint:forcetypeassert // it has nothing else
	defer buffers.Put(b)
	for {
		m, err := r.Read(*b)
		if m > 0 {
			w, err := p.Write((*b)[:m])
			n += int64(w)
			if err != nil {
				return n, err
			}
		}
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// Write implements io.Writer.
func (p *paced) Write(b []byte) (int, error) {
	if err := p.rate.wait(p.ctx, len(b)); err != nil {
		return 0, err
	}
	if err := p.control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.ResponseWriter.Write(b)
}

var buffers = sync.Pool{New: func() any { b := make([]byte, chunk); return &b }}

// rate spreads bytes over time. A nil rate does not limit.
type rate struct {
	perSecond int64

	mu   sync.Mutex
	next time.Time // when the next byte may go
}

func newRate(perSecond int64) *rate {
	if perSecond <= 0 {
		return nil
	}
	return &rate{perSecond: perSecond}
}

// wait returns when n more bytes may be sent.
func (r *rate) wait(ctx context.Context, n int) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	now := time.Now()
	at := r.next
	if at.Before(now) {
		at = now
	}
	r.next = at.Add(time.Duration(float64(n) / float64(r.perSecond) * float64(time.Second)))
	r.mu.Unlock()
	if at.Equal(now) {
		return nil
	}
	t := time.NewTimer(at.Sub(now))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

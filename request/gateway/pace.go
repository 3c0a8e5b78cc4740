package gateway

import (
	"net/http"
	"time"
)

// paced is a ResponseWriter that gives the client a limited time to take each piece of the answer.
type paced struct {
	http.ResponseWriter
	stall time.Duration
	kept  int // bytes that net/http buffers until the handler ends
}

// keeps is how many bytes of an answer net/http buffers before it sends any.
const keeps = 2048

// piece is how many bytes a client has to take per period.
const piece = 64 << 10

// paced wraps w, so that the client has the time Config.Stall to take each piece of its answer. The
// caller calls done when it has written the answer. The client then has the same time for the last
// piece, which net/http sends after the handler returns.
func (g *Gateway) paced(w http.ResponseWriter) (out http.ResponseWriter, done func()) {
	if g.cfg.Stall <= 0 {
		return w, func() {}
	}
	p := &paced{ResponseWriter: w, stall: g.cfg.Stall}
	return p, p.extend
}

// extend starts a new period. A test's recorder has no deadlines.
func (p *paced) extend() {
	_ = http.NewResponseController(p.ResponseWriter).SetWriteDeadline(time.Now().Add(p.stall))
}

// Write implements io.Writer.
func (p *paced) Write(b []byte) (n int, err error) {
	if p.kept += len(b); p.kept <= keeps {
		return p.ResponseWriter.Write(b) // done extends the deadline for these bytes
	}
	for first := true; err == nil && (first || len(b) > 0); first = false {
		p.extend()
		var k int
		k, err = p.ResponseWriter.Write(b[:min(len(b), piece)])
		n, b = n+k, b[k:]
	}
	return n, err
}

// Flush implements http.Flusher.
func (p *paced) Flush() { _ = p.FlushError() }

// FlushError is Flush for http.ResponseController.
func (p *paced) FlushError() error {
	p.kept += keeps
	p.extend()
	return http.NewResponseController(p.ResponseWriter).Flush()
}

// Unwrap returns the wrapped writer for http.ResponseController.
func (p *paced) Unwrap() http.ResponseWriter { return p.ResponseWriter }

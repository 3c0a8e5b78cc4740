package events

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Bounds of a stream.
const (
	// interval of comments that keep proxies from closing the stream.
	heartbeat    = 15 * time.Second
	writeTimeout = 10 * time.Second // for a listener that does not read
)

// ServeHTTP streams events as text/event-stream until the client leaves or the hub is closed. The
// query parameters function and namespace select events. With the header Last-Event-ID, the stream
// begins after the event with that id.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	l, replay, gone, open := h.listen(filter{q.Get("function"), q.Get("namespace")}, r.Header.Get("Last-Event-ID"))
	if !open {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "stagecoach is shutting down; try again", http.StatusServiceUnavailable)
		return
	}
	defer h.leave(l)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // a proxy's buffer would delay events
	s := stream{w: w, control: http.NewResponseController(w)}
	s.print(": events of stagecoach\n\n")
	if gone > 0 {
		s.missed(gone, "the server no longer keeps them")
	}
	for _, e := range replay {
		s.event(h.id(e.n), &e.event)
	}
	s.flush()
	alive := time.NewTicker(heartbeat)
	defer alive.Stop()
	for s.err == nil {
		select {
		case <-r.Context().Done():
			return
		case <-alive.C:
			s.print(": alive\n\n")
		case e, more := <-l.events:
			if !more {
				if n := h.leave(l); n > 0 {
					s.missed(uint64(n), "the client reads too slowly; connect again with Last-Event-ID")
					s.flush()
				}
				return
			}
			s.event(h.id(e.n), &e.event)
			for range len(l.events) { // events that are there are flushed together
				if e, more := <-l.events; more {
					s.event(h.id(e.n), &e.event)
				}
			}
		}
		s.flush()
	}
}

// stream writes events. It keeps the first error and writes nothing after it.
type stream struct {
	w       io.Writer
	control *http.ResponseController
	err     error
}

func (s *stream) print(format string, a ...any) {
	if s.err == nil {
		// A test's recorder has no deadline.
		_ = s.control.SetWriteDeadline(time.Now().Add(writeTimeout))
		_, s.err = fmt.Fprintf(s.w, format, a...)
	}
}

func (s *stream) event(id string, e *Event) {
	data, err := json.Marshal(e)
	if err != nil {
		return // JSON can encode every Event
	}
	s.print("id: %s\nevent: %s\ndata: %s\n\n", id, e.Kind, data)
}

func (s *stream) missed(n uint64, why string) {
	s.print("event: missed\ndata: {\"missed\":%d,\"why\":%q}\n\n", n, why)
}

func (s *stream) flush() {
	if s.err == nil {
		s.err = s.control.Flush()
	}
}

package events

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// message is one server-sent event.
type message struct{ id, event, data string }

// reader reads a stream of events.
type reader struct {
	t    *testing.T
	resp *http.Response
	scan *bufio.Scanner
}

func open(t *testing.T, url, after string) *reader {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); resp.Body.Close(); http.DefaultClient.CloseIdleConnections() })
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, type %q", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	return &reader{t, resp, bufio.NewScanner(resp.Body)}
}

// next returns the next event. ok is false if the stream has ended.
func (r *reader) next() (m message, ok bool) {
	for r.scan.Scan() {
		line := r.scan.Text()
		switch {
		case strings.HasPrefix(line, "id: "):
			m.id = line[4:]
		case strings.HasPrefix(line, "event: "):
			m.event = line[7:]
		case strings.HasPrefix(line, "data: "):
			m.data = line[6:]
		case line == "" && m.event != "":
			return m, true
		}
	}
	return m, false
}

func (r *reader) want(kinds ...string) (last string) {
	r.t.Helper()
	for _, kind := range kinds {
		m, ok := r.next()
		if !ok || m.event != kind {
			r.t.Fatalf("event %+v, %t (%v), want %s", m, ok, r.scan.Err(), kind)
		}
		if m.id != "" {
			last = m.id
		}
	}
	return last
}

// TestReturningListenerGetsAllEvents listens, leaves, and comes back with the id of the last event.
// The listener must see all events that its filter selects, in order.
func TestReturningListenerGetsAllEvents(t *testing.T) {
	h := New(7)
	s := httptest.NewServer(h)
	defer s.Close()
	r := open(t, s.URL, "")
	h.Publish(Event{Kind: "a", Function: pipeline.ParseKey("f.openfaas-fn"), Why: "line 1\nline 2"})
	h.Publish(Event{Kind: "b", Function: pipeline.ParseKey("g.team-a")})
	m, _ := r.next()
	var e Event
	if err := json.Unmarshal([]byte(m.data), &e); err != nil || m.event != "a" || e.Why != "line 1\nline 2" || e.At.IsZero() {
		t.Errorf("%+v, %v: want event a on one line", m, err)
	}
	r.resp.Body.Close()
	h.Publish(Event{Kind: "c", Function: pipeline.ParseKey("f.openfaas-fn")})
	last := open(t, s.URL, m.id).want("b", "c")
	h.Publish(Event{Kind: "d", Function: pipeline.ParseKey("f.team-a")})
	open(t, s.URL, last).want("d")
	open(t, s.URL, "6-900").want("a", "b", "c", "d") // an id of an earlier process

	open(t, s.URL+"?function=f", "7-0").want("a", "c")
	open(t, s.URL+"?function=f.team-a", "7-0").want("d")
	open(t, s.URL+"?function=f&namespace=team-a", "7-0").want("d")
	open(t, s.URL+"?namespace=team-a", "7-0").want("b", "d")

	for i := range kept {
		h.Publish(Event{Kind: fmt.Sprint(i)})
	}
	r = open(t, s.URL, "7-1")
	if m, _ := r.next(); m.event != "missed" || !strings.Contains(m.data, `"missed":3`) {
		t.Errorf("%+v, want the three that are not kept any more", m)
	}
	r.want("0", "1")
	if got := h.Latest(2); len(got) != 2 || got[1].Kind != fmt.Sprint(kept-1) {
		t.Errorf("latest %+v", got)
	}

	r = open(t, s.URL, "")
	h.Close()
	if m, ok := r.next(); ok {
		t.Errorf("%+v after Close, want the end", m)
	}
	if resp, err := http.Get(s.URL); err != nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a stream of a closed hub: %v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
}

// stuck is a client that reads nothing until it is released.
type stuck struct {
	*httptest.ResponseRecorder
	first, read chan struct{}
}

func (s *stuck) Write(p []byte) (int, error) {
	select {
	case <-s.first:
	default:
		close(s.first)
	}
	<-s.read
	return s.ResponseRecorder.Write(p)
}

// TestSlowReaderIsCutOff checks that a slow reader is cut off, gets the number of missed events,
// and delays nobody.
func TestSlowReaderIsCutOff(t *testing.T) {
	h := New(1)
	w := &stuck{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	}()
	<-w.first // its handler writes now
	for range buffered + 5 {
		h.Publish(Event{Kind: "x"})
	}
	close(w.read)
	<-done
	body := w.Body.String()
	if n := strings.Count(body, "event: x"); n != buffered || !strings.HasSuffix(body, "event: missed\ndata: {\"missed\":5,\"why\":\"the client reads too slowly; connect again with Last-Event-ID\"}\n\n") {
		t.Errorf("%d events, want %d, and at last that 5 were missed: …%s", n, buffered, body[max(0, len(body)-200):])
	}
	if len(h.listeners) > 0 {
		t.Error("the hub still has a listener")
	}
}

// TestIdleStreamSendsComments checks that comments are sent while nothing happens.
func TestIdleStreamSendsComments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, w := New(1), httptest.NewRecorder()
		ctx, cancel := context.WithTimeout(t.Context(), 2*heartbeat+time.Second)
		defer cancel()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		if n := strings.Count(w.Body.String(), ": alive\n\n"); n != 2 {
			t.Errorf("%d comments in %v, want 2", n, 2*heartbeat)
		}
	})
}

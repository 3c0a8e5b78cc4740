package hop

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestBodyThatWasTaken checks that a body that came with its head is read once, and that what
// follows belongs to the next request.
func TestBodyThatWasTaken(t *testing.T) {
	t.Parallel()
	client, server := sockets(t)
	s := &Server{MaxHead: 1 << 16, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := r.Body.(interface{ All() []byte }).All()
		rest, err := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, "%q %q %v", all, rest, err)
	})}
	_, _ = io.WriteString(client, "POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 2\r\n\r\nokGET / HTTP/1.1\r\n\r\n")
	served := s.Serve(t.Context(), server)
	resp, err := http.ReadResponse(bufio.NewReader(client), nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != `"ok" "" <nil>` || err != nil || served.Kept || !served.Whole {
		t.Errorf("%q, %v, %+v; want the body once, and a connection that is not kept", b, err, served)
	}
}

// TestAmbiguousAnswersDoNotReachOtherClients checks answers whose end is ambiguous. The client must
// get them in one defined way, and bytes that follow must not reach another client.
func TestAmbiguousAnswersDoNotReachOtherClients(t *testing.T) {
	t.Parallel()
	for text, kept := range map[string]bool{
		// Chunks win over the length.
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n": true,
		"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nno":                                         false,
		"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n":            false,
		"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n":           true,
	} {
		client, server := sockets(t)
		_, _ = io.WriteString(server, text)
		w := httptest.NewRecorder()
		out := Do(t.Context(), client, w, &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"})
		if out.Err != nil || out.Kept != kept || strings.Contains(w.Body.String(), "no") || w.Code == 200 && (w.Body.String() != "ok" || w.Header().Get("Content-Length") != "") {
			t.Errorf("%q: %+v, %d %v %q; want kept %t", text, out, w.Code, w.Header(), w.Body, kept)
		}
	}
	client, server := sockets(t)
	_, _ = io.WriteString(server, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
	if out := Do(t.Context(), client, httptest.NewRecorder(), &Request{In: httptest.NewRequest("HEAD", "/", nil), Target: "/", Host: "f"}); out.Err != nil || out.Kept {
		t.Errorf("HEAD with a body: %+v, want it not kept", out)
	}
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
	} {
		client, server := sockets(t)
		_, _ = io.WriteString(server, text)
		if out := Do(t.Context(), client, httptest.NewRecorder(), &Request{In: httptest.NewRequest("GET", "/", nil), Target: "/", Host: "f"}); out.Err == nil || out.Begun || out.Kept {
			t.Errorf("%q: %+v, want an error", text, out)
		}
	}
}

// TestOldClientsGetNoInformationalAnswers checks clients of HTTP/1.0, which would take an
// informational answer for the answer.
func TestOldClientsGetNoInformationalAnswers(t *testing.T) {
	t.Parallel()
	client, server := sockets(t)
	_, _ = io.WriteString(server, "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	r := httptest.NewRequest("GET", "/", nil)
	r.ProtoMajor, r.ProtoMinor = 1, 0
	w := httptest.NewRecorder() // a recorder keeps the first status
	if out := Do(t.Context(), client, w, &Request{In: r, Target: "/", Host: "f"}); w.Code != http.StatusOK || out.Err != nil {
		t.Errorf("%d, %v, want 200", w.Code, out.Err)
	}
}

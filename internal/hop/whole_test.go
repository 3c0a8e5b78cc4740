package hop

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestEndedAnswersAreNotFlushed: an answer in chunks that has come to its end is passed on without a flush; one that has not is flushed.
func TestEndedAnswersAreNotFlushed(t *testing.T) {
	t.Parallel()
	chunks := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("400\r\n"+strings.Repeat("x", 1<<10)+"\r\n", 32)
	for name, ends := range map[string]bool{"ended": true, "not ended": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			_, _ = io.WriteString(server, chunks)
			w := &flushes{ResponseRecorder: httptest.NewRecorder(), flushed: func() { _, _ = io.WriteString(server, "0\r\n\r\n") }}
			if ends {
				w.flushed()
				w.flushed = func() { t.Error("flushed") }
			}
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
			if result := Do(t.Context(), c, w, &Request{In: r, Target: "/", Host: "f", There: true}); result.Err != nil || !result.Kept {
				t.Errorf("%v, kept %v", result.Err, result.Kept)
			}
			_ = c.Close()
			if w.Body.Len() != 32<<10 {
				t.Errorf("%d bytes, want %d", w.Body.Len(), 32<<10)
			}
		})
	}
}

// flushes is a recorder that says when it is flushed.
type flushes struct {
	*httptest.ResponseRecorder
	flushed func()
	once    bool
}

// FlushError is for http.ResponseController.
func (f *flushes) FlushError() error {
	if !f.once {
		f.once = true
		f.flushed()
	}
	return nil
}

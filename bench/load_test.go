package bench

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestLoadCountsWrongAnswers(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		switch r.URL.Path {
		case "/function/refused":
			w.WriteHeader(http.StatusTooManyRequests)
		case "/function/other":
			b = []byte("other")
		case "/async-function/accepted":
			b = nil
			w.WriteHeader(http.StatusAccepted)
		}
		_, _ = w.Write(b)
	}))
	defer srv.Close()
	for path, failed := range map[string]bool{
		"/function/echo": false, "/function/refused": true, "/function/other": true, "/async-function/accepted": false, "/async-function/echo": true,
	} {
		for _, client := range []Client{NetHTTP, Lean} {
			t.Run(fmt.Sprint(client, path), func(t *testing.T) {
				r, err := Load(t.Context(), client, strings.TrimPrefix(srv.URL, "http://"), path, 2, 10*time.Millisecond, []byte("body"))
				if err != nil || r.Requests == 0 || failed && (r.Failed != r.Requests || r.Cause == "") || !failed && r.Failed != 0 {
					t.Errorf("%v, %+v", err, r)
				}
			})
		}
	}
}

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// instant is an invoker that answers at once with the input.
type instant struct{}

func (instant) Invoke(_ context.Context, r task.Request) (*task.Response, *task.Error) {
	resp := echo(r)
	resp.Stages = []task.Timing{{Stage: "echo", Wait: 1, Service: 1}}
	return resp, nil
}

// bareEcho is the cheapest possible HTTP handler that echoes.
func bareEcho(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b)
}

// BenchmarkServe compares the data path with a bare echo, both over a real connection.
func BenchmarkServe(b *testing.B) {
	f := newFront(b, func(c *Config) { c.Invoker = instant{} })
	for name, h := range map[string]http.Handler{"bare": http.HandlerFunc(bareEcho), "gateway": f.handler} {
		b.Run(name, func(b *testing.B) {
			s := httptest.NewServer(h)
			defer s.Close()
			client := s.Client()
			payload := bytes.Repeat([]byte("x"), 64)
			b.ReportAllocs()
			for b.Loop() {
				resp, err := client.Post(s.URL+"/function/echo", "text/plain", bytes.NewReader(payload))
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			client.CloseIdleConnections()
		})
	}
}

// sink is a response writer that discards everything.
type sink struct{ h http.Header }

func (s sink) Header() http.Header         { return s.h }
func (s sink) Write(b []byte) (int, error) { return len(b), nil }
func (s sink) WriteHeader(int)             {}

// BenchmarkHandler measures the handlers alone, without a connection.
func BenchmarkHandler(b *testing.B) {
	f := newFront(b, func(c *Config) { c.Invoker = instant{} })
	for name, h := range map[string]http.Handler{"bare": http.HandlerFunc(bareEcho), "gateway": f.handler} {
		b.Run(name, func(b *testing.B) {
			payload := bytes.Repeat([]byte("x"), 64)
			r := httptest.NewRequest(http.MethodPost, "/function/echo", nil)
			r.Header.Set("User-Agent", "load")
			r.Header.Set("Content-Type", "text/plain")
			r.ContentLength = int64(len(payload))
			w := sink{http.Header{}}
			b.ReportAllocs()
			for b.Loop() {
				r.Body = io.NopCloser(bytes.NewReader(payload))
				clear(w.h)
				h.ServeHTTP(w, r)
			}
		})
	}
}

// BenchmarkStream measures requests to a function that speaks HTTP, over real connections on both
// sides. The replica keeps its connection.
func BenchmarkStream(b *testing.B) {
	for name, n := range map[string]int{"none": 0, "small": 64, "large": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			s := newStage(b, time.Minute, nil)
			s.pooled(func(_ int, c net.Conn, in *bufio.Reader) bool { return answered(c, in, ok) })
			transport := &http.Transport{}
			payload := bytes.Repeat([]byte("x"), n)
			b.ReportAllocs()
			for b.Loop() {
				resp, err := (&http.Client{Transport: transport}).Post("http://"+s.addr+"/function/echo", "text/plain", bytes.NewReader(payload))
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			transport.CloseIdleConnections()
		})
	}
}

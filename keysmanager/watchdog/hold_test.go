package watchdog

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
)

// heldServer is a program with a handler, behind a proxy that records what the program holds.
type heldServer struct {
	t     *testing.T
	holds *holds
	h     http.Handler
	looks chan struct{} // receives at each check of a connection
}

func holdsOf(t *testing.T, program string) *heldServer {
	t.Helper()
	ending := make(chan struct{})
	s := &heldServer{t: t, holds: newHolds(ending), looks: make(chan struct{})}
	s.holds.look = func() {
		select {
		case s.looks <- struct{}{}:
		case <-ending:
		}
	}
	p := at(t, program)
	proxy, done := proxy(p, 4, 0)
	s.h = s.holds.handler(proxy)
	t.Cleanup(func() { close(ending); done(); s.holds.close() })
	return s
}

// begin sends a request in a new call. cut makes the call's caller leave. let is closed when the
// call is no longer held.
func (s *heldServer) begin(path string) (cut func(), let <-chan struct{}) {
	ctx, cut := context.WithCancel(s.t.Context())
	call := &stage.Call{}
	r := httptest.NewRequest(http.MethodGet, path, nil).WithContext(context.WithValue(ctx, callKey{}, call))
	done := make(chan struct{})
	go func() { // ends with the program's answer or the test
		defer close(done)
		_ = serve(s.h, &recorder{header: http.Header{}}, r) // fails if the answer breaks off
		s.holds.wait(call)
	}()
	return cut, done
}

func (s *heldServer) mustEnd(let <-chan struct{}, what string) {
	s.t.Helper()
	late := time.After(soon)
	for {
		select {
		case <-let:
			return
		case <-s.looks:
		case <-late:
			s.t.Fatalf("%s: the call is held for %v", what, soon)
		}
	}
}

// mustHold waits for a few checks. After that, the call must still be held.
func (s *heldServer) mustHold(let <-chan struct{}, what string) {
	s.t.Helper()
	for range 4 {
		select {
		case <-s.looks:
		case <-let:
			s.t.Fatal(what + " has let go")
		case <-time.After(soon):
			s.t.Fatal(what + ": nobody looks")
		}
	}
}

// TestCallEndsWhenTheProgramEndsIt checks that a call is held as long as its handler goes on after
// its caller has left, and no longer.
func TestCallEndsWhenTheProgramEndsIt(t *testing.T) {
	t.Parallel()
	begun, release := make(chan struct{}, 1), make(chan struct{})
	free := sync.OnceFunc(func() { close(release) })
	mux := http.NewServeMux()
	mux.HandleFunc("/ignores", func(http.ResponseWriter, *http.Request) { begun <- struct{}{}; <-release })
	mux.HandleFunc("/heeds", func(_ http.ResponseWriter, r *http.Request) { begun <- struct{}{}; <-r.Context().Done() })
	// Until writing fails.
	mux.HandleFunc("/writes", func(w http.ResponseWriter, _ *http.Request) {
		begun <- struct{}{}
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			if _, err := fmt.Fprintln(w, "tick"); err != nil {
				return
			}
			if http.NewResponseController(w).Flush() != nil {
				return
			}
			<-tick.C
		}
	})
	mux.HandleFunc("/answers", func(http.ResponseWriter, *http.Request) {})
	program := httptest.NewServer(mux)
	defer program.Close()
	defer free()
	s := holdsOf(t, program.URL)

	_, let := s.begin("/answers")
	s.mustEnd(let, "a call that was answered")
	for _, path := range []string{"/heeds", "/writes"} {
		cut, let := s.begin(path)
		<-begun
		cut()
		s.mustEnd(let, path)
	}
	cut, let := s.begin("/ignores")
	<-begun
	cut()
	_, other := s.begin("/answers")
	s.mustEnd(other, "a call beside it")
	s.mustHold(let, "a handler that goes on")
	free()
	s.mustEnd(let, "a handler that has ended")
}

// TestUnreadRequestsDoNotHoldCalls checks that a request that the program has not read does not
// hold its call while the program answers others, and does while it answers nobody.
func TestUnreadRequestsDoNotHoldCalls(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := holdsOf(t, "http://"+l.Addr().String())
	cut, let := s.begin("/queued")
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for n := 0; n == 0; { // until the request has arrived
		if n, err = waiting(conn); err != nil {
			t.Fatal(err)
		}
	}
	cut()
	s.mustHold(let, "a program that answers nobody")
	_, other := s.begin("/answered")
	second, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if _, err := second.Read(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(second, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	s.mustEnd(other, "a call that was answered")
	s.mustEnd(let, "a call that waits in the line of a program that answers others")
}

// TestWholeAnswerEndsTheHold checks that a complete answer ends the hold, even if the program
// announces that it closes the connection, but does not close it.
func TestWholeAnswerEndsTheHold(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := holdsOf(t, "http://"+l.Addr().String())
	_, let := s.begin("/")
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Read(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
	s.mustEnd(let, "a call that was answered")
}

// TestConnectionClosedTwiceAtOnce checks that if several goroutines close a call's connection, the
// call is still held until the program ends it.
func TestConnectionClosedTwiceAtOnce(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := newHolds(make(chan struct{}))
	defer s.close()
	for range 300 {
		near, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		h := s.begin(&stage.Call{})
		c := &programConn{TCPConn: near.(*net.TCPConn), heard: new(atomic.Int64)}
		h.take(c)
		var closes sync.WaitGroup
		for range 3 {
			closes.Go(func() { _ = c.Close() })
		}
		closes.Wait()
		h.end()
		select {
		case <-h.done:
			t.Error("the call is still held")
		default:
		}
		_ = far.Close()
		select {
		case <-h.done:
		case <-time.After(soon):
			t.Fatal("the call is no longer held")
		}
	}
}

// waiting returns how many bytes of a connection have not been read yet.
func waiting(c net.Conn) (int, error) {
	other := swapped{c}
	return unread(other)
}

// swapped is a connection seen from its other end.
type swapped struct{ net.Conn }

func (s swapped) LocalAddr() net.Addr  { return s.Conn.RemoteAddr() }
func (s swapped) RemoteAddr() net.Addr { return s.Conn.LocalAddr() }

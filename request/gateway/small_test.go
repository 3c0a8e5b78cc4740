package gateway

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// newSmall starts a stage whose tasks contain the whole HTTP request. replica runs the request and
// returns the HTTP answer as text; with "", the task has no answer. To answer over the rendezvous
// instead, replica calls meet, which connects there and says that it already has the request.
func newSmall(t testing.TB, replica func(ctx context.Context, r *http.Request, meet func() net.Conn) (string, *task.Error)) *stage {
	s := newStage(t, time.Minute, early(ok))
	rendezvous := s.front.invoker.f
	s.front.invoker.f = func(ctx context.Context, q task.Request) (*task.Response, *task.Error) {
		if q.Input[0].ContentType != task.TypeRequest {
			return rendezvous(ctx, q)
		}
		in := bufio.NewReader(bytes.NewReader(q.Input[0].Bytes))
		r, err := http.ReadRequest(in)
		if err != nil {
			t.Errorf("the task's request: %v", err)
			return nil, &task.Error{Cause: err.Error()}
		}
		answer, terr := replica(ctx, r, func() net.Conn {
			part := strings.SplitN(header(q, task.HeaderDirect)[0], " ", 3)
			c, err := net.Dial("unix", part[2])
			if err != nil {
				t.Error(err)
				return nil
			}
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.WriteString(c, part[1]+"+")
			b := make([]byte, 1)
			if _, err := io.ReadFull(c, b); err != nil || b[0] != '\n' {
				t.Errorf("%q, %v, want to be asked", b, err)
			}
			return c
		})
		if terr != nil || answer == "" {
			return &task.Response{}, terr
		}
		return &task.Response{Output: tensor.Input{{Items: tensor.Activation{{ContentType: task.TypeResponse, Bytes: []byte(answer)}}}}}, nil
	}
	return s
}

// TestSmallExchangesTravelWithTheirTasks checks that requests that are complete when their task is
// queued travel with it, and that their answers reach the client as usual.
func TestSmallExchangesTravelWithTheirTasks(t *testing.T) {
	t.Parallel()
	var got string // by the function; the client waits for the answer
	s := newSmall(t, func(_ context.Context, r *http.Request, _ func() net.Conn) (string, *task.Error) {
		b, _ := io.ReadAll(r.Body) // in memory
		got = fmt.Sprint(r.Method, " ", r.RequestURI, " ", string(b), " ", r.Header.Get("X-Forwarded-For") != "", r.Header["Connection"])
		switch r.URL.Path {
		case "/204":
			return "HTTP/1.1 204 No Content\r\nX-Openfaas-Internal: mine\r\n\r\n", nil
		case "/cookies":
			return "HTTP/1.1 418 I'm a teapot\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer-Timing: db\r\nStagecoach-Direct: 1ms\r\nContent-Length: 2\r\n\r\nok", nil
		case "/trailer":
			return "HTTP/1.1 200 OK\r\nTrailer: Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nSum: 2\r\n\r\n", nil
		case "/long":
			return "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", nil
		case "/bad":
			return "HTTP/9", nil
		case "/none":
			return "", nil
		}
		return ok, nil
	})
	c := s.dial(t)
	for _, tc := range []struct{ request, function, want string }{
		{"GET /function/echo/a%2Fb?x=1 HTTP/1.1\r\nHost: x\r\nConnection: X-Hop\r\n\r\n", "GET /a%2Fb?x=1  true []", "200 ok"},
		{"POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", "POST / hello true []", "200 ok"},
		{"GET /function/echo/204 HTTP/1.1\r\nHost: x\r\n\r\n", "GET /204  true []", "204 "},
		{"GET /function/echo/cookies HTTP/1.1\r\nHost: x\r\n\r\n", "GET /cookies  true []", "418 ok"},
		{"GET /function/echo/trailer HTTP/1.1\r\nHost: x\r\n\r\n", "GET /trailer  true []", "200 ok"},
		{"HEAD /function/echo/long HTTP/1.1\r\nHost: x\r\n\r\n", "HEAD /long  true []", "200 "},
		{"GET /function/echo/bad HTTP/1.1\r\nHost: x\r\n\r\n", "GET /bad  true []", "502 stage \"echo\": the replica's answer: malformed HTTP response \"HTTP/9\"\n"},
		{"GET /function/echo/none HTTP/1.1\r\nHost: x\r\n\r\n", "GET /none  true []", "502 stage \"echo\": the replica ended the request without an answer; if the function's image has changed, deploy it again\n"},
	} {
		c.send(tc.request)
		method, _, _ := strings.Cut(tc.request, " ")
		resp, err := http.ReadResponse(c.in, &http.Request{Method: method})
		if err != nil {
			t.Fatalf("%s: %v", tc.function, err)
		}
		b, err := io.ReadAll(resp.Body)
		if answer := fmt.Sprint(resp.StatusCode, " ", string(b)); err != nil || answer != tc.want || got != tc.function {
			t.Errorf("%q, %v, want %q; the function saw %q, want %q", answer, err, tc.want, got, tc.function)
		}
		h := resp.Header
		if len(h["X-Call-Id"]) != 1 || h["X-Duration-Seconds"] == nil || h["Stagecoach-Direct"] != nil || (resp.StatusCode != 502) != (h["X-Openfaas-Internal"] == nil) {
			t.Errorf("%s: header %v", tc.function, h)
		}
		switch {
		case strings.Contains(tc.request, "cookies") && (len(h["Set-Cookie"]) != 2 || len(h["Server-Timing"]) != 2 || !strings.HasPrefix(h["Server-Timing"][0], "echo.wait;dur=")):
			t.Errorf("header %v", h)
		case strings.Contains(tc.request, "trailer") && resp.Trailer.Get("Sum") != "2":
			t.Errorf("trailer %v", resp.Trailer)
		case method == http.MethodHead && resp.ContentLength != 1000:
			t.Errorf("length %d of what HEAD asks about", resp.ContentLength)
		}
	}
	c = s.dial(t)
	c.send("GET /function/echo/long HTTP/1.1\r\nHost: x\r\n\r\n")
	// The server may have buffered the head.
	if status, b := c.answer(); b != io.ErrUnexpectedEOF.Error() {
		t.Errorf("%d %q, want an answer that breaks off", status, b)
	}
}

// TestOtherRequestsStayAtTheRendezvous checks the requests that do not travel with their tasks:
// chunked, large or late bodies, upgrades, and Expect.
func TestOtherRequestsStayAtTheRendezvous(t *testing.T) {
	t.Parallel()
	for name, request := range map[string]string{
		"chunks":  chunked + "1\r\na\r\n0\r\n\r\n",
		"large":   post + fmt.Sprintf("Content-Length: %d\r\n\r\n", task.MaxMessage) + strings.Repeat("a", task.MaxMessage),
		"head":    post + "Content-Length: 1\r\nX-Large: " + strings.Repeat("a", task.MaxMessage) + "\r\n\r\na",
		"upgrade": "GET /function/echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"late":    post + "Content-Length: 2\r\n\r\na",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSmall(t, func(_ context.Context, _ *http.Request, _ func() net.Conn) (string, *task.Error) { return okay, nil })
			c := s.dial(t)
			c.send(request)
			if status, b := c.answer(); status != http.StatusOK || b != "ok" {
				t.Fatalf("%d %q", status, b)
			}
			if in := s.front.invoker.last(t).Input; len(in) != 1 || len(in[0].Bytes) > 0 {
				t.Errorf("the task has %d items, the first with %d bytes", len(in), len(in[0].Bytes))
			}
		})
	}
}

// TestSmallRequestsWhoseAnswersStream checks that a streamed answer comes over the rendezvous while
// the replica writes it. If the replica is lost before it has written anything, the next replica
// answers. If it is lost later, the answer breaks off.
func TestSmallRequestsWhoseAnswersStream(t *testing.T) {
	t.Parallel()
	more := make(chan struct{})
	s := newSmall(t, func(_ context.Context, r *http.Request, meet func() net.Conn) (string, *task.Error) {
		if r.URL.Path != "/unlucky" {
			_ = meet().Close() // the first replica is lost
		}
		c := meet()
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
		if r.URL.Path == "/unlucky" {
			return "", nil
		}
		<-more
		_, _ = io.WriteString(c, "5\r\n last\r\n0\r\n\r\n")
		return "", nil
	})
	c := s.dial(t)
	c.send("POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" {
		t.Fatalf("%q, %v", first, err)
	}
	close(more)
	if b, err := io.ReadAll(resp.Body); string(b) != " last" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	c.send("GET /function/echo/unlucky HTTP/1.1\r\nHost: x\r\n\r\n")
	// The server may have buffered the head.
	if status, b := c.answer(); b != io.ErrUnexpectedEOF.Error() {
		t.Errorf("%d %q, want an answer that breaks off", status, b)
	}
}

// TestClientThatLeavesCancelsSmallRequest checks that the task is canceled and nobody is answered.
func TestClientThatLeavesCancelsSmallRequest(t *testing.T) {
	t.Parallel()
	begun, ended := make(chan struct{}), make(chan struct{})
	s := newSmall(t, func(ctx context.Context, _ *http.Request, _ func() net.Conn) (string, *task.Error) {
		close(begun)
		<-ctx.Done()
		close(ended)
		return "", &task.Error{Status: http.StatusGatewayTimeout, Cause: "canceled"}
	})
	c := s.dial(t)
	c.send("POST /function/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
	<-begun
	_ = c.Close()
	<-ended
}

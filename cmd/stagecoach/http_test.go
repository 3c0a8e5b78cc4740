package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// httpFn is the function echo-http, with more environment given as name, value.
func httpFn(name string, labels map[string]string, env ...string) fn {
	f := fn{name, "echo-http", labels, nil, map[string]string{"fprocess": "./echo-http", "mode": "http"}}
	for i := 0; i < len(env); i += 2 {
		f.env[env[i]] = env[i+1]
	}
	return f
}

// TestHTTPFunction checks what HTTP can do and a queue cannot carry.
func TestHTTPFunction(t *testing.T) {
	t.Parallel()
	start(t, "--log", "debug").speaksHTTP(t)
}

// speaksHTTP deploys functions that speak HTTP, and checks what they can do.
func (r *rig) speaksHTTP(t *testing.T) {
	r.deployAll(
		httpFn("web", map[string]string{"min": "1"}),
		httpFn("brief", map[string]string{"min": "1"}, "exec_timeout", "300ms"),
	)
	t.Run("request", func(t *testing.T) { r.sees(t) })
	t.Run("answer", func(t *testing.T) { r.answers(t) })
	t.Run("large", func(t *testing.T) {
		big := make([]byte, 20<<20)
		_, _ = rand.NewChaCha8([32]byte{}).Read(big) // never fails
		resp, err := r.HTTP.Post(r.Base+"/function/web/echo", "application/octet-stream", bytes.NewReader(big))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if got, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(got, big) {
			t.Errorf("%d bytes of %d came back, %v", len(got), len(big), err)
		}
	})
	t.Run("events", func(t *testing.T) { r.events2(t) })
	t.Run("upgrade", func(t *testing.T) { r.upgrades(t) })
	t.Run("framing", func(t *testing.T) { r.frames(t) })
	t.Run("client leaves", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := r.Do(ctx, http.MethodPost, "/function/web/slow?for=1m&name=gone", "", nil)
			ended <- err
		}()
		r.until(soon, "the function to have the call", func() bool { return strings.Contains(r.log.String(), "started: gone") })
		leave()
		if err := <-ended; err == nil {
			t.Error("an answer after a second of a minute's work")
		}
		r.until(soon, "the function to know", func() bool { return strings.Contains(r.log.String(), "canceled: gone") })
		r.until(soon, "the slot to be free", func() bool { return r.line("web").Running == 0 })
	})
	t.Run("timeouts", func(t *testing.T) {
		// On a busy machine, the time may be over before the program has the call.
		begun := func(name string) bool { return strings.Contains(r.log.String(), "started: "+name) }
		r.until(soon, "a call that begins and misses exec_timeout", func() bool {
			a := r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/brief/slow?for=1m&name=brief", "x")
			if !strings.Contains(string(a.Body), "exec_timeout, 300ms") {
				t.Errorf("%s", a.Body)
			}
			return begun("brief")
		})
		// A call that would be late is refused.
		r.until(soon, "a call that begins and misses its deadline", func() bool {
			a := r.send(http.MethodPost, "/function/web/slow?for=1m&name=late", "x", "X-Timeout", "1s")
			return a.Status == http.StatusGatewayTimeout && begun("late")
		})
		for _, name := range []string{"brief", "late"} {
			r.until(soon, "the function to know", func() bool { return strings.Contains(r.log.String(), "canceled: "+name) })
		}
	})
}

// sees checks what the function gets of a request.
func (r *rig) sees(t *testing.T) {
	for target, want := range map[string]string{
		"/function/web":                       "/",
		"/function/web/":                      "/",
		"/function/web/a%2Fb/%2e%2e/../c?x=%": "/a%2Fb/%2e%2e/../c?x=%",
		"/function/web.openfaas-fn//x?a;b":    "//x?a;b",
		"/function/web/../../system/info":     "/../../system/info",
	} {
		head, body := r.raw(t, "PATCH "+target+" HTTP/1.1\r\nHost: shop.example\r\nContent-Length: 2\r\nX-Forwarded-For: 10.0.0.1\r\n"+
			"Stagecoach-Direct: unix x /y\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Call-Id: mine\r\n\r\nhi")
		var got struct {
			Method, URI, Host, Body string
			Header                  http.Header
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatalf("%s: %v in %s %s", target, err, head, body)
		}
		if got.Method != "PATCH" || got.URI != want || got.Host != "shop.example" || got.Body != "hi" {
			t.Errorf("%s: the function sees %s %s at %s with %q", target, got.Method, got.URI, got.Host, got.Body)
		}
		h := got.Header
		if h.Get("X-Forwarded-For") != "10.0.0.1, 127.0.0.1" || h.Get("X-Forwarded-Host") != "shop.example" || h.Get("X-Call-Id") != "mine" ||
			h.Get("X-Hop") != "" || h.Get("Stagecoach-Direct") != "" || h.Get("X-Timeout") == "" {
			t.Errorf("%s: header %v", target, h)
		}
	}
}

// answers checks what the client gets of an answer.
func (r *rig) answers(t *testing.T) {
	for code, want := range map[int]int{200: 200, 204: 204, 302: 302, 418: 418, 503: 503} {
		resp, err := http.DefaultTransport.RoundTrip(request(t, http.MethodGet, fmt.Sprintf("%s/function/web/status?code=%d", r.Base, code), nil))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if h := resp.Header; resp.StatusCode != want || h.Get("X-Custom") != "kept" || h.Get("X-Openfaas-Internal") != "" || len(h["X-Call-Id"]) != 1 ||
			!strings.HasPrefix(h.Get("Server-Timing"), "web.wait;dur=") {
			t.Errorf("status %d: got %d, %v", code, resp.StatusCode, h)
		}
	}
	a := r.send(http.MethodHead, "/function/web/status?code=200", "")
	if a.Status != 200 || len(a.Body) != 0 || a.Header.Get("Content-Length") != "11" {
		t.Errorf("HEAD: %d, %v, %q", a.Status, a.Header, a.Body)
	}
	var early []int
	req := request(t, http.MethodGet, r.Base+"/function/web/hints", nil)
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		if h.Get("Link") != "" {
			early = append(early, code)
		}
		return nil
	}}))
	resp, err := r.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || len(early) != 1 || early[0] != 103 {
		t.Errorf("status %d after %v, want 200 after 103", resp.StatusCode, early)
	}
	req = request(t, http.MethodPost, r.Base+"/function/web/trailer", strings.NewReader("12345"))
	req.ContentLength, req.Trailer = -1, http.Header{"X-Sent": {"yes"}}
	if resp, err = r.HTTP.Do(req); err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(body) != "12345" || err != nil || resp.Trailer.Get("X-Sum") != "5" {
		t.Errorf("body %q, trailer %v, %v", body, resp.Trailer, err)
	}
	if a := r.must(http.StatusBadGateway, http.MethodGet, "/function/web/panic", ""); !strings.Contains(string(a.Body), "broke the connection") {
		t.Errorf("%s", a.Body)
	}
}

func request(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// events2 sends each event only after the client has answered the one before, so neither direction
// may be buffered.
func (r *rig) events2(t *testing.T) {
	body, say := io.Pipe()
	req := request(t, http.MethodPost, r.Base+"/function/web/events?n=3", body)
	resp, err := r.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprint("data: ", i) || !lines.Scan() {
			t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
		}
		if i < 2 {
			if _, err := say.Write([]byte("next\n")); err != nil {
				t.Fatal(err)
			}
		}
	}
	say.Close()
}

func (r *rig) upgrades(t *testing.T) {
	c, err := net.Dial("tcp", r.up.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	fmt.Fprint(c, "GET /function/web/upgrade HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n")
	b := bufio.NewReader(c)
	resp, err := http.ReadResponse(b, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	for _, line := range []string{"one\n", "two\n"} {
		fmt.Fprint(c, line)
		if got, err := b.ReadString('\n'); got != "got "+line || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

// TestHTTPReplicaLost checks that a request whose replica ends is tried on another one. It is not
// tried again if its body is so large that the gateway has not kept all of it.
func TestHTTPReplicaLost(t *testing.T) {
	t.Parallel()
	r := start(t, "--allow-host-network")
	web, doomed := httpFn("web", map[string]string{"min": "1"}), httpFn("doomed", map[string]string{"min": "3"})
	web.annotations = map[string]string{"network": "host"} // it asks a server of this test
	doomed.annotations = web.annotations
	r.deployAll(web, doomed)
	var asked atomic.Int32 // since the latest once
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusCreated)
		}
	}))
	defer s.Close()
	once := func() string { asked.Store(0); return s.URL }
	if a := r.must(http.StatusOK, http.MethodPost, "/function/web/exit?once="+once(), "small"); string(a.Body) != "alive\n" || asked.Load() != 2 {
		t.Errorf("%q after %d attempts, want alive after 2", a.Body, asked.Load())
	}
	a := r.must(http.StatusBadGateway, http.MethodPost, "/function/web/exit?read&once="+once(), strings.Repeat("x", 8<<20))
	if s := string(a.Body); !strings.Contains(s, `stage "web"`) || !strings.Contains(s, "bytes of the body") || a.Header.Get("X-Openfaas-Internal") == "" {
		t.Errorf("%v %s", a.Header, s)
	}
	if a, err := r.trySend(http.MethodPost, "/function/web/exit?begun&once="+once(), ""); err == nil {
		t.Errorf("half an answer is whole: %d %q", a.Status, a.Body)
	}
	r.until(soon, "a replica for each attempt", func() bool { return r.shows("doomed").AvailableReplicas == 3 })
	a = r.must(http.StatusBadGateway, http.MethodPost, "/function/doomed/exit", "")
	if !strings.Contains(string(a.Body), "ended 2 times under this call, 2 of them with no other call on it; the last cause: exit status 3") || !strings.Contains(string(a.Body), "last words") {
		t.Errorf("%s", a.Body)
	}
}

// TestHTTPFromZero checks that the first requests of many clients wait for a function that says
// when it is ready, or are told to try again. None fails.
func TestHTTPFromZero(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(httpFn("web", map[string]string{"min": "0", "zero": "true", "max": "2"}, "ready_after", "700ms"))
	const clients = 1000
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[int]int{}
	fastest, begin := time.Hour, time.Now() // of the first client, for which the replica starts
	for range clients {
		wg.Go(func() {
			a, err := r.trySend(http.MethodPost, "/function/web/echo", "x", "X-Timeout", "1m")
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			codes[a.Status]++
			if a.Status == http.StatusOK {
				fastest = min(fastest, time.Since(begin))
			} else if a.Status != http.StatusTooManyRequests || a.Header.Get("Retry-After") == "" {
				t.Errorf("status %d %v %s", a.Status, a.Header, a.Body)
			}
		})
	}
	wg.Wait()
	if codes[http.StatusOK] < clients/2 || fastest < 700*time.Millisecond {
		t.Errorf("statuses %v, the first after %v, want most 200, from 700ms on", codes, fastest)
	}
	t.Log(codes, fastest)
}

// TestHTTPRedeploy replaces a function under load, again and again: no request notices.
func TestHTTPRedeploy(t *testing.T) {
	t.Parallel()
	r := start(t)
	web := httpFn("web", map[string]string{"min": "2", "max": "4"})
	r.deployAll(web)
	// A replica that is replaced while it starts does not stop.
	r.until(soon, "two replicas", func() bool { return r.shows("web").AvailableReplicas == 2 })
	l := r.load(8, "/function/web/echo", func(body string, a client.Answer) error {
		if a.Status != http.StatusOK || string(a.Body) != body {
			return fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		return nil
	})
	for i := range 3 {
		l.turn()
		web.env = maps.Clone(web.env)
		web.env["generation"] = fmt.Sprint(i)
		r.deployAll(web)
		r.until(soon, "replicas of the new revision alone", func() bool {
			s := r.shows("web")
			return s.Replicas >= 2 && s.Replicas == s.AvailableReplicas && len(r.events("web", "stopped")) >= 2*(i+1)
		})
	}
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	t.Logf("%d requests, slowest answer %v", requests, l.slowest)
}

// TestOtherKinds runs functions of other kinds: with a process per request, as stages of a
// pipeline, and with async requests.
func TestOtherKinds(t *testing.T) {
	t.Parallel()
	r := start(t)
	process := func(name, mode, command string) fn {
		return fn{name, "echo-http", map[string]string{"max": "1"}, nil, map[string]string{"fprocess": command, "mode": mode}}
	}
	first, second := httpFn("first", nil), httpFn("second", nil)
	first.annotations = map[string]string{"pipeline": "both", "next": "second"}
	second.annotations = map[string]string{"pipeline": "both"}
	r.deployAll(first, second,
		process("cat", "streaming", "cat"), process("sort", "serializing", "sort"), process("env", "", "env"),
		process("bad", "serializing", "ls /nosuch"), process("long", "streaming", "sleep 60"),
	)
	for path, want := range map[string]string{"/function/cat": "b\na\n", "/function/sort": "a\nb\n", "/function/both/echo": "b\na\n"} {
		if a := r.must(http.StatusOK, http.MethodPost, path, "b\na\n"); string(a.Body) != want {
			t.Errorf("%s: %q, want %q", path, a.Body, want)
		}
	}
	a := r.must(http.StatusOK, http.MethodPut, "/function/env/a%20b?q=1", "x", "X-Custom", "v")
	for _, want := range []string{"Http_Method=PUT\n", "Http_Path=/a b\n", "Http_Query=q=1\n", "Http_X_Custom=v\n", "fprocess=env\n"} {
		if !strings.Contains(string(a.Body), want) {
			t.Errorf("no %q in %s", want, a.Body)
		}
	}
	if strings.Contains(string(a.Body), "STAGECOACH_") || strings.Contains(string(a.Body), r.state) {
		t.Errorf("the platform's words are in %s", a.Body)
	}
	if a := r.must(http.StatusInternalServerError, http.MethodPost, "/function/bad", ""); !strings.Contains(string(a.Body), "exit status 2: ls: ") {
		t.Errorf("%s", a.Body)
	}
	r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/long", "", "X-Timeout", "2s")
	r.until(soon, "the process to be ended", func() bool { return r.line("long").Running == 0 })
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/both/status?code=422", "x")
	if !strings.Contains(string(a.Body), `stage "first": the function answered 422: status 422`) {
		t.Errorf("%s", a.Body)
	}
	guessed := fn{name: "guessed", image: "echo-http", labels: map[string]string{"max": "1"}, env: map[string]string{"mode": "http"}}
	broken := guessed
	broken.name, broken.env = "broken", map[string]string{"mode": "http", "fprocess": "./no-such-program"}
	r.deployAll(guessed, broken)
	r.must(http.StatusOK, http.MethodPost, "/function/guessed/status?code=200", "x")
	a = r.send(http.MethodPost, "/function/broken", "", "X-Timeout", "1m")
	if a.Status < 500 || !strings.Contains(string(a.Body), "no-such-program") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
}

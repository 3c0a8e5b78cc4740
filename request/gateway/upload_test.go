package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// bubble is a gateway before one function with a few slots. All connections are pipes, so that it
// can run on virtual time.
type bubble struct {
	*front
	server  *http.Server
	conns   chan net.Conn
	done    chan struct{}
	slots   chan struct{}
	replica func(c net.Conn, in *bufio.Reader) // runs a request in its slot
	waiting atomic.Int64
	took    atomic.Int64 // number of slots taken so far
}

// newBubble is for use in [synctest.Test]. The caller calls end.
func newBubble(t *testing.T, slots int, change func(*Config)) (b *bubble, end func()) {
	t.Helper()
	b = &bubble{conns: make(chan net.Conn), done: make(chan struct{}), slots: make(chan struct{}, slots)}
	b.replica = func(c net.Conn, in *bufio.Reader) {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			text := string(body) + r.Trailer.Get("Sum")
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		}
	}
	v := &Rendezvous{waiting: map[string]*meeting{}, greeting: map[net.Conn]struct{}{}}
	b.front = newFront(t, func(c *Config) {
		c.Rendezvous, c.HTTP, c.Stall, c.Lines, c.InFlight = v, func(pipeline.Key) bool { return true }, 30*time.Second, b, 10_000
		c.Log = slog.New(slog.DiscardHandler)
		if change != nil {
			change(c)
		}
	})
	b.front.invoker.f = func(ctx context.Context, r task.Request) (*task.Response, *task.Error) {
		canceled := &task.Error{Status: http.StatusGatewayTimeout, Cause: "canceled"}
		b.waiting.Add(1)
		select {
		case b.slots <- struct{}{}:
			b.waiting.Add(-1)
			b.took.Add(1)
			defer func() { <-b.slots }()
		case <-ctx.Done():
			b.waiting.Add(-1)
			return nil, canceled
		}
		near, far := net.Pipe()
		defer far.Close()
		defer context.AfterFunc(ctx, func() { _ = far.Close() })()
		v.mu.Lock()
		m := v.waiting[strings.SplitN(header(r, task.HeaderDirect)[0], " ", 3)[1]]
		v.mu.Unlock()
		if m == nil {
			return nil, canceled
		}
		m.conns <- near
		b.replica(far, bufio.NewReader(far))
		return &task.Response{}, nil
	}
	b.server = &http.Server{Handler: b.front.handler}
	var served sync.WaitGroup
	served.Go(func() { _ = b.server.Serve(b) })
	return b, func() {
		if err := b.server.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		served.Wait()
		if n := len(b.front.stalls.of); n != 0 {
			t.Errorf("%d clients are thought to have stalled uploads", n)
		}
		if n := b.front.inFlight.Load(); n != 0 {
			t.Errorf("%d requests in flight", n)
		}
	}
}

// Load implements Lines.
func (b *bubble) Load(pipeline.Key) task.Load {
	return task.Load{Waiting: int(b.waiting.Load()), Servers: cap(b.slots)}
}

// Accept implements net.Listener.
func (b *bubble) Accept() (net.Conn, error) {
	select {
	case c := <-b.conns:
		return c, nil
	case <-b.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (b *bubble) Close() error { close(b.done); return nil }

// Addr implements net.Listener.
func (b *bubble) Addr() net.Addr { return &net.TCPAddr{} }

// from is a connection with a client's address.
type from struct {
	net.Conn
	ip net.IP
}

func (f from) RemoteAddr() net.Addr { return &net.TCPAddr{IP: f.ip, Port: 4711} }

// speaker is a client on a pipe.
type speaker struct {
	net.Conn
	in *bufio.Reader
}

// dial connects from the n-th client's address and sends text.
func (b *bubble) dial(n int, text string) *speaker {
	near, far := net.Pipe()
	b.conns <- from{far, net.IPv4(10, 0, byte(n>>8), byte(n))}
	s := &speaker{near, bufio.NewReader(near)}
	s.send(text)
	return s
}

func (s *speaker) send(text string) { _, _ = io.WriteString(s, text) }

// answer reads an answer and closes the connection. after is how long the answer took.
func (s *speaker) answer() (status int, body string, after time.Duration) {
	defer s.Close()
	start := time.Now()
	resp, err := http.ReadResponse(s.in, nil)
	if err != nil {
		return 0, err.Error(), time.Since(start)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp.StatusCode, err.Error(), time.Since(start)
	}
	return resp.StatusCode, string(text), time.Since(start)
}

const (
	silent = post + "Content-Length: 1000\r\n\r\n"
	good   = post + "Content-Length: 5\r\n\r\nhello"
)

// TestSilentUploadsDelayNobody checks that clients that announce bodies but send at most a byte
// neither delay another client's request nor take all slots of the function.
func TestSilentUploadsDelayNobody(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		slots, uploads int
		addresses      int
		text           string
		took           int64         // most slots that uploads may take
		within         time.Duration // longest wait of the good request
	}{
		"of one client":             {8, 400, 1, silent, 2, 0},
		"of one client, one slot":   {1, 400, 1, silent, 1, 1 * time.Second},
		"in chunks":                 {8, 400, 1, chunked, 2, 0},
		"that expect to be invited": {8, 400, 1, post + "Expect: 100-continue\r\nContent-Length: 9\r\n\r\n", 2, 0},
		"of many clients":           {8, 400, 400, silent, 400, 1 * time.Second},
		"after a byte":              {8, 400, 1, silent + "x", 40, 1 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b, end := newBubble(t, tc.slots, nil)
				defer end()
				var answers sync.WaitGroup
				var timedOut atomic.Int64
				for i := range tc.uploads {
					s := b.dial(i%tc.addresses, tc.text)
					answers.Go(func() {
						if strings.Contains(tc.text, "Expect") {
							_, _, _ = s.in.ReadLine()
							_, _, _ = s.in.ReadLine()
						}
						if status, body, _ := s.answer(); status == http.StatusRequestTimeout && strings.Contains(body, "body: nothing came for ") {
							timedOut.Add(1)
						}
					})
				}
				time.Sleep(1500 * time.Millisecond)
				if status, body, after := b.dial(0, good).answer(); status != http.StatusOK || body != "hello" || after > tc.within {
					t.Errorf("the good request: %d %q after %v, want 200 within %v", status, body, after, tc.within)
				}
				if n := b.took.Load() - 1; n > tc.took {
					t.Errorf("uploads took %d slots, want at most %d", n, tc.took)
				}
				answers.Wait() // uploads that delay nobody end by Stall
				if n := timedOut.Load(); n != int64(tc.uploads) {
					t.Errorf("%d of %d uploads were answered 408", n, tc.uploads)
				}
			})
		})
	}
}

// TestUploadStartsTaskWithFirstBytes checks that a task starts with its body's first bytes, or
// after a second.
func TestUploadStartsTaskWithFirstBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 4, nil)
		defer end()
		s := b.dial(0, silent)
		time.Sleep(lateTime - time.Millisecond)
		synctest.Wait()
		if n := b.took.Load(); n != 0 {
			t.Errorf("%d slots for a request of which nothing came, want none before a second", n)
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if n := b.took.Load(); n != 1 {
			t.Errorf("%d slots after a second, want 1", n)
		}
		s.send(strings.Repeat("x", 1000))
		if status, body, _ := s.answer(); status != http.StatusOK || len(body) != 1000 {
			t.Errorf("%d, %d bytes, want all that was sent", status, len(body))
		}

		s = b.dial(0, silent)
		time.Sleep(lateTime / 2)
		s.send("x")
		synctest.Wait()
		if n := b.took.Load(); n != 2 {
			t.Errorf("%d slots with the first byte, want 2", n)
		}
		s.send(strings.Repeat("x", 999))
		if status, body, _ := s.answer(); status != http.StatusOK || len(body) != 1000 {
			t.Errorf("%d, %d bytes, want all that was sent", status, len(body))
		}
	})
}

// TestHarmlessSilenceEndsNoUpload checks that a silence ends no upload if it is short or delays no
// other request.
func TestHarmlessSilenceEndsNoUpload(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		slots  int
		pauses []time.Duration
		others bool // other requests wait
		want   int
	}{
		"silent, nobody waits":      {1, []time.Duration{20 * time.Second, 20 * time.Second}, false, http.StatusOK},
		"slow, others wait":         {1, []time.Duration{1900 * time.Millisecond, 1900 * time.Millisecond, 1900 * time.Millisecond}, true, http.StatusOK},
		"silent, others wait":       {1, []time.Duration{0, 3 * time.Second}, true, http.StatusRequestTimeout},
		"silent for all that stall": {1, []time.Duration{0, 31 * time.Second}, false, http.StatusRequestTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b, end := newBubble(t, tc.slots, nil)
				defer end()
				s := b.dial(0, chunked+"1\r\na\r\n")
				synctest.Wait() // the first request has the slot
				var others sync.WaitGroup
				if tc.others {
					o := b.dial(1, good)
					others.Go(func() {
						if status, body, _ := o.answer(); status != http.StatusOK || body != "hello" {
							t.Errorf("the other one: %d %q", status, body)
						}
					})
				}
				others.Go(func() {
					for _, p := range tc.pauses {
						time.Sleep(p)
						s.send("1\r\na\r\n")
					}
					s.send("0\r\n\r\n")
				})
				status, body, _ := s.answer()
				if want := strings.Repeat("a", 1+len(tc.pauses)); status != tc.want || status == http.StatusOK && body != want {
					t.Errorf("%d %q, want %d", status, body, tc.want)
				}
				others.Wait()
			})
		})
	}
}

// TestUploadThatStallsInTheLineFails checks that a client that is silent for Stall while its
// request waits gets an error, even if nobody else waits.
func TestUploadThatStallsInTheLineFails(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"nothing": silent, "a byte": silent + "x"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b, end := newBubble(t, 1, nil)
				defer end()
				leave := make(chan struct{})
				b.replica = func(net.Conn, *bufio.Reader) { <-leave }
				first := b.dial(0, good) // has the slot
				synctest.Wait()
				status, body, after := b.dial(1, text).answer()
				if status != http.StatusRequestTimeout || !strings.HasPrefix(body, "body: nothing came for 30s") || after > 32*time.Second {
					t.Errorf("%d %q after %v, want 408", status, body, after)
				}
				close(leave)
				_ = first.Close()
			})
		})
	}
}

// TestUploadsThatExpect100GetItAtOnce checks that a client that waits for the 100 gets it at once,
// however many requests wait.
func TestUploadsThatExpect100GetItAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		first := b.dial(0, chunked+"1\r\na\r\n") // has the slot
		synctest.Wait()
		start := time.Now()
		s := b.dial(1, post+"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
		if line, _, err := s.in.ReadLine(); string(line) != "HTTP/1.1 100 Continue" || err != nil || time.Since(start) > 0 {
			t.Errorf("%q, %v after %v, want 100 at once", line, err, time.Since(start))
		}
		_, _, _ = s.in.ReadLine()
		s.send("hello")
		synctest.Wait()
		first.send("0\r\n\r\n")
		if status, body, _ := first.answer(); status != http.StatusOK || body != "a" {
			t.Errorf("the first one: %d %q", status, body)
		}
		if status, body, after := s.answer(); status != http.StatusOK || body != "hello" || after > 0 {
			t.Errorf("%d %q after %v", status, body, after)
		}
	})
}

// TestUploadsMayFollowTheAnswer checks a client that sends nothing before the answer begins. Its
// task starts after a second, and from then on it may be silent while others wait.
func TestUploadsMayFollowTheAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		plain := b.replica
		b.replica = func(c net.Conn, in *bufio.Reader) {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			body, err := io.ReadAll(r.Body)
			if err == nil {
				_, _ = fmt.Fprintf(c, "%x\r\n%s\r\n0\r\n\r\n", len(body), body)
			}
		}
		s := b.dial(0, chunked)
		resp, err := http.ReadResponse(s.in, nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v, %v", resp, err)
		}
		b.replica = plain
		other := b.dial(1, good)
		time.Sleep(10 * time.Second)
		s.send("5\r\nhello\r\n0\r\n\r\n")
		if body, err := io.ReadAll(resp.Body); string(body) != "hello" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
		_ = s.Close()
		if status, _, _ := other.answer(); status != http.StatusOK {
			t.Errorf("the other one: %d", status)
		}
	})
}

// TestWaitingUploadsAreReadAhead checks that the part of a body that arrived while its request
// waited reaches the function at once, before the rest arrives.
func TestWaitingUploadsAreReadAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		first := b.dial(0, chunked+"1\r\na\r\n") // has the slot
		synctest.Wait()
		s := b.dial(1, chunked+"5\r\nhello\r\n")
		time.Sleep(1500 * time.Millisecond) // its body is read ahead
		b.replica = func(c net.Conn, in *bufio.Reader) {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			head := make([]byte, 5)
			if _, err := io.ReadFull(r.Body, head); err != nil {
				return
			}
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%s\r\n", head)
			if rest, err := io.ReadAll(r.Body); err == nil {
				_, _ = fmt.Fprintf(c, "%x\r\n%s\r\n0\r\n\r\n", len(rest), rest)
			}
		}
		first.send("0\r\n\r\n")
		if status, body, _ := first.answer(); status != http.StatusOK || body != "a" {
			t.Errorf("the first one: %d %q", status, body)
		}
		start := time.Now()
		resp, err := http.ReadResponse(s.in, nil)
		if err != nil || resp.StatusCode != http.StatusOK || time.Since(start) > 0 {
			t.Fatalf("%v, %v after %v, want 200 at once", resp, err, time.Since(start))
		}
		s.send("6\r\n world\r\n0\r\n\r\n")
		if body, err := io.ReadAll(resp.Body); string(body) != "hello world" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
		_ = s.Close()
	})
}

// TestStarvedServerIsNoSilenceOfItsClients checks that time in which the server had no processor
// does not count as the client's silence.
func TestStarvedServerIsNoSilenceOfItsClients(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		b.waiting.Store(2) // one more request waits
		defer b.waiting.Store(0)
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
		u := &upload{g: b.front.Gateway, body: &source{made: time.Now()}, endExchange: func(error) {}, cancel: func() {}}
		u.begun.Store(true)
		u.timer = time.AfterFunc(time.Hour, func() {}) // the test calls look itself
		u.due = time.Now().Add(lateTime)
		u.body.since.Store(1)
		for i := range 3 {
			time.Sleep(10 * time.Second)
			u.look(r)
			if terr := u.refusal(); terr != nil || u.stalled && i == 0 {
				t.Fatalf("%v, stalled %t, after %d looks that came late", terr, u.stalled, i+1)
			}
		}
		for looks := 1; u.refusal() == nil; looks++ {
			time.Sleep(time.Until(u.due))
			u.look(r)
			if looks > int(silentTime/lookTime) {
				t.Fatalf("%d looks in time, and the client has not been silent", looks)
			}
		}
	})
}

// TestTrailerOfLateBodyReachesFunction checks that the trailer of a late body reaches the function.
func TestTrailerOfLateBodyReachesFunction(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"a body": "1\r\na\r\n0\r\nSum: 1\r\n\r\n", "none": "0\r\nSum: 1\r\n\r\n"} {
		for _, pause := range []time.Duration{0, lateTime, lateTime + time.Second} {
			t.Run(fmt.Sprint(name, pause), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					b, end := newBubble(t, 1, nil)
					defer end()
					s := b.dial(0, post+"Trailer: Sum\r\nTransfer-Encoding: chunked\r\n\r\n")
					time.Sleep(pause)
					s.send(body)
					if status, text, _ := s.answer(); status != http.StatusOK || !strings.HasSuffix(text, "1") {
						t.Errorf("%d %q, want the trailer at its end", status, text)
					}
				})
			})
		}
	}
}

// TestClientsBehindTrustedProxyCountSeparately checks that clients behind a trusted proxy count
// separately, and that all clients behind any other proxy count as one. A function is never a
// trusted proxy.
func TestClientsBehindTrustedProxyCountSeparately(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		trusted string
		inside  bool
		want    int64
	}{
		"trusted":    {"10.0.0.0/8", false, 8},
		"others":     {"192.0.2.0/24", false, 2},
		"a function": {"10.0.0.0/8", true, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				proxies, err := peer.ParseProxies([]string{tc.trusted})
				if err != nil {
					t.Fatal(err)
				}
				b, end := newBubble(t, 8, func(c *Config) { c.Proxies = proxies })
				defer end()
				if tc.inside {
					b.server.Handler = b.front.InsideHandler(http.NotFoundHandler())
				}
				var all []*speaker
				for i := range 8 {
					all = append(all, b.dial(0, fmt.Sprintf("%sX-Forwarded-For: 192.0.2.1, 198.51.100.%d\r\nContent-Length: 9\r\n\r\n", post, i)))
				}
				var answers sync.WaitGroup
				for _, s := range all {
					answers.Go(func() { _, _, _ = s.answer() })
				}
				time.Sleep(lateTime + time.Millisecond)
				synctest.Wait()
				if n := b.took.Load(); n != tc.want {
					t.Errorf("%d stalled uploads have slots, want %d", n, tc.want)
				}
				answers.Wait()
			})
		})
	}
}

// TestClientThatLeavesBeforeItsBodyTakesNoSlot checks that a client that leaves before its body has
// begun takes no slot.
func TestClientThatLeavesBeforeItsBodyTakesNoSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		for _, pause := range []time.Duration{0, lateTime / 2, lateTime, lateTime + time.Second} {
			s := b.dial(0, silent)
			time.Sleep(pause)
			_ = s.Close()
			synctest.Wait()
			if n, slots := b.front.inFlight.Load(), len(b.slots); n != 0 || slots != 0 {
				t.Errorf("after %v: %d requests in flight, %d in slots", pause, n, slots)
			}
		}
	})
}

// TestRefusedUploadEndsItsConnection checks that a refused upload ends with its connection: nobody
// waits for the rest of its body or takes it for a request.
func TestRefusedUploadEndsItsConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, end := newBubble(t, 1, nil)
		defer end()
		first := b.dial(0, silent)
		start := time.Now()
		time.Sleep(time.Millisecond)
		second := b.dial(0, silent)
		resp, err := http.ReadResponse(second.in, nil)
		if err != nil || resp.StatusCode != http.StatusRequestTimeout || !resp.Close {
			t.Fatalf("%v, %v, want 408 and Connection: close", resp, err)
		}
		if _, err := io.Copy(io.Discard, second.in); err != nil {
			t.Error(err)
		}
		// net/http gives the client half a second to read.
		if took := time.Since(start); took > lateTime+time.Second {
			t.Errorf("the connection was closed after %v, want it with the answer", took)
		}
		_ = second.Close()
		first.send(strings.Repeat("x", 1000))
		if status, _, _ := first.answer(); status != http.StatusOK {
			t.Errorf("the first one: %d", status)
		}
	})
}

package load

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// receiver receives the callbacks of async requests.
type receiver struct {
	url  string
	srv  *http.Server
	done chan struct{}

	mu         sync.Mutex
	next       int
	waiting    map[string]chan callback // by call id
	called     map[string]struct{}      // call ids that had a callback
	duplicates map[string]int64         // by target
	prefix     string                   // of call ids, to recognize those of other runs
}

// callback is the first callback of a request.
type callback struct {
	at     time.Time
	status int
	head   string
}

func newReceiver(addr string) (*receiver, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("callbacks: %w", err)
	}
	c := &receiver{
		url: "http://" + l.Addr().String() + "/", done: make(chan struct{}),
		waiting: map[string]chan callback{}, called: map[string]struct{}{}, duplicates: map[string]int64{},
		prefix: "load-" + strconv.FormatInt(time.Now().UnixNano(), 36),
	}
	c.srv = &http.Server{Handler: c, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute}
	go func() { defer close(c.done); _ = c.srv.Serve(l) }() // ends with close, which waits for it
	return c, nil
}

func (c *receiver) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if c.srv.Shutdown(ctx) != nil {
		_ = c.srv.Close()
	}
	<-c.done
}

// expect returns a new request id and the channel for its first callback.
func (c *receiver) expect(target string) (id string, back <-chan callback) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	id = c.prefix + "-" + strconv.Itoa(c.next) + "-" + target
	ch := make(chan callback, 1)
	c.waiting[id] = ch
	return id, ch
}

// forget records that nobody waits for the request any more.
func (c *receiver) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
}

func (c *receiver) duplicatesOf(target string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.duplicates[target]
}

// ServeHTTP takes a callback.
func (c *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at := time.Now()
	head, _ := io.ReadAll(io.LimitReader(r.Body, maxExample)) // enough for an example
	_, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, maxBody))
	id := r.Header.Get("X-Call-Id")
	rest, ours := strings.CutPrefix(id, c.prefix+"-")
	_, target, _ := strings.Cut(rest, "-")
	if !ours {
		http.Error(w, fmt.Sprintf("call %q: not of this run", id), http.StatusNotFound)
		return
	}
	status, err := strconv.Atoi(r.Header.Get("X-Function-Status"))
	if err != nil {
		// Stagecoach and OpenFaaS set the header. Without it, the callback itself counts as a success.
		status = http.StatusOK
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, again := c.called[id]; again {
		c.duplicates[target]++
		return
	}
	c.called[id] = struct{}{}
	if ch := c.waiting[id]; ch != nil {
		ch <- callback{at, status, string(head)}
	}
}

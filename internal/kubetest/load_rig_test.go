package kubetest

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Kinds of requests of a load.
const (
	syncWorkers  = 8
	asyncWorkers = 1
	// attempts is how often a client tries a request, at most.
	attempts = 2
	// told is how many failures a log shows.
	told = 5
)

// load is requests from clients that try each request twice at most. They call two stages: noop,
// and hold, which takes a while. Half of the clients use a connection per request.
type load struct {
	i      *installed
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	begun  time.Time
	back   *callbacks
	least  int           // sync requests that it has at least
	enough chan struct{} // closed once that many have ended

	mu       sync.Mutex
	ended    int             // sync requests
	took     []time.Duration // of those that succeeded
	longest  time.Duration
	slowest  string            // path and time of the longest
	again    []string          // why attempts failed
	failed   []string          // why requests failed
	accepted map[string]string // async requests, by body: their ids
}

// callbacks is a server that gets the results of async requests.
type callbacks struct {
	url string

	mu    sync.Mutex
	told  map[string]int // by result
	wrong []string
}

// serveCallbacks starts the server.
func serveCallbacks(t *testing.T, c *Cluster) *callbacks {
	t.Helper()
	l := c.net.Clients.Listen(0)
	back := &callbacks{url: "http://" + l.Addr().String(), told: map[string]int{}}
	//nolint:gosec // without limits, for a test
	s := &http.Server{Handler: back}
	go func() { _ = s.Serve(l) }() // until the test ends
	t.Cleanup(func() { _ = s.Close() })
	return back
}

// ServeHTTP implements http.Handler.
func (b *callbacks) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	b.mu.Lock()
	defer b.mu.Unlock()
	if status := r.Header.Get("X-Function-Status"); err != nil || status != "200" {
		b.wrong = append(b.wrong, fmt.Sprintf("callback with status %s, %q, %v", status, text, err))
		return
	}
	b.told[string(text)]++
}

// missing returns how many of the accepted requests have had no callback, and how many have had
// several.
func (b *callbacks) missing(accepted map[string]string) (lost []string, twice int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for body, id := range accepted {
		switch n := b.told[body]; {
		case n == 0:
			lost = append(lost, id)
		case n > 1:
			twice++
		}
	}
	return lost, twice
}

// load starts the clients.
func (i *installed) load(back *callbacks, least int) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{i: i, ctx: ctx, cancel: cancel, begun: time.Now(), back: back, accepted: map[string]string{}, least: least, enough: make(chan struct{})}
	for n := range syncWorkers {
		call := l.noop
		if n >= syncWorkers/2 {
			call = l.hold
		}
		l.group.Go(func() { l.client(n%2 == 0, call) })
	}
	for n := range asyncWorkers {
		l.group.Go(func() { l.client(n%2 == 0, l.later) })
	}
	return l
}

// client does f with a client of its own until the load ends.
func (l *load) client(kept bool, f func(c *http.Client, n int)) {
	way := &http.Transport{DialContext: l.i.Dial, DisableKeepAlives: !kept}
	defer way.CloseIdleConnections()
	c := &http.Client{Transport: way, Timeout: time.Minute}
	for n := 0; l.ctx.Err() == nil; n++ {
		f(c, n)
	}
}

// answer is the answer to a request.
type answer struct {
	status   int
	text, id string
}

// try sends a request until an attempt has the wanted answer. It reports whether one had.
func (l *load) try(c *http.Client, path, body string, good func(a answer) bool) bool {
	what, wait := "", time.Duration(0)
	for range attempts {
		time.Sleep(wait)
		req, err := http.NewRequest(http.MethodPost, "http://"+l.i.gateway+path, strings.NewReader(body))
		if err != nil {
			panic(err)
		}
		req.Header.Set("X-Callback-Url", l.back.url)
		begun := time.Now()
		resp, err := c.Do(req)
		if err == nil {
			text, readErr := io.ReadAll(resp.Body)
			resp.Body.Close()
			if readErr == nil && good(answer{resp.StatusCode, string(text), resp.Header.Get("X-Call-Id")}) {
				return true
			}
			err = fmt.Errorf("status %d, %.200q, %w", resp.StatusCode, text, cmp.Or(readErr, io.EOF))
		}
		if resp != nil { // 503 says when to come back
			after, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
			wait = time.Duration(min(after, 5)) * time.Second
		}
		what = fmt.Sprintf("%s after %v: %v", time.Now().UTC().Format("15:04:05.000"), time.Since(begun).Round(time.Millisecond), err)
		l.mu.Lock()
		l.again = append(l.again, what)
		l.mu.Unlock()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, path+": "+what)
	return false
}

func (l *load) noop(c *http.Client, n int) {
	body := fmt.Sprint("request ", n)
	l.call(c, "/function/noop", body, func(a answer) bool { return a.status == http.StatusOK && a.text == body })
}

func (l *load) hold(c *http.Client, _ int) {
	l.call(c, "/function/hold", "hello", func(a answer) bool { return a.status == http.StatusOK })
}

// call makes a sync request.
func (l *load) call(c *http.Client, path, body string, good func(answer) bool) {
	begun := time.Now()
	ok := l.try(c, path, body, good)
	l.mu.Lock()
	defer l.mu.Unlock()
	if took := time.Since(begun); ok {
		l.took = append(l.took, took)
		if took > l.longest {
			l.longest, l.slowest = took, fmt.Sprintf("%s at %s", path, begun.UTC().Format("15:04:05.000"))
		}
	}
	if l.ended++; l.ended == l.least {
		close(l.enough)
	}
}

// later makes an async request.
func (l *load) later(c *http.Client, n int) {
	body, id := fmt.Sprintf("id-%d-%d", l.begun.UnixNano(), n), ""
	if l.try(c, "/async-function/noop", body, func(a answer) bool { id = a.id; return a.status == http.StatusAccepted }) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.accepted[body] = id
	}
}

// under makes a load while f runs, and goes on until least sync requests have ended. No request may
// fail after its attempts, and no async request may be lost.
func (i *installed) under(t *testing.T, what string, least int, back *callbacks, f func()) {
	t.Helper()
	l := i.load(back, least)
	defer l.cancel()
	f()
	done := time.Since(l.begun)
	<-l.enough // the load goes on meanwhile
	l.cancel()
	l.group.Wait()
	ended := time.Now()
	i.Await("all callbacks "+what, func() (string, bool) {
		lost, _ := back.missing(l.accepted)
		if len(lost) > 0 && time.Since(ended) > time.Minute {
			i.inspect(lost)
		}
		return fmt.Sprint(len(lost), " of ", len(l.accepted), " are missing: ", lost), len(lost) == 0
	})
	_, twice := back.missing(l.accepted)
	slices.Sort(l.took)
	at := func(q float64) time.Duration {
		if len(l.took) == 0 {
			return 0
		}
		return l.took[int(q*float64(len(l.took)-1))].Round(100 * time.Microsecond)
	}
	t.Logf("| %s | %v | %d | %d | %d | %v | %v | %v | %d | 0 | %d |", what, done.Round(100*time.Millisecond), len(l.took), len(l.failed), len(l.again),
		at(0.5), at(0.99), at(1), len(l.accepted), twice)
	t.Log("longest: ", l.slowest)
	for _, again := range l.again[:min(len(l.again), told)] {
		t.Log("tried again: ", again)
	}
	if len(l.failed) > 0 {
		t.Errorf("%s: %d requests failed, such as:\n%s", what, len(l.failed), strings.Join(l.failed[:min(len(l.failed), told)], "\n"))
	}
	back.mu.Lock()
	defer back.mu.Unlock()
	if len(back.wrong) > 0 {
		t.Errorf("%s: %d results of async requests are wrong: %v", what, len(back.wrong), back.wrong)
		back.wrong = nil
	}
}

// inspect logs what is known of async requests without a callback, and ends the test.
func (i *installed) inspect(lost []string) {
	i.t.Helper()
	for _, id := range lost[:min(len(lost), 3)] {
		out, err := i.try("call", id)
		i.t.Log(id, out, err)
	}
	for _, pod := range strings.Fields(i.Kubectl("get", "pods", "-n", "faas", "-l", "app.kubernetes.io/component=control", "-o", "jsonpath={.items[*].metadata.name}")) {
		for line := range strings.Lines(i.Kubectl("logs", "-n", "faas", pod, "--tail=-1")) {
			if !strings.Contains(line, `"INFO"`) || strings.Contains(line, "leads") || strings.Contains(line, "stands by") || strings.Contains(line, lost[0]) {
				i.t.Log(pod, " ", strings.TrimSpace(line))
			}
		}
	}
	i.t.Fatalf("%d async requests are lost: %v", len(lost), lost)
}

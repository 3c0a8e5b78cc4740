package upgradetest_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// load is requests of all kinds to both control planes.
type load struct {
	c    *cluster
	back *httptest.Server // receives callbacks
	all  []kind           // of sync requests
	ctx  context.Context  // ends with stop
	stop func()
	wg   sync.WaitGroup

	mu       sync.Mutex
	change   string          // what is replaced now; empty: nothing
	excused  bool            // sync requests may fail: the leader is replaced
	accepted map[string]bool // async requests
	told     map[string]int
	again    int                       // callbacks that are marked as repetitions
	counts   map[string]map[string]int // sync requests by change and result
	slowest  map[string]time.Duration  // of sync requests, by change
	wrong    []string
}

// kind is a kind of sync request.
type kind struct {
	path   string
	pause  time.Duration
	answer string // a part of the answer; empty: the body
}

var kinds = []kind{
	{path: "/function/echo"},
	{path: "/function/chain", answer: "waited "},
	{path: "/function/web/echo"},
	{path: "/function/secretive", answer: `"secrets":{"key":"6 bytes"}`},
	{path: "/function/asleep", pause: 1500 * time.Millisecond, answer: "waited "},
}

// run begins the load.
func (c *cluster) run(t *testing.T) *load {
	l := &load{
		c: c, accepted: map[string]bool{}, told: map[string]int{}, counts: map[string]map[string]int{},
		slowest: map[string]time.Duration{},
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.back = httptest.NewServer(l)
	t.Cleanup(func() { l.stop(); l.wg.Wait(); l.back.Close() })
	for i := range c.controls {
		l.wg.Go(func() { l.async(i) })
	}
	for _, k := range kinds {
		l.add(k)
	}
	return l
}

// add begins to send sync requests of a kind, once each control plane has answered one.
func (l *load) add(k kind) {
	l.c.t.Helper()
	for _, p := range l.c.controls {
		l.answers(p, k)
	}
	l.all = append(l.all, k)
	for i := range l.c.controls {
		l.wg.Go(func() { l.sync(i, k) })
	}
}

// answers waits until a control plane answers a request of a kind.
func (l *load) answers(p *process, k kind) {
	l.c.t.Helper()
	var status int
	var got string
	var err error
	defer func() {
		if l.c.t.Failed() {
			l.c.t.Logf("%s: %s: status %d, %v: %.300s", p.name, k.path, status, err, got)
		}
	}()
	proctest.Until(l.c.t, p.name+" to answer "+k.path, func() bool {
		status, got, err = p.at(k.path, "x")
		return err == nil && status == http.StatusOK
	})
}

// pause waits, and reports whether the load goes on.
func (l *load) pause(d time.Duration) bool {
	select {
	case <-l.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// bases returns the control planes, that with the index i first. A client uses another one if the
// first one cannot be reached, as behind a proxy.
func (l *load) bases(i int) []*process { return slices.Concat(l.c.controls[i:], l.c.controls[:i]) }

// sync sends sync requests, one after the other.
func (l *load) sync(first int, k kind) {
	for n := 0; l.pause(k.pause + 20*time.Millisecond); n++ {
		body := fmt.Sprintf("request %d of client %d", n, first)
		want := cmp.Or(k.answer, body)
		from, begun := l.during(), time.Now()
		status, got, err := 0, "", error(nil)
		cut := 0
		for _, p := range l.bases(first) {
			if status, got, err = p.at(k.path, body); err == nil {
				break
			}
			cut++
		}
		l.count(from, k.path, status, got, want, err, cut, time.Since(begun))
	}
}

// at sends a request to the present address of a control plane.
func (p *process) at(path, body string, header ...string) (int, string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return p.send(ctx, http.MethodPost, path, body, header...)
}

// phase is what was replaced when a request began.
type phase struct {
	change  string
	excused bool
}

func (l *load) during() phase {
	l.mu.Lock()
	defer l.mu.Unlock()
	return phase{l.change, l.excused}
}

func (l *load) count(from phase, path string, status int, got, want string, err error, cut int, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change, excused := l.change, from.excused || l.excused
	if change == "" || from.excused && !l.excused {
		change = from.change
	}
	result := fmt.Sprint(status)
	switch {
	case err != nil:
		result = "none"
		l.fault(excused, "%s, %s: %v", change, path, err)
	case status == http.StatusOK && !strings.Contains(got, want):
		result = "wrong"
		l.fault(false, "%s, %s: %.200q, want %q", change, path, got, want)
	case status == http.StatusBadGateway, status == http.StatusServiceUnavailable:
		l.fault(excused, "%s, %s: status %d: %.200s", change, path, status, got)
	case status != http.StatusOK:
		l.fault(false, "%s, %s: status %d: %.200s", change, path, status, got)
	}
	if cut > 0 && err == nil {
		result += " of the other"
	}
	if l.counts[change] == nil {
		l.counts[change] = map[string]int{}
	}
	l.counts[change][result]++
	l.slowest[change] = max(l.slowest[change], took)
}

func (l *load) fault(excused bool, format string, args ...any) {
	if !excused && len(l.wrong) < 20 {
		l.wrong = append(l.wrong, fmt.Sprintf(format, args...))
	}
}

// async sends async requests. Those that are accepted must be called back.
func (l *load) async(first int) {
	for n := 0; l.pause(30 * time.Millisecond); n++ {
		name := fmt.Sprintf("%d-%d", first, n)
		for _, p := range l.bases(first) {
			if status, _, err := p.at("/async-function/"+l.target(n), body(name), "X-Callback-Url", l.back.URL+"/?"+name); err == nil {
				if status == http.StatusAccepted {
					l.mu.Lock()
					l.accepted[name] = true
					l.mu.Unlock()
				}
				break
			}
		}
	}
}

func (l *load) target(n int) string { return []string{"echo", "plain"}[n%2] }

// body is the body of an async request: about one in 40 is large.
func body(name string) string {
	if strings.HasSuffix(name, "17") {
		return strings.Repeat(name+"\n", 300<<10/len(name))
	}
	return name
}

// ServeHTTP takes a callback.
func (l *load) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return // the sender has ended
	}
	name := r.URL.RawQuery
	l.mu.Lock()
	defer l.mu.Unlock()
	again := r.Header.Get("X-Redelivered") == "true"
	if again {
		l.again++
	}
	if l.told[name]++; l.told[name] > 1 && !again {
		l.fault(false, "callback of %s came again without X-Redelivered", name)
	}
	if s := r.Header.Get("X-Function-Status"); s != "200" || string(b) != body(name) {
		l.fault(false, "callback of %s: status %s, %d bytes: %.100s", name, s, len(b), b)
	}
	w.WriteHeader(http.StatusNoContent)
}

// replace does something while requests are counted under its name. If excused is set, sync
// requests may fail until each kind of request has succeeded again.
func (l *load) replace(change string, excused bool, do func()) {
	l.c.t.Helper()
	l.mu.Lock()
	l.change, l.excused = change, excused
	l.mu.Unlock()
	begun := time.Now()
	do()
	done := time.Since(begun)
	l.settle()
	l.c.t.Logf("%s: %v, and all kinds of requests succeed after %v", change, done.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	l.mu.Lock()
	l.excused = false
	l.mu.Unlock()
	l.settle()
}

// settle waits until each control plane has answered each kind of request, and a new async request
// was called back.
func (l *load) settle() {
	l.c.t.Helper()
	for _, p := range l.c.controls {
		for _, k := range l.all {
			l.answers(p, k)
		}
	}
	l.mu.Lock()
	old := maps.Clone(l.accepted)
	l.mu.Unlock()
	proctest.Until(l.c.t, "async requests to be accepted and called back", func() bool {
		time.Sleep(20 * time.Millisecond)
		l.mu.Lock()
		defer l.mu.Unlock()
		n := 0
		for name := range l.accepted {
			if !old[name] && l.told[name] > 0 {
				n++
			}
		}
		return n > 10
	})
}

// end ends the load, waits for all callbacks, and reports what was wrong.
func (l *load) end() {
	l.c.t.Helper()
	l.stop()
	l.wg.Wait()
	proctest.Until(l.c.t, "all accepted async requests to be called back", func() bool {
		time.Sleep(20 * time.Millisecond)
		l.mu.Lock()
		defer l.mu.Unlock()
		for name := range l.accepted {
			if l.told[name] == 0 {
				return false
			}
		}
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wrong {
		l.c.t.Error(w)
	}
	l.c.t.Logf("%d async requests were accepted and called back; %d callbacks were marked as repetitions", len(l.accepted), l.again)
	for _, change := range slices.Sorted(maps.Keys(l.counts)) {
		l.c.t.Logf("%-45s sync requests by status: %v, slowest %v", cmp.Or(change, "between"), l.counts[change], l.slowest[change].Round(time.Millisecond))
	}
}

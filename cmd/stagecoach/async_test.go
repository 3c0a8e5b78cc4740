package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// told is the content of a callback.
type told struct {
	query, status, attempt, body string
	at                           time.Time
}

// receiver takes callbacks; while refuse is set it answers 404.
type receiver struct {
	*httptest.Server
	got chan told

	mu     sync.Mutex
	refuse bool
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{got: make(chan told, 2000)}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, err := io.ReadAll(req.Body)
		if err != nil {
			t.Error(err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.refuse {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		r.got <- told{req.URL.RawQuery, req.Header.Get("X-Function-Status"), req.Header.Get("X-Attempt"), string(b), time.Now()}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) refuses(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = yes
}

func (r *receiver) next(t *testing.T) told {
	t.Helper()
	select {
	case c := <-r.got:
		return c
	case <-time.After(late):
		t.Fatal("no callback")
		return told{}
	}
}

// TestASlowFunctionDelaysNoOther queues 500 requests of an hour for a function that takes one at a
// time. The answers of another function do not wait for any of them.
func TestASlowFunctionDelaysNoOther(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "config.yml") // nobody waits for the slow requests at the end
	if err := os.WriteFile(config, []byte("control: {drainTimeout: 1s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, to := start(t, "--config", config), newReceiver(t)
	r.deployAll(
		waitFn("slow", "1h", map[string]string{"max": "1"}, map[string]string{"async-concurrency": "1"}),
		fn{"quick", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil},
	)
	r.must(http.StatusOK, http.MethodPost, "/function/quick", "x")
	const queued = 500
	for range queued {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/slow", "x", "X-Timeout", "1h")
	}
	r.until(late, "a slow request to run", func() bool { return r.line("slow").Running == 1 })
	var took []time.Duration
	for i := range 20 {
		begin := time.Now()
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/quick", "hello", "X-Callback-Url", fmt.Sprintf("%s/?%d", to.URL, i))
		c := to.next(t)
		if c.status != "200" || c.body != "hello" || c.attempt != "1" {
			t.Errorf("callback %+v", c)
		}
		took = append(took, c.at.Sub(begin))
	}
	if pending := r.value(`stagecoach_async_pending{function_name="slow.openfaas-fn"}`); pending != queued {
		t.Errorf("%v requests of the slow function wait, want all %d: it proves nothing", pending, queued)
	}
	slices.Sort(took)
	t.Logf("request to callback beside %d queued: median %v, slowest %v", queued, took[len(took)/2], took[len(took)-1])
}

// dead runs `stagecoach dead`.
func (r *rig) dead(args ...string) string {
	r.t.Helper()
	var out bytes.Buffer
	args = slices.Insert(args, 1, "--gateway", r.Base)
	if err := run(r.t.Context(), append([]string{"dead"}, args...), &out); err != nil {
		r.t.Errorf("dead %q: %v", args, err)
	}
	return out.String()
}

func (r *rig) letters(args ...string) (all []schema.DeadLetter) {
	r.t.Helper()
	if err := json.Unmarshal([]byte(r.dead(append([]string{"list", "--json"}, args...)...)), &all); err != nil {
		r.t.Fatal(err)
	}
	return all
}

// TestDeadLetters checks that runs and callbacks that finally fail are listed, shown, redriven and
// dropped, and survive a kill.
func TestDeadLetters(t *testing.T) {
	t.Parallel()
	r, to := start(t), newReceiver(t)
	slow := waitFn("slow", "1m", map[string]string{"max": "1"}, map[string]string{"async-concurrency": "1"})
	quick := fn{"quick", "noop", map[string]string{"min": "1", "max": "1"}, nil, nil}
	r.deployAll(slow, quick)
	to.refuses(true)
	large := strings.Repeat("large ", 400_000) // more than a message takes with others
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/quick/path?q=1", large, "X-Callback-Url", to.URL+"/?large", "X-Call-Id", "mine")
	r.until(late, "the callback's letter, and its record out of the journal", func() bool {
		return len(r.letters()) == 1 && r.value("stagecoach_async_done_total") == 1
	})
	l := r.letters()[0]
	if l.Kind != "callback" || l.Function != "quick" || l.Namespace != "openfaas-fn" || l.Attempts != 1 || !strings.Contains(l.Cause, "status 404") || !strings.HasPrefix(l.ID, "mine.") {
		t.Errorf("letter %+v", l)
	}
	r.killAll()
	r.restart()
	if table := r.dead("list"); !strings.Contains(table, l.ID) || len(strings.Split(table, "\n")) != 3 {
		t.Errorf("after a kill:\n%s", table)
	}
	if shown := r.dead("show", l.ID); !strings.Contains(shown, "Call:      mine") || !strings.Contains(shown, to.URL+"/") || strings.Contains(shown, "?large") || !strings.Contains(shown, "Status:    200") {
		t.Errorf("shown:\n%s", shown)
	}
	if body := r.dead("show", "--body", l.ID); body != large {
		t.Errorf("body of %d bytes, want %d", len(body), len(large))
	}
	to.refuses(false)
	if out := r.dead("redrive", l.ID); out != "redriven: 1\n" {
		t.Errorf("redrive: %q", out)
	}
	if c := to.next(t); c.query != "large" || c.body != large || c.status != "200" {
		t.Errorf("callback %s, status %s, %d bytes", c.query, c.status, len(c.body))
	}

	for range 3 {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/slow/p?q=2", "body", "X-Callback-Url", to.URL+"/?slow", "Authorization", "Bearer secret", "Cookie", "session=secret", "X-Mine", "yes", "X-Timeout", "20s")
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"slow"}`)
	r.until(late, "three letters of what is not there", func() bool { return len(r.letters("--function", "slow")) == 3 })
	for range 3 {
		if c := to.next(t); c.query != "slow" || c.status != "404" {
			t.Errorf("callback %+v, want one that says 404", c)
		}
	}
	all := r.letters("--function", "slow")
	if here, elsewhere := r.letters("-n", "openfaas-fn"), r.letters("-n", "fn"); len(here) != 3 || len(elsewhere) != 0 {
		t.Errorf("in its namespace %d letters, in another %d", len(here), len(elsewhere))
	}
	shown := r.dead("show", all[0].ID)
	for _, want := range []string{"Request:   POST /p?q=2", "X-Mine: yes", "no function or pipeline"} {
		if !strings.Contains(shown, want) {
			t.Errorf("%q is not shown:\n%s", want, shown)
		}
	}
	if strings.Contains(shown, "secret") {
		t.Errorf("credentials are shown:\n%s", shown)
	}
	if body := r.dead("show", "--body", all[0].ID); body != "body" {
		t.Errorf("body %q", body)
	}
	if h := r.must(http.StatusOK, http.MethodGet, "/system/dead/"+all[0].ID+"?body=1", "").Header; h.Get("Content-Disposition") != "attachment" || h.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("a browser would show the body: %v", h)
	}
	r.dead("drop", all[0].ID)
	r.must(http.StatusNotFound, http.MethodGet, "/system/dead/"+all[0].ID, "")
	r.must(http.StatusBadRequest, http.MethodDelete, "/system/dead", "")
	r.must(http.StatusBadRequest, http.MethodGet, "/system/dead?limit=0", "")
	r.must(http.StatusNotFound, http.MethodGet, "/system/dead?after=nosuch", "")
	slow.env["wait_mean"] = "1ms"
	r.deployAll(slow)
	if out := r.dead("redrive", "--function", "slow"); out != "redriven: 2\n" {
		t.Errorf("redrive of a function: %q", out)
	}
	for range 2 {
		if c := to.next(t); c.status != "200" || c.attempt != "1" {
			t.Errorf("callback after the redrive %+v", c)
		}
	}
	if left := r.letters(); len(left) != 0 {
		t.Errorf("letters %+v are left", left)
	}
}

// TestAsyncLimit checks that a function's requests are refused when too many wait, and that those
// of other functions are not.
func TestAsyncLimit(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(
		waitFn("slow", "1m", map[string]string{"max": "1"}, map[string]string{"async-concurrency": "1", "async-queue-limit": "3"}),
		fn{"quick", "noop", zero, nil, nil},
	)
	for range 3 {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/slow", "x", "X-Timeout", "2s")
	}
	a := r.must(http.StatusTooManyRequests, http.MethodPost, "/async-function/slow", "x")
	if a.Header.Get("Retry-After") == "" || !strings.Contains(string(a.Body), "async-queue-limit") {
		t.Errorf("429 with %v: %s", a.Header, a.Body)
	}
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/quick", "x")
}

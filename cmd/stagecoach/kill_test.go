package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// diamond is a pipeline whose answer contains both the request and what a replica under load
// returns. Its entry leads to a stage "same" and the given stage, and both lead to "out".
func diamond(hold fn) []fn {
	one := map[string]string{"max": "2"}
	hold.annotations = map[string]string{"pipeline": "diamond", "next": "out"}
	return []fn{
		{"in", "noop", one, map[string]string{"pipeline": "diamond", "next": "same, hold"}, nil},
		{"same", "noop", one, map[string]string{"pipeline": "diamond", "next": "out"}, nil},
		hold,
		{"out", "noop", one, map[string]string{"pipeline": "diamond"}, nil},
	}
}

// crossed checks that an answer of diamond is the right one for its request.
func crossed(body string, a client.Answer) error {
	var items []string
	if err := json.Unmarshal(a.Body, &items); a.Status != http.StatusOK || err != nil || len(items) != 2 ||
		!strings.HasPrefix(items[0], "waited ") || items[1] != body {
		return fmt.Errorf("status %d, %q, want 200 and what hold and same say", a.Status, a.Body)
	}
	return nil
}

// TestKillReplicas kills replicas of every stage under load, again and again. No request is lost or
// answered wrongly.
func TestKillReplicas(t *testing.T) {
	t.Parallel()
	r := start(t)
	stages := diamond(waitFn("hold", "100ms", map[string]string{"min": "4", "max": "4"}, nil))
	for i := range stages {
		if stages[i].image == "noop" {
			stages[i].labels = map[string]string{"min": "2", "max": "2"} // a replica that drains is not lost
		}
	}
	r.deployAll(stages...)
	r.must(http.StatusOK, http.MethodPost, "/function/diamond", "x")
	l := r.load(16, "/function/diamond", crossed)
	kills := 0
	for range 5 {
		for _, image := range []string{"wait", "noop"} {
			l.turn() // no request loses a replica more often than it may
			var pids []int
			r.until(soon, "a replica of "+image+" to kill", func() bool { pids = r.pids(image, false); return len(pids) > 0 })
			kill9(t, pids[rand.IntN(len(pids))])
			kills++
		}
	}
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	lost := 0
	for _, stage := range []string{"in", "same", "hold", "out"} {
		// Failed replicas were killed before they were ready.
		for _, e := range slices.Concat(r.events(stage, "lost"), r.events(stage, "failed")) {
			lost++
			if !strings.Contains(e.Cause, "killed by SIGKILL") {
				t.Errorf("%s lost %s: %q, want killed by SIGKILL", stage, e.Replica, e.Cause)
			}
		}
	}
	retries := r.value("stagecoach_flow_retries_total")
	if lost != kills || retries == 0 {
		t.Errorf("%d replicas lost and %v calls retried, want %d and some", lost, retries, kills)
	}
	t.Logf("%d requests, %d kills, %v calls retried, slowest answer %v", requests, kills, retries, l.slowest)
}

// TestKillZygote kills the zygote, and with it all replicas, under load. Requests wait until it is
// loaded again.
func TestKillZygote(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(diamond(waitFn("hold", "100ms", map[string]string{"min": "3", "max": "6"}, nil))...)
	r.must(http.StatusOK, http.MethodPost, "/function/diamond", "x")
	l := r.load(16, "/function/diamond", crossed)
	for range 3 {
		l.turn()
		r.until(late, "three replicas", func() bool { return r.line("hold").Ready >= 3 })
		zygotes := r.pids("wait", true)
		if len(zygotes) != 1 {
			t.Fatalf("zygotes %v, want one", zygotes)
		}
		left := r.descendants()
		kill9(t, zygotes[0])
		gone(t, slices.DeleteFunc(left, func(p process) bool { return p.image != "wait" }))
	}
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	cold := 0
	for _, e := range r.events("hold", "started") {
		if e.Phases["load"] != "" {
			cold++
		}
	}
	lost := r.events("hold", "lost")
	if cold < 4 || len(lost) < 9 || !strings.Contains(lost[0].Cause, "its zygote ended: killed by SIGKILL") {
		t.Errorf("%d starts that loaded a zygote first, lost: %+v, want at least 4 and 9, with the cause", cold, lost)
	}
	t.Logf("%d requests, %d replicas lost, %v calls retried, slowest answer %v", requests, len(lost), r.value("stagecoach_flow_retries_total"), l.slowest)
}

// TestNotIdempotentCallIsNotRetried kills the replica during a call that must not run twice. The
// client is told, and the call is not retried.
func TestNotIdempotentCallIsNotRetried(t *testing.T) {
	t.Parallel()
	r := start(t)
	f := waitFn("once", "1m", map[string]string{"max": "1"}, map[string]string{"pipeline": "p", "idempotent": "false"})
	r.deployAll(fn{"before", "noop", zero, map[string]string{"pipeline": "p", "next": "once"}, nil}, f)
	got := make(chan client.Answer, 1)
	go func() { got <- r.send(http.MethodPost, "/function/p", "x") }()
	r.until(soon, "the call to run", func() bool { return r.line("once").Running == 1 })
	kill9(t, r.pids("wait", false)[0])
	a := <-got
	for _, part := range []string{`stage "once"`, "killed by SIGKILL", "not idempotent"} {
		if a.Status != http.StatusBadGateway || !strings.Contains(string(a.Body), part) {
			t.Errorf("status %d: %s, want 502 with %q", a.Status, a.Body, part)
		}
	}
	if n := r.value("stagecoach_flow_retries_total"); n != 0 {
		t.Errorf("%v calls retried, want none", n)
	}
}

// callbacks receives the callbacks of requests.
type callbacks struct {
	mu  sync.Mutex
	got map[string]int // by the query, which names the request
	bad []string
}

func (c *callbacks) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	b, err := io.ReadAll(req.Body)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.got[req.URL.RawQuery]++
	if s := req.Header.Get("X-Function-Status"); s != "200" || !strings.HasPrefix(string(b), "waited ") || err != nil {
		c.bad = append(c.bad, fmt.Sprintf("%s: status %s, %q, %v", req.URL.RawQuery, s, b, err))
	}
	w.WriteHeader(http.StatusNoContent)
}

func (c *callbacks) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.got)
}

// TestKillUp kills all of stagecoach under async requests, twice. Its successor on the same folder
// knows the deployed functions and runs every accepted request.
func TestKillUp(t *testing.T) {
	t.Parallel()
	to := &callbacks{got: map[string]int{}}
	server := httptest.NewServer(to)
	defer server.Close()
	r := start(t)
	r.deployAll(append(graph, waitFn("hold", "100ms", map[string]string{"max": "4"}, nil))...)
	var before, after []client.FunctionStatus
	if err := r.Get(t.Context(), "/system/functions", &before); err != nil {
		t.Fatal(err)
	}
	var accepted []string
	for run := range 2 {
		var mu sync.Mutex
		var clients sync.WaitGroup
		base := len(accepted)
		for c := range 4 {
			clients.Go(func() {
				pace := time.NewTicker(20 * time.Millisecond)
				defer pace.Stop()
				for i := range 500 {
					<-pace.C
					name := fmt.Sprintf("%d-%d-%d", run, c, i)
					a, err := r.trySend(http.MethodPost, "/async-function/hold", "x", "X-Callback-Url", server.URL+"/?"+name)
					if err != nil {
						return // killed
					}
					if a.Status != http.StatusAccepted {
						t.Errorf("%s: status %d: %s", name, a.Status, a.Body)
						return
					}
					mu.Lock()
					accepted = append(accepted, name)
					mu.Unlock()
				}
			})
		}
		r.until(soon, "some to be accepted, some to be done, and some to wait", func() bool {
			mu.Lock()
			defer mu.Unlock()
			done := to.count()
			return len(accepted) > base+60 && done > base/2+5 && done+20 < len(accepted)
		})
		r.kill()
		clients.Wait()
		if done := to.count(); done >= len(accepted) {
			t.Errorf("%d of %d were done before the kill: it proves nothing", done, len(accepted))
		}
		r.restart()
	}
	if err := r.Get(t.Context(), "/system/functions", &after); err != nil {
		t.Fatal(err)
	}
	for i := range before {
		if len(after) != len(before) || after[i].Name != before[i].Name {
			t.Errorf("deployed are %+v, want what was: %+v", after, before)
		}
	}
	// Some of them lost their 202 in the kill.
	r.until(2*late, "every accepted request to be called back", func() bool {
		to.mu.Lock()
		defer to.mu.Unlock()
		return !slices.ContainsFunc(accepted, func(name string) bool { return to.got[name] == 0 })
	})
	to.mu.Lock()
	defer to.mu.Unlock()
	twice := 0
	for _, name := range accepted {
		if to.got[name] > 1 {
			twice++
		}
	}
	for _, b := range to.bad {
		t.Error(b)
	}
	t.Logf("%d accepted over two kills, all called back; %d more than once", len(accepted), twice)
	r.must(http.StatusOK, http.MethodPost, "/function/five", "x")
}

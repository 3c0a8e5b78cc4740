package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// mixed sends requests of four kinds while their functions are updated:
//
//   - to a function alone
//   - with one call of a stage per item
//   - through a join
//   - to a function that speaks HTTP
type mixed struct {
	*rig
	fns   []fn
	total int

	mu     sync.Mutex
	begun  int
	done   map[string]int // by kind
	failed map[string]int // by kind
	wrong  []string       // the first few
}

// perRequest is how many calls of a stage each request makes: more than the coordinator sends at
// the same time.
const perRequest = 80

// manyItems is the body of a request with as many calls as perRequest.
var manyItems = "[" + strings.Repeat(`"",`, perRequest-1) + `""]`

// wrongKept bounds what is kept of wrong answers.
const wrongKept = 20

// updated is a function in its n-th version.
func updated(f fn, n int) fn {
	f.env = maps.Clone(f.env)
	switch f.image {
	case "wait": // which says in each answer how long it waited
		f.env["wait_mean"] = fmt.Sprintf("%dms", 1+n%20)
	default:
		f.env["version"] = fmt.Sprint(n)
	}
	return f
}

// fromEnvironment returns a number that the environment may set.
func fromEnvironment(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q, want a number above 0", name, text)
	}
	return n
}

func newMixed(r *rig, total int) *mixed {
	scale := map[string]string{"min": "1", "max": "2"}
	many := waitFn("many", "1ms", scale, map[string]string{"each": "true"})
	many.env["max_inflight"] = "8"
	hold := waitFn("hold", "1ms", scale, nil)
	join := diamond(hold)
	for i := range join {
		join[i].labels = scale
		if join[i].env == nil {
			join[i].env = map[string]string{}
		}
	}
	m := &mixed{rig: r, total: total, done: map[string]int{}, failed: map[string]int{}}
	m.fns = append([]fn{{"plain", "noop", scale, nil, map[string]string{}}, many, httpFn("web", scale)}, join...)
	for i := range m.fns {
		m.fns[i] = updated(m.fns[i], 0)
	}
	return m
}

// send1 sends the n-th request and says what kind it is and what is wrong with its answer.
func (m *mixed) send1(n int) (kind string, err error) {
	body := fmt.Sprintf("request %d", n)
	kind = []string{"plain", "each", "join", "http"}[n%4]
	path, header := map[string]string{"plain": "/function/plain", "each": "/function/many", "join": "/function/diamond", "http": "/function/web/echo"}[kind], []string(nil)
	if kind == "each" {
		body, header = manyItems, []string{"Content-Type", "application/json"}
	}
	a, err := m.trySend(http.MethodPost, path, body, header...)
	if err != nil {
		return kind, err
	}
	switch kind {
	case "each":
		return kind, ofOne(a)
	case "join":
		return kind, crossed(body, a)
	}
	if a.Status != http.StatusOK || string(a.Body) != body {
		return kind, fmt.Errorf("status %d, %.300q, want 200 and what was sent", a.Status, a.Body)
	}
	return kind, nil
}

// ofOne checks that all items of an answer say the same.
func ofOne(a client.Answer) error {
	var out []string
	if err := json.Unmarshal(a.Body, &out); a.Status != http.StatusOK || err != nil || len(out) != perRequest {
		return fmt.Errorf("status %d, %.300q, want 200 and %d items", a.Status, a.Body, perRequest)
	}
	if says := slices.Compact(out); len(says) != 1 || !strings.HasPrefix(says[0], "waited ") {
		return fmt.Errorf("items say %q, want all the same", says)
	}
	return nil
}

// client sends requests until all have been sent.
func (m *mixed) client() {
	for {
		m.mu.Lock()
		n := m.begun
		m.begun++
		m.mu.Unlock()
		if n >= m.total {
			return
		}
		kind, err := m.send1(n)
		m.mu.Lock()
		m.done[kind]++
		if err != nil {
			m.failed[kind]++
			if len(m.wrong) < wrongKept {
				m.wrong = append(m.wrong, fmt.Sprintf("%s, request %d: %v", kind, n, err))
			}
		}
		m.mu.Unlock()
	}
}

func (m *mixed) ended() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, done := range m.done {
		n += done
	}
	return n
}

// TestUpdatesUnderLoad updates functions in turn under requests of all kinds. No request fails, and
// none is answered by two revisions of a function. UPDATES and REQUESTS make the test longer.
func TestUpdatesUnderLoad(t *testing.T) {
	t.Parallel()
	updates, requests := fromEnvironment(t, "UPDATES", 10), fromEnvironment(t, "REQUESTS", 400)
	r := start(t)
	m := newMixed(r, requests)
	r.deployAll(m.fns...)
	for n := range 4 {
		if kind, err := m.send1(n); err != nil {
			t.Fatalf("%s before the updates: %v", kind, err)
		}
	}
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(m.client)
	}
	for u := range updates {
		proctest.Until(t, "requests between updates", func() bool { return m.ended() >= (u+1)*requests/(updates+1) })
		r.deployAll(updated(m.fns[u%len(m.fns)], 1+u))
	}
	clients.Wait()
	if len(m.failed) > 0 {
		t.Errorf("failed: %v of %v, want none: the first are\n%s", m.failed, m.done, strings.Join(m.wrong, "\n"))
	}
	for _, f := range m.fns {
		if lost := r.events(f.name, "lost"); len(lost) > 0 {
			t.Errorf("%s lost replicas, want all drained: %+v", f.name, lost)
		}
	}
	t.Logf("%d updates, requests %v, failed %v, %v calls retried", updates, m.done, m.failed, r.value("stagecoach_flow_retries_total"))
}

// TestOldRevisionStartsAgainForItsRequest updates a function while a request with many calls runs
// on the old revision, and then kills the only replica of that revision. A replica of the old
// revision is started again for the remaining calls.
func TestOldRevisionStartsAgainForItsRequest(t *testing.T) {
	t.Parallel()
	r := start(t)
	old := waitFn("many", "500ms", map[string]string{"max": "1"}, map[string]string{"each": "true"})
	old.env["max_inflight"] = "4" // so that it runs for 10 s
	r.deployAll(old)
	got := make(chan client.Answer, 1)
	go func() {
		got <- r.send(http.MethodPost, "/function/many", manyItems, "Content-Type", "application/json")
	}()
	r.until(late, "a first answer", func() bool { return len(r.events("many", "first answer")) > 0 })
	first := r.pids("wait", false)
	if len(first) != 1 {
		t.Fatalf("replicas %v, want one", first)
	}
	r.deployAll(updated(old, 0))
	kill9(t, first[0])
	a := <-got
	if err := ofOne(a); err != nil || !strings.Contains(string(a.Body), "500ms") {
		t.Errorf("%v, %.200s, want what the first revision says", err, a.Body)
	}
	again := slices.DeleteFunc(r.events("many", "ordered"), func(e schema.Event) bool { return !strings.Contains(e.Cause, "requests have begun on revision") })
	if len(again) != 1 {
		t.Errorf("started again: %+v, want one replica", again)
	}
	r.until(late, "the old revision's end", func() bool { return len(r.pids("wait", false)) == 1 })
	if a := r.must(http.StatusOK, http.MethodPost, "/function/many", manyItems, "Content-Type", "application/json"); !strings.Contains(string(a.Body), "waited 1ms") {
		t.Errorf("%.200s, want what the second revision says", a.Body)
	}
}

// TestUpdatesOutlastTheDrainTimeout checks that a replica of an old revision serves a request that
// began on it until the request ends, even if the drain timeout is shorter.
func TestUpdatesOutlastTheDrainTimeout(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "up.yml")
	if err := os.WriteFile(config, []byte("control:\n  drainTimeout: 2s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--config", config)
	old := waitFn("many", "100ms", map[string]string{"max": "1"}, map[string]string{"each": "true"})
	r.deployAll(old)
	got := make(chan client.Answer, 1)
	go func() {
		got <- r.send(http.MethodPost, "/function/many", manyItems, "Content-Type", "application/json")
	}()
	r.until(late, "a first answer", func() bool { return len(r.events("many", "first answer")) > 0 })
	r.deployAll(updated(old, 0))
	r.until(late, "the old revision to drain", func() bool { return len(r.events("many", "draining")) > 0 })
	a := <-got
	if err := ofOne(a); err != nil || !strings.Contains(string(a.Body), "100ms") {
		t.Errorf("%v, %.200s, want what the first revision says", err, a.Body)
	}
	r.until(late, "the old revision's end", func() bool { return len(r.pids("wait", false)) == 1 })
	if n := r.value("stagecoach_flow_retries_total"); n != 0 {
		t.Errorf("%v calls retried, want none", n)
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"many"}`)
	// A shutdown takes the timeout, too.
	r.until(late, "no replica to be left", func() bool { return len(r.pids("wait", false)) == 0 })
}

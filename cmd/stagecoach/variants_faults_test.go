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
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// mixture is sync and async requests to a stage with `each` and three functions. Its clients go on
// while up is killed and started again.
type mixture struct {
	*laneRig
	to   string // where callbacks go
	stop chan struct{}
	wg   sync.WaitGroup

	mu       sync.Mutex
	client   *client.Client
	life     int  // of up: grows with each kill
	down     bool // up is being killed, or has not started again
	done     []int
	cut      int            // sync requests that a kill of up has ended
	accepted map[string]int // async requests by name, with the life that accepted them
	told     map[string]int // callbacks by name
	again    int            // callbacks that came again, marked
	by       map[string]int // items by function
	wrong    []string
}

// itemsPerRequest is how many calls of the stage a request makes.
const itemsPerRequest = 6

// bodyOf returns the body of the request of this name.
func bodyOf(name string) string {
	items := make([]string, itemsPerRequest)
	for i := range items {
		items[i] = fmt.Sprintf("%s item %d", name, i)
	}
	b, err := json.Marshal(items)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func (m *mixture) failed(format string, a ...any) {
	if len(m.wrong) < wrongKept {
		m.wrong = append(m.wrong, fmt.Sprintf(format, a...))
	}
}

// answered checks an answer. m.mu is locked.
func (m *mixture) answered(name string, status int, answer []byte) {
	all, err := m.itemsBy(bodyOf(name), status, answer)
	if err != nil {
		m.failed("%s: %v", name, err)
	}
	for _, s := range all {
		m.by[s.function]++
	}
}

// ServeHTTP takes callbacks.
func (m *mixture) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return // the sender was killed
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	name := r.URL.RawQuery
	if m.told[name]++; m.told[name] > 1 {
		if m.again++; r.Header.Get("X-Redelivered") != "true" {
			m.failed("%s: told %d times", name, m.told[name])
		}
		return
	}
	status := 0
	if _, err := fmt.Sscan(r.Header.Get("X-Function-Status"), &status); err != nil {
		m.failed("%s: status %v", name, err)
	}
	m.answered(name, status, b)
}

// begin starts clients that send sync requests, and as many that send async ones.
func (m *mixture) begin(clients int) {
	m.done = make([]int, 2*clients)
	for c := range m.done {
		m.wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-m.stop:
					return
				default:
					m.request(c, i, c%2 == 1)
				}
			}
		})
	}
}

// request sends a request, and waits for its answer or its callback.
func (m *mixture) request(c, i int, async bool) {
	name := fmt.Sprintf("%d-%d", c, i)
	m.mu.Lock()
	to, life, down := &rig{Client: m.client, t: m.t}, m.life, m.down
	m.mu.Unlock()
	path, header := "/function/texts", []string{"Content-Type", "application/json"}
	if async {
		path, header = "/async-function/texts", append(header, "X-Callback-Url", m.to+"/?"+name)
	}
	a, err := to.trySend(http.MethodPost, path, bodyOf(name), header...)
	m.mu.Lock()
	defer m.mu.Unlock()
	cut := down || m.down || life != m.life
	switch {
	case async && err == nil && a.Status == http.StatusAccepted:
		m.accepted[name] = life
		for m.told[name] == 0 {
			m.mu.Unlock()
			select {
			case <-m.stop:
				m.mu.Lock()
				return
			case <-time.After(5 * time.Millisecond):
			}
			m.mu.Lock()
		}
	case err == nil && !async && (a.Status == http.StatusOK || !cut):
		m.answered(name, a.Status, a.Body)
	case !cut:
		m.failed("%s: status %d, %s, %v, and up was not killed", name, a.Status, a.Body, err)
	default:
		m.cut++
		m.mu.Unlock()
		select { // up starts again
		case <-m.stop:
		case <-time.After(20 * time.Millisecond):
		}
		m.mu.Lock()
	}
	m.done[c]++
}

// turn waits until each client has ended a request that it began after the call. So no request
// meets more than two faults.
func (m *mixture) turn() {
	m.t.Helper()
	m.mu.Lock()
	from := slices.Clone(m.done)
	m.mu.Unlock()
	m.until(late, "two more answers per client", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for i := range from {
			if m.done[i] < from[i]+2 {
				return false
			}
		}
		return true
	})
}

// killUp kills up with all its processes, and starts it again.
func (m *mixture) killUp() {
	m.mu.Lock()
	m.life, m.down = m.life+1, true
	m.mu.Unlock()
	m.kill()
	m.restart()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.client, m.down = m.Client, false
}

// killEach kills processes of a function's image. Some may have ended with others.
func (l *laneRig) killEach(pids []int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// TestVariantsUnderFaults kills replicas, zygotes, all processes of a function and all of up, and
// updates and removes functions, while clients send sync and async requests to a stage with three
// functions. Nothing is lost, nothing is answered twice, and each item is answered once.
// VARIANT_ROUNDS is the number of faults, and VARIANT_SEED chooses the functions that they meet.
func TestVariantsUnderFaults(t *testing.T) {
	t.Parallel()
	rounds, seed := int(envNumber(t, "VARIANT_ROUNDS", 6)), envNumber(t, "VARIANT_SEED", rand.Uint64())
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	l := startLanes(t, "read", "read-b", "read-c")
	m := &mixture{laneRig: l, stop: make(chan struct{}), accepted: map[string]int{}, told: map[string]int{}, by: map[string]int{}, client: l.Client}
	server := httptest.NewServer(m)
	defer server.Close()
	m.to = server.URL
	fns := []fn{
		l.lane("read", map[string]string{"pipeline": "texts", "each": "true"}),
		l.lane("read-b", map[string]string{"variant-of": "read", "accuracy": "0.9"}),
		l.lane("read-c", map[string]string{"variant-of": "read", "accuracy": "0.8"}),
	}
	in := fn{"in", "noop", map[string]string{"min": "1", "max": "2"}, map[string]string{"pipeline": "texts", "next": "read", "route": "even"}, nil}
	l.deployAll(append(fns, in)...)
	const even = "any: read 0.33, read-b 0.33, read-c 0.33"
	l.hasTable("texts", "read", even)
	m.begin(4)
	faults := map[string]int{}
	names := []string{"replica", "zygote", "update", "remove", "function", "up"}
	for round := range rounds {
		m.turn()
		name, i := names[round%len(names)], chance.IntN(len(fns))
		f := fns[i]
		l.until(late, "replicas of "+f.name, func() bool { return len(l.pids(f.name, false)) > 0 && len(l.pids(f.name, true)) > 0 })
		switch name {
		case "replica":
			l.killEach(l.pids(f.name, false)[:1])
		case "zygote":
			l.killEach(l.pids(f.name, true))
		case "function":
			l.killEach(append(l.pids(f.name, true), l.pids(f.name, false)...))
		case "update":
			fns[i] = inVersion(f, 2+round)
			l.deployAll(fns[i])
		case "remove":
			l.remove(f.name)
			m.turn()
			l.deployAll(f)
		case "up":
			m.killUp()
		}
		faults[name]++
		if t.Failed() {
			break
		}
	}
	m.turn()
	l.until(late, "all async requests to be told", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.told) >= len(m.accepted) && !m.waits()
	})
	l.hasTable("texts", "read", even)
	close(m.stop)
	m.wg.Wait()
	l.until(late, "no async request to be left", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return !m.waits() && l.value("stagecoach_async_bytes") == 0
	})
	if n := l.value("stagecoach_async_dead_letters"); n != 0 {
		t.Errorf("%v dead letters, want none", n)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.wrong {
		t.Error(w)
	}
	if most := perReceiver * faults["up"]; m.again > most {
		t.Errorf("%d callbacks came again, want at most %d: a kill of up cuts %d short", m.again, most, perReceiver)
	}
	for _, f := range fns {
		if m.by[f.name] == 0 {
			t.Errorf("items by function: %v, want some by each", m.by)
		}
	}
	t.Logf("%v, %d async requests, none lost, %d told again (marked); %d sync requests ended with up; items by function %v; %v calls retried since up started",
		faults, len(m.accepted), m.again, m.cut, m.by, l.value("stagecoach_flow_retries_total"))
}

// waits reports whether an accepted async request has not been told. m.mu is locked.
func (m *mixture) waits() bool {
	for name := range m.accepted {
		if m.told[name] == 0 {
			return true
		}
	}
	return false
}

// TestCrashedVariantLendsItsShare lets all replicas of the most accurate function crash, at their
// start too. Its requests go to the other function, those that already wait too, and come back when
// its replicas start again.
func TestCrashedVariantLendsItsShare(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-b")
	l.deployAll(l.lane("read", map[string]string{"pipeline": "texts"}), l.lane("read-b", map[string]string{"variant-of": "read", "accuracy": "0.9"}))
	l.hasTable("texts", "read", "any: read 1")
	l.expect("/function/texts", "before", "read")
	l.until(late, "a replica of the backup", func() bool { return l.line("read-b").Ready > 0 })
	var mu sync.Mutex
	last := said{}
	first := map[string]time.Time{} // when the first answer of each run of answers by a function came
	load := l.loadOf(6, "/function/texts", func(c, i int) string { return fmt.Sprintf("%d of %d", i, c) }, func(body string, a client.Answer) error {
		s, err := l.by(body, a)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && s.function != last.function {
			last, first[s.function] = s, time.Now()
		}
		return err
	})
	latest := func() (said, time.Time) {
		mu.Lock()
		defer mu.Unlock()
		return last, first[last.function]
	}
	l.until(late, "answers", func() bool { s, _ := latest(); return s.function == "read" })
	load.turn()
	l.file("read", "crash", true)
	killed := time.Now()
	l.killEach(l.pids("read", false))
	l.until(late, "a start that fails", func() bool { return len(l.events("read", schema.Failed)) > 0 })
	l.until(late, "answers by the backup", func() bool { s, _ := latest(); return s.function == "read-b" })
	load.turn()
	if _, at := latest(); at.Before(killed) {
		t.Errorf("the backup answered at %v, before the replicas were killed at %v", at, killed)
	} else {
		t.Logf("the backup answered %v after the replicas were killed", at.Sub(killed).Round(time.Millisecond))
	}
	down := l.line("read").Events
	i := slices.IndexFunc(down, func(e schema.Event) bool { return e.Kind == schema.Lost })
	if i < 0 || slices.ContainsFunc(down[i:], func(e schema.Event) bool { return e.Kind == schema.Ready }) {
		t.Errorf("timeline %+v, want lost replicas and none ready after them", down)
	}
	l.expect("/function/texts", "while it is down", "read-b")
	mended := time.Now()
	l.file("read", "crash", false)
	l.until(late, "answers by the stage's own function", func() bool { s, _ := latest(); return s.function == "read" })
	load.turn()
	requests, wrong := load.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if _, at := latest(); at.Before(mended) {
		t.Errorf("the stage's own function answered at %v, and its replicas crashed until %v", at, mended)
	}
	l.expect("/function/texts", "again", "read")
	t.Logf("%d requests, none lost", requests)
}

// TestCallAndTraceShowTheVariant asks for a running async call whose items went to two functions.
// The trace of a request names the function that answered.
func TestCallAndTraceShowTheVariant(t *testing.T) {
	t.Parallel()
	flags, collector := collected(t)
	l := startLanesWith(t, flags, "read", "read-b")
	in := fn{"in", "noop", nil, map[string]string{"pipeline": "texts", "next": "read", "route": "even"}, nil}
	l.deployAll(in, l.lane("read", map[string]string{"pipeline": "texts", "each": "true"}), l.lane("read-b", map[string]string{"variant-of": "read"}))
	l.hasTable("texts", "read", "any: read 0.5, read-b 0.5")
	l.until(late, "replicas", func() bool { return l.line("read").Ready > 0 && l.line("read-b").Ready > 0 })
	const id = "0af7651916cd43dd8448eb211c80319"
	seen := map[string]bool{}
	for i := range 2 {
		trace := fmt.Sprint(id, i)
		body := fmt.Sprint("traced ", i)
		s, err := l.by(body, l.send(http.MethodPost, "/function/texts", body, "Traceparent", "00-"+trace+"-b7ad6b7169203331-01"))
		if err != nil {
			t.Fatal(err)
		}
		seen[s.function] = true
		span := l.trace(collector, trace, "POST /function/texts")["call read"]
		if got := span.Attributes["stagecoach.variant"]; got != s.function+".openfaas-fn" || span.Attributes["stagecoach.replica"] != s.replica {
			t.Errorf("answered by %+v, the span says %v", s, span.Attributes)
		}
	}
	if len(seen) != 2 {
		t.Errorf("answered by %v, want each function once", seen)
	}

	for _, name := range []string{"read", "read-b"} {
		l.file(name, "held", true)
	}
	const body = `["a","b","c","d","hold"]`
	call := l.must(http.StatusAccepted, http.MethodPost, "/async-function/texts", body, "Content-Type", "application/json").Header.Get("X-Call-Id")
	c := &operator{t, t.TempDir(), l.Base}
	out := ""
	l.until(late, "all but one item to be answered", func() bool {
		var err error
		out, err = c.try("", "call", call)
		return err == nil && strings.Contains(out, "4 of 5 calls done")
	})
	if want := "read, 4 of 5 calls done, attempt 1, by read-b.openfaas-fn, read.openfaas-fn\n"; !strings.Contains(out, want) {
		t.Errorf("stagecoach call:\n%s\nwant %s", out, want)
	}
	for _, name := range []string{"read", "read-b"} {
		l.file(name, "held", false)
	}
	c.run(`State: +done`, "", "call", call, "--wait")
	if _, err := l.itemsBy(body, http.StatusOK, []byte(c.run("", "", "call", call, "--body"))); err != nil {
		t.Error(err)
	}
	l.ranOnce()
}

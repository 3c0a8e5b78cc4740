package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// ledger records the accepted requests and their results.
type ledger struct {
	mu       sync.Mutex
	chance   *rand.Rand // of a receiver that fails
	accepted map[string]bool
	told     map[string]int
	marked   int // deliveries with X-Redelivered
	attempts int // of callbacks, those that were refused included
	wrong    []string
}

// asyncBody is the body of the request of this name: about one in 40 is too large for a message.
func asyncBody(name string) string {
	if n, _ := strconv.Atoi(name[strings.LastIndexByte(name, '-')+1:]); n%40 == 7 {
		return strings.Repeat(name+"\n", (1<<20)/len(name)+1)
	}
	return name
}

func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return // the sender was killed
	}
	name := r.URL.RawQuery
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempts++
	if l.chance.IntN(20) == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	again := r.Header.Get("X-Redelivered") == "true"
	if again {
		l.marked++
	}
	if l.told[name]++; l.told[name] > 1 && !again {
		l.wrong = append(l.wrong, name+": told again without X-Redelivered")
	}
	if s := r.Header.Get("X-Function-Status"); s != "200" || string(b) != asyncBody(name) || r.Header.Get("X-Attempt") == "" {
		l.wrong = append(l.wrong, fmt.Sprintf("%s: status %s, %d bytes: %.200s", name, s, len(b), b))
	}
	w.WriteHeader(http.StatusNoContent)
}

// waiting returns how many accepted requests have not been told.
func (l *ledger) waiting() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.accepted {
		if l.told[name] == 0 {
			n++
		}
	}
	return n
}

// TestKillAnywhere kills all processes at random moments: under load, during a start, and while the
// work of earlier rounds runs again. No accepted request may be lost. KILL_ROUNDS sets the number
// of rounds. KILL_SEED sets the seed for the moments.
func TestKillAnywhere(t *testing.T) { onEachRuntime(t, testKillAnywhere) }

func testKillAnywhere(t *testing.T, start starter) {
	rounds, seed := int(envNumber(t, "KILL_ROUNDS", 5)), envNumber(t, "KILL_SEED", rand.Uint64())
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	l := &ledger{chance: rand.New(rand.NewPCG(seed, 1)), accepted: map[string]bool{}, told: map[string]int{}}
	server := httptest.NewServer(l)
	defer server.Close()
	begin := time.Now()
	r := start(t, "--log", "error")
	f := fn{"echo", "noop", map[string]string{"min": "1", "max": "2"}, nil, nil}
	d := f.deployment()
	d.Annotations["com.openfaas.retry.min_wait"], d.Annotations["com.openfaas.retry.max_wait"] = "50ms", "500ms"
	if err := r.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	starting := 0
	for round := range rounds {
		stop := make(chan struct{})
		clients := l.send(t, r.Client, server.URL, round, stop)
		r.until(soon, "the moment", moment(time.Duration(chance.IntN(600))*time.Millisecond))
		r.killAll()
		close(stop)
		clients.Wait()
		for chance.IntN(3) == 0 {
			starting++
			r.startAndKill(time.Duration(chance.IntN(400)) * time.Millisecond)
		}
		r.restart()
		if round%4 == 3 { // in the others, what is left meets the next kill
			r.nothingComesBack(l)
		}
	}
	r.nothingComesBack(l)
	if n := r.value("stagecoach_async_dead_letters"); n != 0 {
		t.Errorf("%v dead letters, want none", n)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wrong {
		t.Error(w)
	}
	more, twice := 0, 0
	for _, n := range l.told {
		if more += n - 1; n > 1 {
			twice++
		}
	}
	if most := perReceiver * (rounds + starting); more > most {
		t.Errorf("%d deliveries too many, want at most %d: a kill cuts %d short", more, most, perReceiver)
	}
	t.Logf("%d rounds, %d kills during a start, %d accepted, 0 lost, %d told more than once (%d deliveries too many, all marked), %d deliveries marked, %d callback attempts, %v",
		rounds, starting, len(l.accepted), twice, more, l.marked, l.attempts, time.Since(begin).Round(time.Second))
}

// perReceiver is how many callbacks one receiver gets at the same time. So it also bounds how many
// callbacks per receiver are made again after a kill, because they were made but not yet recorded.
const perReceiver = 16

// nothingComesBack waits until all accepted requests have had their callbacks and the journal is
// empty. Then it kills all processes, and checks that the next start has nothing to do.
func (r *rig) nothingComesBack(l *ledger) {
	r.t.Helper()
	r.until(2*late, "all accepted to be told", func() bool { return l.waiting() == 0 })
	r.until(2*late, "an empty journal", func() bool { return r.value("stagecoach_async_bytes") == 0 })
	r.killAll()
	r.restart()
	if n := r.value(`stagecoach_async_requests_total{result="resumed"}`); n != 0 {
		r.t.Errorf("%v requests that were done come back", n)
	}
}

// moment is over after d.
func moment(d time.Duration) func() bool {
	at := time.Now().Add(d)
	return func() bool { return !time.Now().Before(at) }
}

// send posts async requests from several clients until the server is gone, or stop is closed.
func (l *ledger) send(t *testing.T, to *client.Client, back string, round int, stop chan struct{}) *sync.WaitGroup {
	var clients sync.WaitGroup
	r := &rig{Client: to, t: t}
	for c := range 4 {
		clients.Go(func() {
			pace := time.NewTicker(4 * time.Millisecond)
			defer pace.Stop()
			for i := range 100 {
				select {
				case <-pace.C:
				case <-stop:
					return
				}
				name := fmt.Sprintf("%d-%d-%d", round, c, i)
				a, err := r.trySend(http.MethodPost, "/async-function/echo", asyncBody(name), "X-Callback-Url", back+"/?"+name)
				if err != nil {
					return // killed
				}
				if a.Status != http.StatusAccepted {
					t.Errorf("%s: status %d: %s", name, a.Status, a.Body)
					return
				}
				l.mu.Lock()
				l.accepted[name] = true
				l.mu.Unlock()
			}
		})
	}
	return &clients
}

// killAll kills up and all processes that it started, at once.
func (r *rig) killAll() {
	r.t.Helper()
	left := r.descendants()
	for _, pid := range append([]int{r.up.Cmd.Process.Pid}, pidsOf(left)...) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have gone with its parent
	}
	<-r.up.Done
	r.up = nil
	gone(r.t, left)
}

func pidsOf(all []process) []int {
	out := make([]int, len(all))
	for i, p := range all {
		out[i] = p.pid
	}
	return out
}

// startAndKill starts up, and after a while kills it and all processes that it started.
func (r *rig) startAndKill(after time.Duration) {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self, r.args...)
	cmd.Stderr = r.log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.until(soon, "the moment", moment(after))
	r.up = &child.Process{Cmd: cmd}
	left := r.descendants()
	r.up = nil
	for _, pid := range slices.Concat([]int{cmd.Process.Pid}, pidsOf(left)) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have gone with its parent
	}
	_ = cmd.Wait() // killed
	gone(r.t, left)
}

package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// trial is OCR requests by eight clients, under which processes are killed.
type trial struct {
	mu     sync.Mutex
	left   int // requests that nobody has sent yet
	done   int
	wrong  []string
	latest time.Duration // the slowest answer
}

// next reports whether there is another request to send.
func (l *trial) next() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left--
	return l.left >= 0
}

func (l *trial) answered(a client.Answer, err error, want string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done++
	l.latest = max(l.latest, a.Took)
	if err == nil && (a.Status != http.StatusOK || string(a.Body) != want) {
		err = fmt.Errorf("status %d after %v: %s", a.Status, a.Took, a.Body)
	}
	if err != nil {
		l.wrong = append(l.wrong, err.Error())
	}
}

func (l *trial) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done
}

// TestKillAnyProcess kills replicas, zygotes and spare children while eight clients send OCR
// requests. No request may be lost. The three kinds take turns, with one kill per ten answers. If
// the duration KILL_EVERY is set, there is one kill per KILL_EVERY instead, of a random kind.
// KILL_REQUESTS is the number of requests. KILL_SEED is the seed for the choice of processes.
func TestKillAnyProcess(t *testing.T) {
	t.Parallel()
	requests, seed := int(envNumber(t, "KILL_REQUESTS", 70)), envNumber(t, "KILL_SEED", rand.Uint64())
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	r := start(t)
	s, err := stack.Read("../../stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range s.Functions {
		if strings.HasPrefix(name, "ocr-") {
			if err := r.Deploy(t.Context(), client.FromStack(name, f)); err != nil {
				t.Fatal(err)
			}
		}
	}
	p, err := page.Draw(page.Options{Seed: 5, Width: 300, Height: 100, Size: 14})
	if err != nil {
		t.Fatal(err)
	}
	read := func() (client.Answer, error) {
		return r.trySend(http.MethodPost, "/function/ocr", string(p.PNG), "Content-Type", "image/png", "X-Timeout", "10m")
	}
	first, err := read()
	if err != nil || first.Status != http.StatusOK {
		t.Fatalf("the first page: %d %s, %v", first.Status, first.Body, err)
	}
	l := &trial{left: requests}
	begin := time.Now()
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for l.next() {
				a, err := read()
				l.answered(a, err, string(first.Body))
			}
		})
	}
	kinds := [][]string{{"replica"}, {"zygote"}, {"spare"}}
	due := func(kills int) bool { return l.count() >= 10*(kills+1) }
	if v := os.Getenv("KILL_EVERY"); v != "" {
		every, err := time.ParseDuration(v)
		if err != nil {
			t.Fatal("KILL_EVERY:", err)
		}
		kinds = [][]string{slices.Concat(kinds...)}
		due = func(kills int) bool { return time.Since(begin) >= time.Duration(kills+1)*every }
	}
	killed := map[string]int{}
	for kills := 0; ; kills++ {
		r.until(10*late, "the next kill, or the last answer", func() bool { return due(kills) || l.count() == requests })
		if l.count() == requests {
			break
		}
		if kind := r.killOne(kinds[kills%len(kinds)], chance); kind != "" {
			killed[kind]++
		}
	}
	clients.Wait()
	for _, w := range l.wrong {
		t.Error(w)
	}
	if killed["replica"] == 0 || killed["zygote"] == 0 || killed["spare"] == 0 {
		t.Errorf("killed %v, want some of each kind", killed)
	}
	t.Logf("%d of %d requests failed; killed %v; %v calls retried, slowest answer %v, %v in all", len(l.wrong), requests, killed,
		r.value("stagecoach_flow_retries_total"), l.latest.Round(time.Millisecond), time.Since(begin).Round(time.Second))
}

// killOne kills a process of one of these kinds, and returns its kind; empty: there was none, or it
// had just ended.
func (r *rig) killOne(kinds []string, chance *rand.Rand) string {
	all := r.byKind()
	n := 0
	for _, kind := range kinds {
		n += len(all[kind])
	}
	if n == 0 {
		return ""
	}
	i := chance.IntN(n)
	for _, kind := range kinds {
		if i >= len(all[kind]) {
			i -= len(all[kind])
			continue
		}
		if syscall.Kill(all[kind][i], syscall.SIGKILL) == nil {
			return kind
		}
		break
	}
	return ""
}

// TestKillZygoteAgainAndAgain kills each zygote of a function as soon as it has loaded. Requests
// that come then wait for the next one.
func TestKillZygoteAgainAndAgain(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("hold", "10ms", map[string]string{"min": "1", "max": "2"}, nil))
	r.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	for range 4 {
		var zygote int
		r.until(late, "a zygote with a replica", func() bool {
			all := r.byKind()
			if len(all["zygote"]) == 0 || len(all["replica"]) == 0 {
				return false
			}
			zygote = all["zygote"][0]
			return true
		})
		if err := syscall.Kill(zygote, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		proctest.Gone(t, zygote)
	}
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			if a, err := r.trySend(http.MethodPost, "/function/hold", "x"); err != nil || a.Status != http.StatusOK {
				t.Errorf("status %d: %s, %v", a.Status, a.Body, err)
			}
		})
	}
	clients.Wait()
}

// byKind returns the pids of up's processes by kind: replica, zygote, spare.
func (r *rig) byKind() map[string][]int {
	out, parents := map[string][]int{}, r.parents()
	for _, p := range allProcesses() {
		if !slices.Contains(parents, p.parent) {
			continue
		}
		if !p.zygote {
			out["replica"] = append(out["replica"], p.pid)
			continue
		}
		out["zygote"] = append(out["zygote"], p.pid)
		for _, pid := range proctest.Children(r.t, p.pid) {
			kind := "replica"
			if spare(pid) {
				kind = "spare"
			}
			out[kind] = append(out[kind], pid)
		}
	}
	return out
}

// envNumber returns the number in a variable of the environment.
func envNumber(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatal(name, err)
	}
	return n
}

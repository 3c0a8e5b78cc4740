package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestOCR deploys the repository's stack in a random order, which then reads drawn pages.
func TestOCR(t *testing.T) { onEachRuntime(t, testOCR) }

func testOCR(t *testing.T, start starter) {
	r := start(t)
	stack, err := stack.Read("../../stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range stack.Functions { // map order is random
		if err := r.Deploy(t.Context(), client.FromStack(name, f)); err != nil {
			t.Fatal(err)
		}
	}
	p, err := page.Draw(page.Options{Seed: 5, Width: 600, Height: 200, Size: 16})
	if err != nil {
		t.Fatal(err)
	}
	a := r.must(http.StatusOK, http.MethodPost, "/function/ocr", string(p.PNG), "Content-Type", "image/png", "X-Timeout", "10m")
	if cer := ocr.CER(string(a.Body), p.Text()); cer > 0.02 {
		t.Errorf("character error rate %.4f, want at most 0.02: got\n%s\nwant\n%s", cer, a.Body, p.Text())
	}
	timing := openloop.ServerTiming(a.Header.Get("Server-Timing"))
	for i, stage := range []string{"ocr-detect", "ocr-recognise", "ocr-text"} {
		if len(timing) != 3 || timing[i].Stage != stage || timing[i].Service <= 0 {
			t.Fatalf("Server-Timing %q, want three stages in order, each with a time", a.Header.Get("Server-Timing"))
		}
	}
	if timing[1].Calls < len(p.Lines) || timing[0].Calls != 1 {
		t.Errorf("%d calls of detect, %d of recognise, want 1, and one a box of %d lines at least", timing[0].Calls, timing[1].Calls, len(p.Lines))
	}
	if a.Header.Get("X-Call-Id") == "" || a.Header.Get("X-Duration-Seconds") == "" {
		t.Errorf("headers %v, want X-Call-Id and X-Duration-Seconds", a.Header)
	}

	a = r.must(http.StatusOK, http.MethodPost, "/function/ocr", string(p.PNG), "Content-Type", "image/png", "Accept", "application/json")
	var lines struct{ Lines []ocr.Line }
	if err := json.Unmarshal(a.Body, &lines); err != nil || len(lines.Lines) != len(p.Lines) || !strings.HasPrefix(a.Header.Get("Content-Type"), "application/json") {
		t.Errorf("with Accept: application/json: %v, %d lines of type %q, want %d: %s", err, len(lines.Lines), a.Header.Get("Content-Type"), len(p.Lines), a.Body)
	}
	a = r.must(http.StatusBadRequest, http.MethodPost, "/function/ocr", "no picture", "Content-Type", "image/png")
	if !strings.Contains(string(a.Body), `stage "ocr-detect"`) {
		t.Errorf("a page that is none: %s, want the stage that refused it", a.Body)
	}
}

// TestUpDrainsRequestsOnSIGTERM sends SIGTERM to up while requests run. The requests succeed, up
// ends without an error, and nothing is left.
func TestUpDrainsRequestsOnSIGTERM(t *testing.T) {
	t.Parallel()
	r := start(t)
	const n = 6 // the last ones wait for the first ones
	r.deployAll(waitFn("hold", "1s", map[string]string{"min": "2", "max": "2"}, nil))
	r.until(late, "two replicas", func() bool { return r.line("hold").Ready == 2 })
	r.must(http.StatusOK, http.MethodPost, "/function/hold", "")
	answers := make(chan client.Answer, n)
	for range n {
		go func() { answers <- r.send(http.MethodPost, "/function/hold", "") }()
	}
	r.until(soon, "all requests to be there", func() bool {
		done := len(answers)
		tl := r.line("hold")
		return done+tl.Running+tl.Waiting == n
	})
	if len(answers) == n {
		t.Fatal("all requests ended before the signal: it proves nothing")
	}
	r.stop()
	for range n {
		if a := <-answers; a.Status != http.StatusOK {
			t.Errorf("status %d, want 200: %s", a.Status, a.Body)
		}
	}
	if _, err := r.trySend(http.MethodGet, "/healthz", ""); err == nil {
		t.Error("somebody still listens")
	}
}

// graph is the five stages of TestDeployOrders: a leads to b and c, these to d, and d to e.
var graph = []fn{
	{"a", "noop", zero, map[string]string{"pipeline": "five", "next": "b, c", "slo": "2s"}, nil},
	{"b", "noop", zero, map[string]string{"pipeline": "five", "next": "d"}, nil},
	{"c", "noop", zero, map[string]string{"pipeline": "five", "next": "d"}, nil},
	{"d", "noop", zero, map[string]string{"pipeline": "five", "next": "e"}, nil},
	{"e", "noop", zero, map[string]string{"pipeline": "five"}, nil},
}

var zero = map[string]string{"min": "0", "zero": "true", "zero-duration": "1m"}

// TestDeployOrders deploys five stages in random orders. Until the graph is complete, an invocation
// says what is missing.
func TestDeployOrders(t *testing.T) {
	t.Parallel()
	r := start(t)
	for round := range 10 {
		order := rand.Perm(len(graph))
		t.Logf("round %d: %v", round, order)
		r.must(http.StatusNotFound, http.MethodPost, "/function/five", "x")
		here := map[string]bool{}
		for _, i := range order[:len(order)-1] {
			r.deployAll(graph[i])
			here[graph[i].name] = true
			missing, by := "", ""
			for _, f := range graph {
				for next := range strings.SplitSeq(f.annotations["next"], ", ") {
					if here[f.name] && next != "" && !here[next] && missing == "" {
						missing, by = next, f.name
					}
				}
			}
			a := r.send(http.MethodPost, "/function/five", "x")
			var p struct {
				Ready  bool
				Faults []struct{ Function, Annotation, Got, Want string }
			}
			if err := r.Get(t.Context(), "/system/pipelines/five", &p); err != nil {
				t.Fatal(err)
			}
			if p.Ready != (len(p.Faults) == 0) || p.Ready != (a.Status == http.StatusOK) {
				t.Errorf("after %v: ready %t, faults %v, an invocation answers %d", here, p.Ready, p.Faults, a.Status)
			}
			if missing == "" {
				continue // such as e alone, which is whole; package pipeline tests which graphs are
			}
			for _, part := range []string{fmt.Sprintf("function %q", by), "annotation stagecoach.dev/next", fmt.Sprintf("got %q, which is not deployed", missing), "want a deployed function"} {
				if a.Status != http.StatusServiceUnavailable || !strings.Contains(string(a.Body), part) {
					t.Errorf("after %v: status %d, %s, want 503 with %q", here, a.Status, a.Body, part)
				}
			}
			if f := p.Faults[0]; f.Function != by || f.Annotation != "stagecoach.dev/next" || !strings.Contains(f.Got, missing) {
				t.Errorf("after %v: fault %+v, want one of %s about %s", here, f, by, missing)
			}
			if a.Header.Get("Retry-After") == "" || a.Header.Get("X-Openfaas-Internal") == "" {
				t.Errorf("503 with headers %v, want Retry-After and X-Openfaas-Internal", a.Header)
			}
			r.describes("five", "Ready:     false", fmt.Sprintf("Fault:  function %q, stagecoach.dev/next: got %q, which is not deployed", by, missing))
		}
		r.deployAll(graph[order[len(order)-1]])
		if a := r.must(http.StatusOK, http.MethodPost, "/function/five", "x"); string(a.Body) != `["x","x"]` {
			t.Errorf("the whole graph answers %s, want both branches' output", a.Body)
		}
		r.describes("five", "Ready:     true", "Entry:     a", "SLO:       2s", "b, c")
		for _, i := range rand.Perm(len(graph)) {
			r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", fmt.Sprintf(`{"functionName":%q}`, graph[i].name))
		}
	}
}

// describes runs `stagecoach pipeline describe` and looks for parts of what it prints.
func (r *rig) describes(name string, parts ...string) {
	r.t.Helper()
	var out strings.Builder
	if err := run(r.t.Context(), []string{"pipeline", "describe", "--gateway", r.Base, name}, &out); err != nil {
		r.t.Fatal(err)
	}
	for _, part := range parts {
		if !strings.Contains(out.String(), part) {
			r.t.Errorf("describe %s: want %q in\n%s", name, part, out.String())
		}
	}
}

// TestIdleFunctionSleepsAndWakes lets an idle function go to sleep, wakes it with a request, and
// scales it by hand.
func TestIdleFunctionSleepsAndWakes(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("doze", "10ms", map[string]string{"min": "0", "max": "4", "zero": "true", "zero-duration": "2s"}, nil))
	asleep := func() bool { return r.shows("doze").Replicas == 0 && len(r.pids("wait", false)) == 0 }
	r.must(http.StatusOK, http.MethodPost, "/function/doze", "") // from nothing
	r.until(soon, "the idle function to sleep", asleep)
	a := r.must(http.StatusOK, http.MethodPost, "/function/doze", "")
	starts := r.starts("doze")
	last := starts[len(starts)-1]
	if len(starts) < 2 || !starts[0].Loaded || last.Loaded || last.Path != keysmanager.PathFork {
		t.Errorf("replicas came up by %+v, want a load, then a fork", starts)
	}
	t.Logf("loaded first: ready after %v; woken by a fork: ready after %v, answered in %v", starts[0].Ready, last.Ready, a.Took)

	scale := func(n int) {
		r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/doze", fmt.Sprintf(`{"serviceName":"doze","replicas":%d}`, n))
	}
	scale(3)
	r.until(soon, "three replicas", func() bool { s := r.shows("doze"); return s.Replicas == 3 && s.AvailableReplicas == 3 })
	scale(0)
	r.until(soon, "no replicas", asleep)
	r.must(http.StatusBadRequest, http.MethodPost, "/system/scale-function/doze", `{"serviceName":"doze","replicas":5}`)
	r.must(http.StatusNotFound, http.MethodPost, "/system/scale-function/none", `{"serviceName":"none","replicas":1}`)
	if s := r.shows("doze"); s.InvocationCount != 2 {
		t.Errorf("%v invocations, want 2", s.InvocationCount)
	}
	for kind, least := range map[string]int{"ordered": 4, "started": 4, "ready": 4, "first answer": 2, "draining": 4, "stopped": 4} {
		// An end is reported a moment after its process has gone.
		r.until(soon, fmt.Sprintf("%d events of kind %q in the timeline", least, kind), func() bool { return len(r.events("doze", kind)) >= least })
	}
	if got := slices.Concat(r.events("doze", "lost"), r.events("doze", "failed")); len(got) > 0 {
		t.Errorf("nothing went wrong, and yet: %+v", got)
	}
}

// TestCallerIsToldThatTheBudgetHasNoReplica calls a function for which the budget has no replica.
// The caller is told so at once, and what to do.
func TestCallerIsToldThatTheBudgetHasNoReplica(t *testing.T) {
	t.Parallel()
	r := start(t, "--budget", "1")
	r.deployAll(waitFn("awake", "10ms", nil, nil), waitFn("doze", "10ms", map[string]string{"min": "0", "zero": "true"}, nil))
	r.must(http.StatusOK, http.MethodPost, "/function/awake", "")
	a := r.must(http.StatusServiceUnavailable, http.MethodPost, "/function/doze", "")
	if !strings.Contains(string(a.Body), "the budget of 1 replicas is used up by the fewest that other functions may have: raise it (--budget)") {
		t.Errorf("body %q", a.Body)
	}
}

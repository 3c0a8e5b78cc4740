package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// keepFunction writes a function of the default namespace into the state of an up that does not
// run, as an earlier version did.
func (r *rig) keepFunction(d client.Deployment) {
	r.t.Helper()
	d.Namespace = "openfaas-fn"
	value, err := json.Marshal(map[string]any{"version": 1, "deployment": d, "createdAt": "2026-01-02T03:04:05Z"})
	if err != nil {
		r.t.Fatal(err)
	}
	server, err := queue.StartServer(queue.ServerConfig{Dir: filepath.Join(r.state, "nats"), Sync: -1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		r.t.Fatal(err)
	}
	defer server.Close()
	nc, err := server.Connect("test")
	if err != nil {
		r.t.Fatal(err)
	}
	defer nc.Close()
	kv, err := queue.OpenKV(r.t.Context(), nc, server.Disk(), "functions")
	if err == nil {
		_, err = kv.Put(r.t.Context(), d.Service+"."+d.Namespace, value)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestOneMeaningPerName has two functions that a.b could mean: a in namespace b, and a.b in the
// default namespace, which an earlier version stored. Each request reaches the function that it
// names, and never the other one.
func TestOneMeaningPerName(t *testing.T) {
	t.Parallel()
	r := start(t)
	// Each function answers with its environment, and prints how large that was.
	says := func(name, namespace string) client.Deployment {
		f := fn{name, "echo-http", nil, nil, map[string]string{"fprocess": "dd if=/proc/self/environ", "mode": "streaming", "who": name + " of " + namespace}}
		d := f.deployment()
		d.Namespace = namespace
		return d
	}
	if err := r.Deploy(t.Context(), says("a", "b")); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.keepFunction(says("a.b", "openfaas-fn"))
	r.restart()
	if log := r.log.String(); !strings.Contains(log, `function=a.b.openfaas-fn`) || !strings.Contains(log, "a stored function has a name that is no longer accepted") {
		t.Error("the log does not warn of the old name")
	}
	kinds := []struct {
		who, path, query string // in paths and queries
		url              string // to be invoked
		body             string // to be removed
	}{
		{"a of b", "a.b", "", "a.b", `{"functionName":"a.b"}`},
		{"a.b of openfaas-fn", "a.b", "?namespace=openfaas-fn", "a.b.openfaas-fn", `{"functionName":"a.b","namespace":"openfaas-fn"}`},
	}
	c := &operator{t, t.TempDir(), r.Base}
	for i, k := range kinds {
		name, namespace, _ := strings.Cut(k.who, " of ")
		for _, path := range []string{k.path + k.query, k.url} {
			if s := r.shows(path); s.Name != name || s.Namespace != namespace {
				t.Errorf("GET %s: %s of %s, want %s", path, s.Name, s.Namespace, k.who)
			}
		}
		for range i + 1 { // once and twice
			if a := r.must(http.StatusOK, http.MethodPost, "/function/"+k.url, ""); !strings.Contains(string(a.Body), "who="+k.who+"\x00") {
				t.Errorf("/function/%s: %q, want an answer of %s", k.url, a.Body, k.who)
			}
		}
		if s := r.shows(k.path + k.query); s.InvocationCount != float64(i+1) {
			t.Errorf("%s: %v invocations, want %d", k.who, s.InvocationCount, i+1)
		}
		var tl schema.Timeline
		if err := r.Get(t.Context(), "/system/timeline/"+k.path+k.query, &tl); err != nil || tl.Function != name+"."+namespace {
			t.Errorf("the timeline of %s is of %q, %v", k.who, tl.Function, err)
		}
		c.run("who="+k.who+"\x00", "", "invoke", name, "-n", namespace)
		c.run("Namespace: +"+namespace+"\n", "", "describe", name, "-n", namespace)
	}
	for i, k := range kinds {
		name, namespace, _ := strings.Cut(k.who, " of ")
		var a client.Answer
		r.until(soon, "what it printed", func() bool {
			a = r.must(http.StatusOK, http.MethodGet, "/system/logs?name="+k.path+strings.Replace(k.query, "?", "&", 1), "")
			return strings.Count(string(a.Body), "records in") >= i+2 // the command's, too
		})
		for _, line := range strings.Split(strings.TrimSpace(string(a.Body)), "\n") {
			var m message
			if err := json.Unmarshal([]byte(line), &m); err != nil || m.Name != name || m.Namespace != namespace {
				t.Errorf("logs of %s: %v in %s", k.who, err, line)
			}
		}
		if n := strings.Count(string(a.Body), "records in"); n != i+2 {
			t.Errorf("logs of %s: %d runs, want its own %d", k.who, n, i+2)
		}
	}
	for i, k := range kinds {
		want := i + 2
		r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/"+k.path+k.query, fmt.Sprintf(`{"replicas":%d}`, want))
		r.until(soon, fmt.Sprint(want, " replicas of ", k.who), func() bool { return r.shows(k.path+k.query).Replicas == want })
	}
	if s := r.shows("a.b"); s.Replicas != 2 {
		t.Errorf("%d replicas of a of b, want 2: the other one was scaled", s.Replicas)
	}
	r.must(http.StatusBadRequest, http.MethodPut, "/system/functions", `{"service":"a.b","image":"stagecoach/echo-http:0.1.0"}`)

	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", kinds[0].body)
	// The other function is not removed.
	r.must(http.StatusNotFound, http.MethodDelete, "/system/functions", kinds[0].body)
	r.must(http.StatusNotFound, http.MethodPost, "/function/a.b", "")
	r.must(http.StatusNotFound, http.MethodGet, "/system/function/a.b", "")
	if a := r.must(http.StatusOK, http.MethodPost, "/function/a.b.openfaas-fn", ""); !strings.Contains(string(a.Body), "who=a.b of openfaas-fn\x00") {
		t.Errorf("after the other one was removed: %q", a.Body)
	}
	if err := r.Deploy(t.Context(), says("a", "b")); err != nil {
		t.Fatal(err)
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", kinds[1].body)
	r.must(http.StatusNotFound, http.MethodDelete, "/system/functions", kinds[1].body)
	r.must(http.StatusNotFound, http.MethodPost, "/function/a.b.openfaas-fn", "")
	if a := r.must(http.StatusOK, http.MethodPost, "/function/a.b", ""); !strings.Contains(string(a.Body), "who=a of b\x00") {
		t.Errorf("after the other one was removed: %q", a.Body)
	}
}

// TestAnEntryOfThePipelinesName checks that /function/NAME runs the pipeline, not its entry stage
// alone. A name that is in use is refused for another meaning.
func TestAnEntryOfThePipelinesName(t *testing.T) {
	t.Parallel()
	r := start(t)
	first, second := httpFn("both", nil), httpFn("second", nil)
	first.annotations = map[string]string{"pipeline": "both", "next": "second"}
	second.annotations = map[string]string{"pipeline": "both"}
	r.deployAll(second, first)
	a := r.must(http.StatusOK, http.MethodPost, "/function/both/echo", "x")
	var stages []string
	for _, s := range openloop.ServerTiming(a.Header.Get("Server-Timing")) {
		stages = append(stages, s.Stage)
	}
	if string(a.Body) != "x" || strings.Join(stages, " ") != "both second" {
		t.Errorf("%q by the stages %q, want x by both and second", a.Body, stages)
	}
	a = r.must(http.StatusConflict, http.MethodPut, "/system/functions", `{"service":"both","image":"stagecoach/noop:0.1.0"}`)
	if !strings.Contains(string(a.Body), "(second)") {
		t.Errorf("%s, want the function that declares the pipeline", a.Body)
	}
	r.must(http.StatusConflict, http.MethodPost, "/system/functions", `{"service":"third","image":"stagecoach/noop:0.1.0","annotations":{"stagecoach.dev/pipeline":"second"}}`)
}

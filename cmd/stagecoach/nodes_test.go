package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestNodesAndCache looks at a node through a function's life: its replica and its parameters are there; warm brings them, so that the
// next start is a hit; what is in use is not taken away.
func TestNodesAndCache(t *testing.T) {
	t.Parallel()
	r := start(t)
	c := &cli{t, t.TempDir(), r.base}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	c.run(`^NODE +KIND +CPU +MEMORY +USED +DEVICES +CACHED +REPLICAS +HITS +MISSES\n`+host+` +up +\d+m +[\d.]+ GiB +[\d.]+ [MG]iB +0 +0 +0 +0 +0\n$`, "", "node", "list")
	c.run(`^NODE +FUNCTION +DIGEST +SIZE .*\n$`, "", "cache", "list")
	if out := c.run("", "", "cache", "list", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("cache list --json prints %q, want []", out)
	}

	r.deployAll(waitFn("asleep", "1ms", map[string]string{"min": "0", "zero": "true"}, nil), fn{"plain", "noop", nil, nil, nil})
	c.run(host+`: [\d.]+ MiB in memory\n`, "", "cache", "warm", "asleep")
	c.run(host+`: [\d.]+ MiB in memory\n`, "", "cache", "warm", "asleep.openfaas-fn", "--node", host) // it was there
	misses := r.value(`stagecoach_cache_lookups_total{node="` + host + `",result="miss"}`)
	r.must(http.StatusOK, http.MethodPost, "/function/asleep", "x")
	if now := r.value(`stagecoach_cache_lookups_total{node="` + host + `",result="miss"}`); now != misses {
		t.Errorf("%v starts have missed after warm, want none", now-misses)
	}
	c.run(`(?s)Node: +`+host+`\nKind: +up\n.*\nCACHED FOR +DIGEST .*\nasleep.openfaas-fn +[0-9a-f]{12} +[\d.]+ MiB +1 +ready.*\nREPLICA +PID .*\nasleep-`, "", "node", "describe", host)

	var n node.Inventory
	if err := json.Unmarshal([]byte(c.run("", "", "node", "describe", host, "--json")), &n); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(n.Replicas, func(r node.Replica) bool { return r.Function == "asleep.openfaas-fn" })
	if n.Name != host || !n.Embedded || n.PID != r.up.cmd.Process.Pid || len(n.Zygotes) != 1 || i < 0 || !slices.Contains(r.pids("wait", false), n.Replicas[i].PID) {
		t.Errorf("the node's inventory is %+v", n)
	}
	replica := n.Replicas[i].Name
	c.refuse(`cache evict: status 409: node "`+host+`": evict "asleep.openfaas-fn": its parameters are in use: 1 replicas run from it \(`+replica+`\); scale the function down first`, "", "cache", "evict", "asleep")
	digest := n.Zygotes[0].Digest
	c.refuse("status 409: .*"+replica, "", "cache", "evict", digest)
	c.run(host+` +asleep.openfaas-fn +`+digest[:12], "", "cache", "list", "--node", host)

	r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/asleep", `{"serviceName": "asleep", "replicas": 0}`)
	before := r.pids("wait", true)
	r.until(late, "the parameters to be idle, and to go", func() bool {
		out, err := c.try("", "cache", "evict", digest[:12], "--json")
		return err == nil && strings.HasPrefix(out, `[{"node":"`+host+`","bytes":`)
	})
	if left := r.pids("wait", true); len(before) != 1 || slices.Contains(left, before[0]) {
		t.Errorf("zygotes %v are %v after they were evicted", before, left)
	}

	c.refuse(`cache warm: status 400: node "`+host+`": function "plain.openfaas-fn": the function has no model`, "", "cache", "warm", "plain")
	c.refuse(`status 404: node "`+host+`": evict "plain.openfaas-fn": no parameters of it are in memory`, "", "cache", "evict", "plain")
	c.refuse(`status 404: function "none": not deployed`, "", "cache", "warm", "none")
	c.refuse(`status 404: node "moon": no node of this name, want one of: `+host, "", "cache", "warm", "asleep", "--node", "moon")
	c.refuse(`status 404: node "moon"`, "", "node", "describe", "moon")
	c.refuse(`status 404: node "moon"`, "", "cache", "list", "--node", "moon")
	c.refuse(`status 404: digest "0123456789ab": no parameters`, "", "cache", "evict", "0123456789ab")
}

// fakeNodes are nodes with devices, which this machine may not have.
type fakeNodes struct {
	all   []node.Inventory
	fails error
}

func (f fakeNodes) Inventories() []node.Inventory { return f.all }

func (f fakeNodes) Load(context.Context, string, node.Spec) (int64, error) { return 5, f.fails }

func (f fakeNodes) Evict(context.Context, string, string) (int64, error) { return 5, f.fails }

// fakeSpecs is one function, f.ns.
type fakeSpecs struct{}

func (fakeSpecs) Known(key pipeline.Key) bool {
	return key == pipeline.Key{Name: "f", Namespace: "ns"}
}

func (fakeSpecs) HasNamespace(name string) bool { return name == "ns" || name == "openfaas-fn" }

func (fakeSpecs) Spec(pipeline.Key) (node.Spec, bool) {
	return node.Spec{Function: "f.ns"}, true
}

func twoNodes() fakeNodes {
	zygote := func(digest string) node.Zygote {
		return node.Zygote{Function: "f.ns", Namespace: "ns", Digest: digest, State: node.Ready, Bytes: 3 << 20}
	}
	return fakeNodes{all: []node.Inventory{
		{
			Identity: node.Identity{Name: "a"}, Zygotes: []node.Zygote{zygote("sha256:aaaabbbb11")},
			Devices: []node.Device{
				{UUID: "GPU-1", Index: "0", Name: "A100", Memory: 40 << 30, Used: 1 << 30, Reserved: 8 << 30, Free: 31 << 30, Parked: 512 << 20, ParkedFor: []string{"f.ns"}, Utilisation: 0.5, Temperature: 41, Power: 61.5, Healthy: true},
				{UUID: "MIG-2", Index: "1:0", Name: "A100 MIG 1g.5gb", Memory: 5 << 30, Free: 5 << 30, Utilisation: -1, Cause: "it is lost"},
			},
			Failures: []node.Failure{{Function: "g.ns", Count: 3, Retry: time.Unix(0, 0), Cause: "no\tsuch\x1b[2Jfile"}},
			Replicas: []node.Replica{{Name: "f-1", PID: 7, Path: "fork", Device: "GPU-1", CPUMilli: 500, Usage: &node.Usage{CPUMilli: 250, Memory: 3 << 20, Throttled: 1500 * time.Millisecond}}},
			Memory:   node.Memory{Bound: "cgroup"}, Counts: node.Counts{Hits: 1, Misses: 2, Evictions: 3, Refused: 4},
		},
		{Identity: node.Identity{Name: "b"}, Zygotes: []node.Zygote{zygote("sha256:aaaabbbb22")}, Leaving: true},
	}}
}

func TestCacheAPI(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		fails        error
		path, body   string
		status       int
		want         string
		internal, js bool
	}{
		"warm all":           {nil, "warm", `{"function": "f.ns"}`, 200, `[{"node":"a","bytes":5},{"node":"b","bytes":5}]`, false, false},
		"warm one":           {nil, "warm", `{"function": "f", "namespace": "ns", "node": "b"}`, 200, `[{"node":"b","bytes":5}]`, false, false},
		"evict":              {nil, "evict", `{"function": "f.ns"}`, 200, `[{"node":"a","bytes":5},{"node":"b","bytes":5}]`, false, false},
		"evict a digest":     {nil, "evict", `{"digest": "aaaabbbb1", "node": "a"}`, 200, `[{"node":"a","bytes":5}]`, false, false},
		"which digest":       {nil, "evict", `{"digest": "sha256:aaaabbbb"}`, 400, `digest: got "sha256:aaaabbbb", want more of it: several begin so`, false, false},
		"short digest":       {nil, "evict", `{"digest": "aaa"}`, 400, "digest: got \"aaa\", want eight or more", false, false},
		"neither":            {nil, "evict", `{}`, 400, `function: got "", want the name of a function, or a digest`, false, false},
		"both":               {nil, "evict", `{"function": "f.ns", "digest": "aaaabbbb1"}`, 400, "function: got \"f.ns\", want", false, false},
		"warm a digest":      {nil, "warm", `{"digest": "aaaabbbb1"}`, 400, "digest: got", false, false},
		"no function":        {nil, "warm", `{"node": "a"}`, 400, `function: got "", want the name of a function`, false, false},
		"no JSON":            {nil, "warm", `x`, 400, "body: got invalid character", false, false},
		"nothing":            {nil, "warm", ``, 400, "body: got EOF", false, false},
		"unknown field":      {nil, "warm", `{"fn": "f"}`, 400, "fn: got an unknown field, want one of function", false, false},
		"wrong type":         {nil, "warm", `{"node": 7}`, 400, "node: got a number, want a string", false, false},
		"too large":          {nil, "warm", `{"function": "` + strings.Repeat("f", maxCacheOrder) + `"}`, 413, "too large", false, false},
		"as JSON":            {nil, "warm", `{"node": 7}`, 400, `{"error":"node: got a number, want a string","fields":[{"path":"node","got":"a number","want":"a string"}]}`, false, true},
		"unknown function":   {nil, "warm", `{"function": "g"}`, 404, `function "g": not deployed`, false, false},
		"unknown node":       {nil, "warm", `{"function": "f.ns", "node": "c"}`, 404, `node "c": no node of this name, want one of: a, b`, false, false},
		"busy":               {keysmanager.ErrBusy, "evict", `{"function": "f.ns"}`, 409, "its parameters are in use", false, false},
		"sounds busy":        {errors.New("disk on fire: " + keysmanager.ErrBusy.Error()), "evict", `{"function": "f.ns"}`, 503, "disk on fire", true, false},
		"nowhere":            {keysmanager.ErrNotCached, "evict", `{"function": "f.ns"}`, 404, "no parameters", false, false},
		"no model":           {keysmanager.ErrNoModel, "warm", `{"function": "f.ns"}`, 400, "no model", false, false},
		"no room":            {fmt.Errorf("%w: 3 GiB", keysmanager.ErrNoRoom), "warm", `{"function": "f.ns"}`, 507, `node "a": no room: 3 GiB`, true, false},
		"the platform's own": {errors.New("disk on fire"), "warm", `{"function": "f.ns"}`, 503, `node "a": disk on fire`, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := twoNodes()
			n.fails = tc.fails
			req := httptest.NewRequest(http.MethodPost, "/system/cache/"+tc.path, strings.NewReader(tc.body))
			if tc.js {
				req.Header.Set("Accept", "application/json")
			}
			w := httptest.NewRecorder()
			serveNodes(n, fakeSpecs{}).ServeHTTP(w, req)
			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.want) {
				t.Errorf("status %d: %s, want %d: %s", w.Code, w.Body, tc.status, tc.want)
			}
			if internal := w.Header().Get("X-OpenFaaS-Internal") != ""; internal != tc.internal {
				t.Errorf("X-OpenFaaS-Internal: %t, want %t", internal, tc.internal)
			}
		})
	}
}

// TestWhatPoliciesSeeOfANode: what gives way is told apart, and what is being loaded is taken.
func TestWhatPoliciesSeeOfANode(t *testing.T) {
	got := planned(inventoryOf(keysmanager.Inventory{
		Node: "n", Memory: 1000, MemoryUsed: 300, Threshold: 850, CPUMilli: 2000,
		Zygotes: []keysmanager.ZygoteInfo{
			{Function: "busy", Bytes: 50, Replicas: 1, State: keysmanager.Ready},
			{Function: "idle", Bytes: 60, State: keysmanager.Ready},
			{Function: "loads", Bytes: 70, State: keysmanager.Loading},
			{Function: "old", Bytes: 80, State: keysmanager.Retiring},
		},
		Devices: []keysmanager.DeviceInfo{{Device: keysmanager.Device{ID: "g", Memory: 100, Unhealthy: "lost"}, Free: 30}},
	}))
	want := plan.Node{
		Name: "n", Memory: 1000, MemoryUsed: 370, Threshold: 850, CPUMilli: 2000,
		Zygotes: []plan.Zygote{{Function: "busy", Bytes: 50}, {Function: "idle", Bytes: 60, Idle: true}, {Function: "loads", Bytes: 70}},
		Devices: []plan.Device{{ID: "g", Memory: 100, MemoryUsed: 70, Unavailable: "lost"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestCacheList filters what nodes hold.
func TestCacheList(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]int{"": 2, "?node=b": 1, "?namespace=ns": 2, "?namespace=other": 404, "?namespace=openfaas-fn": 0, "?function=f&namespace=other": 404, "?function=f&namespace=ns": 2, "?function=f.ns": 2, "?function=f": 404, "?node=c": 404} {
		w := httptest.NewRecorder()
		serveNodes(twoNodes(), fakeSpecs{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/system/cache"+query, nil))
		var got []cached
		if w.Code != http.StatusOK {
			if w.Code != want {
				t.Errorf("%s: status %d: %s, want %d", query, w.Code, w.Body, want)
			}
		} else if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || len(got) != want {
			t.Errorf("%s: %s, %v, want %d", query, w.Body, err, want)
		}
	}
}

func TestNodeTables(t *testing.T) {
	t.Parallel()
	n := twoNodes()
	var list, one strings.Builder
	if err := errors.Join(listNodes(n.all, &list), describeNode(n.all[0], time.Unix(90, 0), &one)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a daemon 0m 0 B 0 B 2 (1 not well) 1 1 1 2", "b daemon, leaving 0m 0 B 0 B 0 1 0 0 0"} {
		if !matches("…"+want+"…", list.String()) {
			t.Errorf("want %q in\n%s", want, list.String())
		}
	}
	for _, want := range []string{
		"0 GPU-1 A100 40 GiB 1 GiB 8 GiB 512 MiB (f.ns) 31 GiB 50% 41 °C 62 W well", "1:0 MIG-2 A100 MIG 1g.5gb 5 GiB 0 B 0 B 0 B 5 GiB ? ? ? it is lost",
		"f.ns aaaabbbb11 3 MiB 0 ready ? false never", "g.ns 3 00:00:00 no such?[2Jfile", "f-1 7 fork GPU-1 250m of 500m 1.5s 3 MiB", "Memory: 0 B (cgroup), 0 B used;", "Cache: 1 hits, 2 misses, 3 evictions, 4 refused",
	} {
		if !matches("…"+want+"…", one.String()) {
			t.Errorf("want %q in\n%s", want, one.String())
		}
	}
	for ago, want := range map[time.Duration]string{-time.Second: "0s", 1500 * time.Millisecond: "2s", 61 * time.Minute: "1h", 5 * time.Minute: "5m", 72 * time.Hour: "3d"} {
		if got := age(time.Unix(0, 0), time.Unix(0, 0).Add(ago)); got != want {
			t.Errorf("%v: %q, want %q", ago, got, want)
		}
	}
}

// TestDeviceMetrics holds the metrics of devices against docs/metrics.md.
func TestDeviceMetrics(t *testing.T) {
	t.Parallel()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(newDeviceGauges(twoNodes().Inventories))
	const want = `
# HELP stagecoach_device_healthy 1 when replicas may run on an accelerator, 0 when it is not well.
# TYPE stagecoach_device_healthy gauge
stagecoach_device_healthy{node="a",uuid="GPU-1"} 1
stagecoach_device_healthy{node="a",uuid="MIG-2"} 0
# HELP stagecoach_device_power_watts Power that an accelerator draws, where it is known.
# TYPE stagecoach_device_power_watts gauge
stagecoach_device_power_watts{node="a",uuid="GPU-1"} 61.5
# HELP stagecoach_device_temperature_celsius Temperature of an accelerator, where it is known.
# TYPE stagecoach_device_temperature_celsius gauge
stagecoach_device_temperature_celsius{node="a",uuid="GPU-1"} 41
# HELP stagecoach_device_utilisation_ratio Share of the latest seconds in which an accelerator computed, where it is known.
# TYPE stagecoach_device_utilisation_ratio gauge
stagecoach_device_utilisation_ratio{node="a",uuid="GPU-1"} 0.5
# HELP stagecoach_device_reserved_bytes Memory of an accelerator that is reserved for replicas.
# TYPE stagecoach_device_reserved_bytes gauge
stagecoach_device_reserved_bytes{node="a",uuid="GPU-1"} 8.589934592e+09
stagecoach_device_reserved_bytes{node="a",uuid="MIG-2"} 0
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want), "stagecoach_device_healthy", "stagecoach_device_utilisation_ratio", "stagecoach_device_temperature_celsius",
		"stagecoach_device_power_watts", "stagecoach_device_reserved_bytes"); err != nil {
		t.Error(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var exported, documented []string
	for _, f := range families {
		exported = append(exported, f.GetName())
	}
	for name, d := range documentedMetrics(t) {
		if strings.HasPrefix(name, "stagecoach_device_") && name != "stagecoach_device_out_of_memory_total" { // TestOutOfMemory has that
			documented = append(documented, name)
			if d.kind != "gauge" || !slices.Equal(d.labels, []string{"node", "uuid"}) {
				t.Errorf("%s: the page says %+v, want a gauge by node and uuid", name, d)
			}
		}
	}
	sameNames(t, "devices", documented, exported)
}

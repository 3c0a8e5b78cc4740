package main

import (
	"encoding/json"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/nodemetrics"
)

// TestNodesAndCache checks `stagecoach node` and `stagecoach cache` while a function is deployed,
// called and idle. They list the function's replica and its parameters. `cache warm` loads
// parameters, so that the next start finds them in memory. Parameters in use cannot be evicted.
func TestNodesAndCache(t *testing.T) {
	t.Parallel()
	r := start(t)
	c := &operator{t, t.TempDir(), r.Base}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	c.run(`^NODE +KIND +STATUS +CPU +MEMORY +USED +DEVICES +CACHED +REPLICAS +HITS +MISSES +LINK\n`+host+` +up +ready +\d+m +[\d.]+ GiB +[\d.]+ [MG]iB +0 +0 +0 +0 +0 +-\n$`, "", "node", "list")
	c.run(`^NODE +FUNCTION +DIGEST +SIZE .*\n$`, "", "cache", "list")
	if out := c.run("", "", "cache", "list", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("cache list --json prints %q, want []", out)
	}

	r.deployAll(waitFn("asleep", "1ms", map[string]string{"min": "0", "zero": "true"}, nil), fn{"plain", "noop", nil, nil, nil})
	c.run(host+`: [\d.]+ MiB in memory\n`, "", "cache", "warm", "asleep")
	// It was in memory already.
	c.run(host+`: [\d.]+ MiB in memory\n`, "", "cache", "warm", "asleep.openfaas-fn", "--node", host)
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
	if n.Name != host || !n.Embedded || n.PID != r.up.Cmd.Process.Pid || len(n.Zygotes) != 1 || i < 0 || !slices.Contains(r.pids("wait", false), n.Replicas[i].PID) {
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

// TestWhatPoliciesSeeOfANode checks that idle parameters are marked as such for policies, and that
// the memory of loads under way counts as used.
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

// TestDeviceMetrics compares the metrics of devices with docs/metrics.md.
func TestDeviceMetrics(t *testing.T) {
	t.Parallel()
	r := prometheus.NewPedanticRegistry()
	has := []node.Device{
		{UUID: "GPU-1", Reserved: 8 << 30, Utilisation: 0.5, Temperature: 41, Power: 61.5, Healthy: true},
		{UUID: "MIG-2", Utilisation: -1, Cause: "it is lost"},
	}
	r.MustRegister(nodemetrics.NewDevices(func() []node.Inventory { return []node.Inventory{{Identity: node.Identity{Name: "a"}, Devices: has}} }))
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
		// TestOutOfMemory checks this metric.
		if strings.HasPrefix(name, "stagecoach_device_") && name != "stagecoach_device_out_of_memory_total" {
			documented = append(documented, name)
			if d.kind != "gauge" || !slices.Equal(d.labels, []string{"node", "uuid"}) {
				t.Errorf("%s: the page says %+v, want a gauge by node and uuid", name, d)
			}
		}
	}
	sameNames(t, "devices", documented, exported)
}

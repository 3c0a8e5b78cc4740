package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

func TestNodeTables(t *testing.T) {
	t.Parallel()
	zygote := node.Zygote{Function: "f.ns", Namespace: "ns", Digest: "sha256:aaaabbbb11", State: node.Ready, Bytes: 3 << 20}
	all := []schema.Node{
		{Inventory: node.Inventory{
			Identity: node.Identity{Name: "a"}, Zygotes: []node.Zygote{zygote},
			Devices: []node.Device{
				{UUID: "GPU-1", Index: "0", Name: "A100", Memory: 40 << 30, Used: 1 << 30, Reserved: 8 << 30, Free: 31 << 30, Parked: 512 << 20, ParkedFor: []string{"f.ns"}, Utilisation: 0.5, Temperature: 41, Power: 61.5, Healthy: true},
				{UUID: "MIG-2", Index: "1:0", Name: "A100 MIG 1g.5gb", Memory: 5 << 30, Free: 5 << 30, Utilisation: -1, Cause: "it is lost"},
			},
			Failures:   []node.Failure{{Function: "g.ns", Count: 3, Retry: time.Unix(0, 0), Cause: "no\tsuch\x1b[2Jfile"}},
			Replicas:   []node.Replica{{Name: "f-1", PID: 7, Path: "fork", Device: "GPU-1", CPUMilli: 500, Usage: &node.Usage{CPUMilli: 250, Memory: 3 << 20, Throttled: 1500 * time.Millisecond}}},
			Containers: []node.Container{{ID: "f-ns-abc", Function: "f.ns", Replica: "zygote-1", PID: 8, Class: "gvisor"}, {ID: "web-abd", Function: "web.ns", Replica: "web-1", PID: 9}},
			Memory:     node.Memory{Bound: "cgroup"}, Counts: node.Counts{Hits: 1, Misses: 2, Evictions: 3, Refused: 4},
		}},
		{Inventory: node.Inventory{Identity: node.Identity{Name: "b"}, Zygotes: []node.Zygote{zygote}}, Status: schema.NodeLeaving},
		{Inventory: node.Inventory{Identity: node.Identity{Name: "c"}}, Status: schema.NodeSilent, Since: time.Unix(0, 0), Cordoned: true, Cause: "its daemon is silent for 3s"},
		{Inventory: node.Inventory{Identity: node.Identity{Name: "d"}}, Status: schema.NodeDraining, Since: time.Unix(0, 0), Cordoned: true},
		{Inventory: node.Inventory{Identity: node.Identity{Name: "e"}}, Status: schema.NodeUnreachable, Since: time.Unix(0, 0), Cause: "no route"},
	}
	var list, one strings.Builder
	if err := errors.Join(listNodes(all, &list), describeNode(all[0], time.Unix(90, 0), &one), describeNode(all[2], time.Unix(90, 0), &one), describeNode(all[3], time.Unix(90, 0), &one), describeNode(all[4], time.Unix(90, 0), &one)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a daemon ready 0m 0 B 0 B 2 (1 not well) 1 1 1 2", "b daemon leaving 0m 0 B 0 B 0 1 0 0 0", "c daemon silent since 1970-01-01 00:00:00, cordoned 0m", "d daemon draining 0m", "e daemon unreachable since 1970-01-01 00:00:00 0m"} {
		if !strings.Contains(oneSpace(list.String()), want) {
			t.Errorf("want %q in\n%s", want, list.String())
		}
	}
	for _, want := range []string{
		"0 GPU-1 A100 40 GiB 1 GiB 8 GiB 512 MiB (f.ns) 31 GiB 50% 41 °C 62 W well", "1:0 MIG-2 A100 MIG 1g.5gb 5 GiB 0 B 0 B 0 B 5 GiB ? ? ? it is lost",
		"f.ns aaaabbbb11 3 MiB 0 ready ? false never", "g.ns 3 00:00:00 no such?[2Jfile", "f-1 7 fork GPU-1 250m of 500m 1.5s 3 MiB", "CONTAINER FUNCTION PID FOR CLASS f-ns-abc f.ns 8 zygote-1 gvisor web-abd web.ns 9 web-1 -", "Status: ready", "Status: silent since 1970-01-01 00:00:00, cordoned; its daemon is silent for 3s", "Status: draining, for 2m", "Status: unreachable since 1970-01-01 00:00:00; no route", "Memory: 0 B (cgroup), 0 B used;", "Cache: 1 hits, 2 misses, 3 evictions, 4 refused",
	} {
		if !strings.Contains(oneSpace(one.String()), want) {
			t.Errorf("want %q in\n%s", want, one.String())
		}
	}
	for ago, want := range map[time.Duration]string{-time.Second: "0s", 1500 * time.Millisecond: "2s", 61 * time.Minute: "1h", 5 * time.Minute: "5m", 72 * time.Hour: "3d"} {
		if got := age(time.Unix(0, 0), time.Unix(0, 0).Add(ago)); got != want {
			t.Errorf("%v: %q, want %q", ago, got, want)
		}
	}
}

// oneSpace returns text with one space for each row of spaces.
func oneSpace(text string) string { return strings.Join(strings.Fields(text), " ") }

package plan

import (
	"fmt"
	"strings"
	"testing"
)

// TestLackingNamesWhatNoNodeHas checks that only resources are named that no node could give a
// replica even if it were empty.
func TestLackingNamesWhatNoNodeHas(t *testing.T) {
	const gib = 1 << 30
	small := Node{Name: "small", Memory: 8 * gib, MemoryUsed: 8 * gib, CPUMilli: 16000}
	large := Node{Name: "large", Memory: 64 * gib, CPUMilli: 4000, Unavailable: "leaving", Leaving: true}
	gpu := Node{Name: "gpu", Memory: 16 * gib, CPUMilli: 4000, Devices: []Device{
		{ID: "a", Memory: 24 * gib, MemoryUsed: 24 * gib}, {ID: "b", Memory: 80 * gib, Unavailable: "it fell off the bus"},
	}}
	unknown := Node{Name: "unknown"}
	for name, c := range map[string]struct {
		nodes []Node
		f     Function
		want  string // resource: what the nodes have; empty: a node can hold it
	}{
		"no nodes":                          {nil, Function{Memory: 500 * gib}, ""},
		"nothing needed":                    {[]Node{small}, Function{}, ""},
		"all of a node that is full":        {[]Node{small}, Function{Memory: 8 * gib, CPUMilli: 16000}, ""},
		"a byte more":                       {[]Node{small}, Function{Memory: 8*gib + 1}, "memory: the largest node, small, has 8 GiB"},
		"a node that is leaving":            {[]Node{small, large}, Function{Memory: 64 * gib}, ""},
		"the largest is named":              {[]Node{small, large}, Function{Memory: 500 * gib}, "memory: the largest node, large, has 64 GiB"},
		"cores":                             {[]Node{small, large}, Function{CPUMilli: 16001}, "cpu: the largest node, small, has 16000m"},
		"memory and cores":                  {[]Node{small}, Function{Memory: 9 * gib, CPUMilli: 17000}, "memory: the largest node, small, has 8 GiB | cpu: the largest node, small, has 16000m"},
		"each on a node of its own":         {[]Node{large, small}, Function{Memory: 32 * gib, CPUMilli: 8000}, "memory: no node has all of it: large has 64 GiB, 4000m; small has 8 GiB, 16000m"},
		"a size that is unknown":            {[]Node{small, unknown}, Function{Memory: 500 * gib, CPUMilli: 1 << 20}, ""},
		"devices of a node without":         {[]Node{small, unknown}, Function{GPU: 1}, "devices: the largest node, small, has no devices"},
		"devices in use and unwell":         {[]Node{small, gpu}, Function{GPU: 2}, ""},
		"more devices":                      {[]Node{small, gpu}, Function{GPU: 3}, "devices: the largest node, gpu, has 2 of them"},
		"memory of a device":                {[]Node{gpu}, Function{GPU: 1, DeviceMemory: 80 * gib}, ""},
		"more memory than a device has":     {[]Node{small, gpu}, Function{GPU: 1, DeviceMemory: 81 * gib}, "device-memory: the largest node, small, has no devices"},
		"more memory than two devices":      {[]Node{gpu}, Function{GPU: 2, DeviceMemory: 25 * gib}, "device-memory: the largest node, gpu, has 1 of them"},
		"devices here and the memory there": {[]Node{gpu, large}, Function{GPU: 1, Memory: 32 * gib}, "memory: no node has all of it: gpu has 16 GiB, 2 of them; large has 64 GiB, no devices"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, l := range Lacking(c.nodes, &c.f) {
				got = append(got, fmt.Sprintf("%s: %s", l.Of, l.Most))
			}
			if got := strings.Join(got, " | "); got != c.want {
				t.Errorf("lacks %q, want %q", got, c.want)
			}
		})
	}
}

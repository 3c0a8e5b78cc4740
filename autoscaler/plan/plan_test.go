package plan

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

var start = time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)

func snapshot() Snapshot {
	return Snapshot{
		Rev: 7, At: start, Epoch: 2,
		Nodes: []Node{
			{Name: "a", Memory: 100, MemoryUsed: 40, CPUMilli: 4000, Devices: []Device{{ID: "gpu0", Memory: 50, MemoryUsed: 10}, {ID: "gpu1", Memory: 50, Unavailable: "lost"}}},
			{Name: "b", Memory: 100, Unavailable: "cordoned"},
		},
		Functions: []Function{
			{Name: "detect.ns", Revision: 3, Min: 1, Max: 4, Memory: 30, Batch: 1, Slots: 1, Replicas: []Replica{
				{Name: "detect-1", Revision: 3, Node: "a", State: Ready, Since: start},
				{Name: "detect-2", Revision: 2, Node: "a", State: Ready, Since: start},
				{Name: "detect-3", Revision: 3, Node: "a", State: Draining, Since: start},
			}},
			{Name: "gpu.ns", Revision: 1, Zero: true, Max: 2, GPU: 1, Memory: 30, DeviceMemory: 30, Batch: 4, Slots: 2},
		},
		Pipelines: []Pipeline{{Name: "ocr.ns", Stages: []string{"detect.ns", "missing.ns"}, SLO: time.Second}},
	}
}

func good() Plan {
	return Plan{
		Epoch: 2, Rev: 7, At: start,
		Wants: []Want{
			{Function: "detect.ns", Revision: 3, Slots: []Slot{{Replica: "detect-1", Node: "a"}, {Node: "a"}}, Why: "load"},
			{Function: "gpu.ns", Revision: 1},
		},
		Warm: []Warm{{Function: "detect.ns", Node: "a", Warmth: Host, Key: true}, {Function: "gpu.ns", Node: "a", Warmth: Parked}},
	}
}

func TestValidateFindsEachFault(t *testing.T) {
	if err := good().Validate(snapshot()); err != nil {
		t.Fatalf("a good plan: %v", err)
	}
	for name, tc := range map[string]struct {
		change func(*Plan)
		want   []string // each must be in the error
	}{
		"epoch":            {func(p *Plan) { p.Epoch = 1 }, []string{"epoch 1, want the snapshot's 2"}},
		"rev":              {func(p *Plan) { p.Rev = 6 }, []string{"made from snapshot 6"}},
		"at":               {func(p *Plan) { p.At = start.Add(1) }, []string{"made from snapshot 7"}},
		"unsorted":         {func(p *Plan) { p.Wants[0], p.Wants[1] = p.Wants[1], p.Wants[0] }, []string{"sorted"}},
		"twice":            {func(p *Plan) { p.Wants = append(p.Wants, p.Wants[1]) }, []string{`"gpu.ns" after "gpu.ns"`}},
		"unknown function": {func(p *Plan) { p.Wants[1].Function = "other.ns" }, []string{`"other.ns": unknown`, `"gpu.ns": no want`}},
		"old revision":     {func(p *Plan) { p.Wants[0].Revision = 2 }, []string{"revision 2, want 3"}},
		"unknown node":     {func(p *Plan) { p.Wants[0].Slots[1].Node = "c" }, []string{`node "c"`}},
		"cpu too little":   {func(p *Plan) { p.Wants[0].CPUMilli = 9 }, []string{"cpu 9m, want 0, as declared, or at least 10m"}},
		"cpu too much":     {func(p *Plan) { p.Wants[0].CPUMilli = 4001 }, []string{`cpu 4001m a replica, want at most what node "a" has, 4000m`}},
		"cordoned node":    {func(p *Plan) { p.Wants[0].Slots[1].Node = "b" }, []string{"cordoned"}},
		"too many": {func(p *Plan) {
			p.Wants[0].Slots = append(p.Wants[0].Slots, Slot{Node: "a"}, Slot{Node: "a"}, Slot{Node: "a"})
		}, []string{"5 slots, want at most 4", "120 B in"}},
		"too few":            {func(p *Plan) { p.Wants[0].Slots = nil }, []string{"0 slots, want at least 1"}},
		"no such replica":    {func(p *Plan) { p.Wants[0].Slots[0].Replica = "x" }, []string{`keeps replica "x", want`}},
		"kept twice":         {func(p *Plan) { p.Wants[0].Slots[1].Replica = "detect-1" }, []string{"twice"}},
		"kept and draining":  {func(p *Plan) { p.Wants[0].Slots[0].Replica = "detect-3" }, []string{"drains"}},
		"kept and old":       {func(p *Plan) { p.Wants[0].Slots[0].Replica = "detect-2" }, []string{"of revision 2, want 3"}},
		"kept and moved":     {func(p *Plan) { p.Wants[0].Slots[0].Node = "b" }, []string{"want where it is"}},
		"no device":          {func(p *Plan) { p.Wants[1].Slots = []Slot{{Node: "a"}} }, []string{`devices "" on node "a", want 1`}},
		"device not needed":  {func(p *Plan) { p.Wants[0].Slots[1].Device = "gpu0" }, []string{"want 0"}},
		"unknown device":     {func(p *Plan) { p.Wants[1].Slots = []Slot{{Node: "a", Device: "gpu9"}} }, []string{`device "gpu9"`}},
		"lost device":        {func(p *Plan) { p.Wants[1].Slots = []Slot{{Node: "a", Device: "gpu1"}} }, []string{"lost"}},
		"device taken twice": {func(p *Plan) { p.Wants[1].Slots = []Slot{{Node: "a", Device: "gpu0"}, {Node: "a", Device: "gpu0"}} }, []string{"two slots on device", "60 B in"}},
		"node overbooked":    {func(p *Plan) { p.Wants[1].Slots = []Slot{{Node: "a", Device: "gpu0"}, {Node: "a", Device: "gpu0"}} }, []string{`node "a": 90 B in new replicas, want at most 60 B`}},
		"negative":           {func(p *Plan) { p.Wants[0].Batch = -1 }, []string{"neither negative"}},
		"warm unsorted":      {func(p *Plan) { p.Warm[0], p.Warm[1] = p.Warm[1], p.Warm[0] }, []string{"sorted"}},
		"warm twice":         {func(p *Plan) { p.Warm[1] = p.Warm[0] }, []string{"sorted"}},
		"warm unknown":       {func(p *Plan) { p.Warm[1] = Warm{Function: "z.ns", Node: "z", Warmth: 9} }, []string{`warm "z.ns", want a function`, `node "z"`, "warmth(9)"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, s := good(), snapshot()
			tc.change(&p)
			err := p.Validate(s)
			if err == nil {
				t.Fatalf("no error, want %q", tc.want)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q in it", err, want)
				}
			}
		})
	}
}

func TestFewerThanMinimumNeedsAReason(t *testing.T) {
	p := good()
	p.Wants[0].Slots, p.Wants[0].Short = nil, "no room"
	if err := p.Validate(snapshot()); err != nil {
		t.Error(err)
	}
}

func TestFullNodeMayKeepItsReplicas(t *testing.T) {
	p, s := good(), snapshot()
	s.Nodes[0].MemoryUsed = 170
	p.Wants[0].Slots = p.Wants[0].Slots[:1]
	if err := p.Validate(s); err != nil {
		t.Error(err)
	}
}

func TestMemoryOfIdleZygotesCountsAsFree(t *testing.T) {
	p, s := good(), snapshot()
	s.Nodes[0].MemoryUsed = 100
	for _, idle := range []bool{true, false} {
		s.Nodes[0].Zygotes = []Zygote{{Function: "gpu.ns", Bytes: 30, Idle: idle}}
		if err := p.Validate(s); (err == nil) != idle {
			t.Errorf("idle %v: %v", idle, err)
		}
	}
}

func TestDomainsJoinPipelinesThatShareFunctions(t *testing.T) {
	s := Snapshot{}
	for _, n := range []string{"a", "b", "c", "d", "e", "f"} {
		s.Functions = append(s.Functions, Function{Name: n})
	}
	s.Pipelines = []Pipeline{
		{Name: "p", Stages: []string{"f", "a"}},
		{Name: "q", Stages: []string{"a", "d", "gone"}},
		{Name: "r", Stages: []string{"e", "c"}},
		{Name: "s", Stages: []string{"gone"}},
		{Name: "t", Stages: []string{"c"}},
	}
	want := []Domain{
		{Pipelines: []string{"p", "q"}, Functions: []string{"a", "d", "f"}},
		{Functions: []string{"b"}},
		{Pipelines: []string{"r", "t"}, Functions: []string{"c", "e"}},
	}
	if got := Domains(s); !reflect.DeepEqual(got, want) {
		t.Errorf("domains %+v, want %+v", got, want)
	}
	if got := Domains(Snapshot{}); len(got) != 0 {
		t.Errorf("domains of nothing: %+v", got)
	}
}

// TestJSONRoundTrip checks that a recorded value is read back unchanged and written the same again.
func TestJSONRoundTrip(t *testing.T) {
	roundTrip(t, snapshot())
	roundTrip(t, good())
	var s State
	if err := s.UnmarshalText([]byte("dead")); err == nil || !strings.Contains(err.Error(), "starting, ready, draining") {
		t.Errorf("state dead: %v", err)
	}
	var w Warmth
	if err := w.UnmarshalText([]byte("hot")); err == nil || !strings.Contains(err.Error(), "cold, file, host, parked") {
		t.Errorf("warmth hot: %v", err)
	}
}

func roundTrip[T any](t *testing.T, v T) {
	t.Helper()
	first, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var back T
	if err := json.Unmarshal(first, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(v, back) {
		t.Errorf("%T came back as %+v, want %+v", v, back, v)
	}
	if second, _ := json.Marshal(back); !bytes.Equal(first, second) {
		t.Errorf("%T written again as %s, want %s", v, second, first)
	}
}

func TestSizeHasOneDecimal(t *testing.T) {
	for bytes, want := range map[int64]string{0: "0 B", 120: "120 B", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB", -5: "-5 B"} {
		if got := Size(bytes); got != want {
			t.Errorf("Size(%d) = %q, want %q", bytes, got, want)
		}
	}
}

func FuzzPlanJSON(f *testing.F) {
	b, _ := json.Marshal(good())
	f.Add(b)
	f.Add([]byte(`{"Warm":[{"Warmth":"hot"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Plan
		if json.Unmarshal(b, &p) != nil {
			return
		}
		first, err := json.Marshal(p)
		if err != nil {
			t.Skip() // a year that JSON cannot write
		}
		var q Plan
		if err := json.Unmarshal(first, &q); err != nil {
			t.Fatalf("%s: %v", first, err)
		}
		_ = p.Validate(snapshot())
	})
}

func TestDeviceNeedAndUnfit(t *testing.T) {
	if got := DeviceNeed(30, 160); got != 30 {
		t.Errorf("30 bytes of a device: %d", got)
	}
	if got := DeviceNeed(0, 160); got != 150 {
		t.Errorf("a whole device of 160 bytes needs %d, want 150: others may use a sixteenth", got)
	}
	n := Node{Name: "a", Devices: []Device{{ID: "gpu0"}, {ID: "gpu1", Unavailable: "lost"}}}
	for device, want := range map[string]string{
		"": "", "gpu0": "", "gpu0,gpu1": "device gpu1 of node a is not well: lost", "gpu2": "device gpu2 of node a is no more",
	} {
		if got := n.Unfit(device); got != want {
			t.Errorf("%q: %q, want %q", device, got, want)
		}
	}
}

func TestFinderFindsWhatSnapshotFinds(t *testing.T) {
	s := Snapshot{Functions: []Function{{Name: "a"}, {Name: "b"}, {Name: "d"}}}
	finder := s.Finder()
	for _, name := range []string{"a", "b", "b", "c", "d", "e", "a", "d", "", "b"} {
		got, ok := finder.Function(name)
		if want, found := s.Function(name); got != want || ok != found {
			t.Errorf("%q: %v, %v, want %v, %v", name, got, ok, want, found)
		}
	}
	if f, ok := new(Finder).Function("a"); ok {
		t.Errorf("found %+v in nothing", f)
	}
}

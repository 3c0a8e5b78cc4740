package placement_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestPlacementIsThatOfTheReference compares this package with its plain form on random clusters:
// small ones that are full, and larger ones with room.
func TestPlacementIsThatOfTheReference(t *testing.T) {
	short, slots, warm, moved := 0, 0, 0, 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 7))
		s := randomCluster(rng)
		a := alloc(&s, rng)
		for _, pair := range [][2]plan.Placer{
			{placement.Dispersed{}, Dispersed{}}, {placement.Spread{}, Spread{}}, {placement.Dispersed{}, Dispersed{}}, {placement.FirstFit{}, FirstFit{}},
		} {
			name := fmt.Sprintf("%T", pair[0])
			got, err := pair[0].Place(s, a)
			if err != nil {
				t.Fatal(err)
			}
			want, err := pair[1].Place(s, a)
			if err != nil {
				t.Fatal(err)
			}
			same(t, fmt.Sprintf("cluster %d, %s", seed, name), got, want)
			gotWarm, err := placement.KeyStages{}.Warm(s, got)
			if err != nil {
				t.Fatal(err)
			}
			wantWarm, err := KeyStages{}.Warm(s, want)
			if err != nil {
				t.Fatal(err)
			}
			same(t, fmt.Sprintf("cluster %d, %s, warm", seed, name), gotWarm, wantWarm)
			warm += len(gotWarm)
			for _, w := range got {
				slots += len(w.Slots)
				if w.Short != "" {
					short++
				}
			}
			if seed%3 > 0 { // the plan is carried out, and the cluster changes
				s = carriedOut(s, got, gotWarm, rng)
				a = alloc(&s, rng)
				moved++
			}
		}
	}
	if short < 1000 || slots < 10_000 || warm < 10_000 || moved < 100 {
		t.Errorf("%d wants are short, of %d slots, %d warm: the clusters are too much alike", short, slots, warm)
	}
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	g, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	w, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if string(g) != string(w) {
		t.Fatalf("%s:\n got %s\nwant %s", what, g, w)
	}
}

// randomCluster returns a cluster whose nodes and functions differ in all that placement reads.
func randomCluster(rng *rand.Rand) plan.Snapshot {
	s := plan.Snapshot{Rev: 1, Epoch: 1, At: time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)}
	nodes, functions := 1+rng.IntN(6), 1+rng.IntN(12)
	if rng.IntN(4) == 0 {
		nodes, functions = 20+rng.IntN(60), 20+rng.IntN(40)
	}
	maybe := func(one int) bool { return rng.IntN(one) == 0 }
	for i := range nodes {
		n := plan.Node{Name: fmt.Sprintf("n%02d", i), Memory: 50 + rng.Int64N(150), CPUMilli: 1000 * rng.IntN(5)}
		n.MemoryUsed = rng.Int64N(n.Memory)
		if maybe(2) {
			n.Threshold = n.Memory - rng.Int64N(40)
		}
		if maybe(8) {
			n.Unavailable, n.Leaving = "it goes", maybe(2)
		}
		for d := range max(rng.IntN(6)-2, 0) {
			dev := plan.Device{ID: fmt.Sprint("g", d), Memory: 20 + rng.Int64N(60)}
			dev.MemoryUsed = rng.Int64N(dev.Memory) * rng.Int64N(2)
			if maybe(8) {
				dev.Unavailable = "lost"
			}
			n.Devices = append(n.Devices, dev)
		}
		for k := range functions {
			if maybe(4) {
				n.Zygotes = append(n.Zygotes, plan.Zygote{Function: fmt.Sprintf("f%02d", k), Bytes: 1 + rng.Int64N(20), Idle: maybe(2)})
			}
		}
		if maybe(6) {
			n.Zygotes = append(n.Zygotes, plan.Zygote{Function: "gone", Bytes: 5, Idle: maybe(2)})
		}
		s.Nodes = append(s.Nodes, n)
	}
	for k := range functions {
		s.Functions = append(s.Functions, randomFunction(&s, k, rng))
	}
	if maybe(3) {
		rng.Shuffle(nodes, func(i, j int) { s.Nodes[i], s.Nodes[j] = s.Nodes[j], s.Nodes[i] })
	}
	return s
}

func randomFunction(s *plan.Snapshot, k int, rng *rand.Rand) plan.Function {
	maybe := func(one int) bool { return rng.IntN(one) == 0 }
	f := plan.Function{
		Name: fmt.Sprintf("f%02d", k), Revision: 2, Min: rng.IntN(3), Max: 1 + rng.IntN(12), Zero: maybe(3), Memory: rng.Int64N(20), CPUMilli: 250 * rng.IntN(3),
		Waiting: rng.IntN(2) * rng.IntN(5), Running: rng.IntN(2), Trouble: plan.Trouble{Parameters: rng.Int64N(2) * rng.Int64N(30)}, Service: plan.Service{Mean: time.Duration(rng.IntN(300)) * time.Millisecond},
	}
	if maybe(2) {
		f.Starts = []plan.Start{{Path: "cold", Mean: time.Duration(rng.IntN(900)) * time.Millisecond}, {Path: "fork", Mean: time.Duration(rng.IntN(300)) * time.Millisecond}}
	}
	if maybe(3) {
		f.GPU, f.DeviceMemory = 1+rng.IntN(2), rng.Int64N(2)*rng.Int64N(25)
	}
	if maybe(6) {
		f.Failing.Count = 1
	}
	if maybe(5) {
		f.Expected, f.Waiting, f.Running = 1, 0, 0
	}
	for i := range rng.IntN(5) {
		n := s.Nodes[rng.IntN(len(s.Nodes))]
		r := plan.Replica{Name: fmt.Sprintf("%s-%d", f.Name, i), Revision: 1 + uint64(min(rng.IntN(5), 1)), Node: n.Name, State: plan.State(rng.IntN(3)), Since: s.At.Add(-time.Duration(rng.IntN(9)) * time.Second)}
		if f.GPU > 0 && len(n.Devices) > 0 {
			r.Device = n.Devices[rng.IntN(len(n.Devices))].ID
			if len(n.Devices) > 1 && f.GPU > 1 {
				r.Device = n.Devices[0].ID + "," + n.Devices[1].ID
			}
		}
		if maybe(9) {
			r.Node = "gone"
		}
		f.Replicas = append(f.Replicas, r)
	}
	for _, n := range s.Nodes {
		for _, d := range n.Devices {
			if f.GPU > 0 && maybe(8) {
				f.Bars = append(f.Bars, plan.Bar{Node: n.Name, Device: d.ID, Until: s.At.Add(time.Minute), Cause: "full"})
			}
		}
	}
	return f
}

func alloc(s *plan.Snapshot, rng *rand.Rand) plan.Alloc {
	a := make(plan.Alloc, len(s.Functions))
	for i := range a {
		a[i] = plan.Line{Function: s.Functions[i].Name, Count: rng.IntN(2) * rng.IntN(9), Key: rng.IntN(3) == 0}
		if rng.IntN(40) == 0 {
			a[i].Count = 100_000
		}
	}
	return a
}

// carriedOut returns the cluster after a part of a plan was carried out.
func carriedOut(s plan.Snapshot, wants []plan.Want, warm []plan.Warm, rng *rand.Rand) plan.Snapshot {
	s.Nodes, s.Functions = slices.Clone(s.Nodes), slices.Clone(s.Functions)
	node := func(name string) *plan.Node {
		return &s.Nodes[slices.IndexFunc(s.Nodes, func(n plan.Node) bool { return n.Name == name })]
	}
	for i, w := range wants {
		f := &s.Functions[i]
		f.Replicas = slices.Clone(f.Replicas)
		for k, slot := range w.Slots {
			if slot.Replica == "" {
				node(slot.Node).MemoryUsed += f.Memory
				f.Replicas = append(f.Replicas, plan.Replica{Name: fmt.Sprintf("%s-new-%d", f.Name, k), Revision: f.Revision, Node: slot.Node, Device: slot.Device, State: plan.State(rng.IntN(2)), Since: s.At})
			}
		}
	}
	for _, w := range warm {
		n := node(w.Node)
		if rng.IntN(2) == 0 && !slices.ContainsFunc(n.Zygotes, func(z plan.Zygote) bool { return z.Function == w.Function }) {
			n.Zygotes = append(slices.Clone(n.Zygotes), plan.Zygote{Function: w.Function, Bytes: 10, Idle: rng.IntN(2) == 0})
		}
	}
	return s
}

package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// TestParametersAreLoadedWhereReplicasGoNext checks clusters with plenty of memory. Each function's
// parameters must be loaded on the nodes where the placer puts its further replicas: as many as it
// has now, and at least four. No node may load two functions' parameters at a time. In the end, no
// node may load any more.
func TestParametersAreLoadedWhereReplicasGoNext(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s, wants := plentiful(rng)
		for round := 0; load(t, &s, wants); round++ {
			if round > len(s.Functions)*len(s.Nodes) {
				t.Fatalf("world %d: parameters are loaded without an end", seed)
			}
		}
		var a plan.Alloc
		devices := len(s.Nodes) * len(s.Nodes[0].Devices)
		for i := range s.Functions {
			f := &s.Functions[i]
			f.Waiting = 9
			devices -= len(f.Replicas)
			a = append(a, plan.Line{Function: f.Name, Count: len(f.Replicas) + max(len(f.Replicas), fewest), Key: true})
		}
		for i := range a { // no more than half of the devices are for
			a[i].Count = min(a[i].Count, len(s.Functions[i].Replicas)+devices/2/len(a))
		}
		placed, err := Dispersed{}.Place(s, a)
		if err != nil {
			t.Fatal(err)
		}
		for i, w := range placed {
			on := map[string]bool{}
			for _, slot := range w.Slots {
				on[slot.Node] = true
				n := &s.Nodes[slices.IndexFunc(s.Nodes, func(n plan.Node) bool { return n.Name == slot.Node })]
				if !slices.ContainsFunc(n.Zygotes, func(z plan.Zygote) bool { return z.Function == w.Function }) {
					t.Errorf("world %d: %s on %s, want a node that has its parameters: %s", seed, w.Function, slot.Node, show(w.Slots))
				}
			}
			if len(w.Slots) > 1 && len(s.Functions[i].Replicas) == 1 && len(on) == 1 {
				t.Errorf("world %d: all of %s on one node: %s", seed, w.Function, show(w.Slots))
			}
		}
	}
}

// plentiful returns a cluster whose nodes have memory for all functions. Each replica has a device
// for itself.
func plentiful(rng *rand.Rand) (s plan.Snapshot, wants []plan.Want) {
	s.At = t0
	for i := range 3 + rng.IntN(10) {
		n := plan.Node{Name: fmt.Sprintf("n%02d", i), Memory: 10_000, Threshold: 8_500}
		for d := range 4 {
			n.Devices = append(n.Devices, plan.Device{ID: fmt.Sprint("g", d), Memory: 100})
		}
		s.Nodes = append(s.Nodes, n)
	}
	var a plan.Alloc
	for i := range 1 + rng.IntN(8) {
		s.Functions = append(s.Functions, plan.Function{Name: fmt.Sprintf("f%d", i), Revision: 1, Min: 1, Max: 99, GPU: 1})
		a = append(a, plan.Line{Function: s.Functions[i].Name, Count: 1 + rng.IntN(2)*rng.IntN(3)})
	}
	wants, _ = Dispersed{}.Place(s, a)
	for i := range wants {
		for k := range wants[i].Slots {
			slot := &wants[i].Slots[k]
			slot.Replica = fmt.Sprint(wants[i].Function, "-", k)
			r := replica(slot.Replica, slot.Node, plan.Ready, 1)
			r.Device = slot.Device
			s.Functions[i].Replicas = append(s.Functions[i].Replicas, r)
			give(&s, wants[i].Function, slot.Node, false)
		}
	}
	return s, wants
}

// give loads a function's parameters on a node that has not got them, and says whether it is so.
func give(s *plan.Snapshot, function, node string, idle bool) bool {
	n := &s.Nodes[slices.IndexFunc(s.Nodes, func(n plan.Node) bool { return n.Name == node })]
	if slices.ContainsFunc(n.Zygotes, func(z plan.Zygote) bool { return z.Function == function }) {
		return false
	}
	n.Zygotes = append(n.Zygotes, plan.Zygote{Function: function, Bytes: 100, Idle: idle})
	n.MemoryUsed += 100
	return true
}

// load carries out what is to be warm, and says whether something was loaded.
func load(t *testing.T, s *plan.Snapshot, wants []plan.Want) (any bool) {
	t.Helper()
	warm, err := KeyStages{}.Warm(*s, wants)
	if err != nil {
		t.Fatal(err)
	}
	loads := map[string]int{}
	for _, w := range warm {
		if give(s, w.Function, w.Node, true) {
			loads[w.Node]++
			any = true
		}
	}
	for node, n := range loads {
		if n > 1 {
			t.Errorf("%s loads %d at a time, want one", node, n)
		}
	}
	return any
}

// BenchmarkWarm measures a cluster of fifty nodes. Each function has four replicas, and its
// parameters are loaded on twice as many nodes.
func BenchmarkWarm(b *testing.B) {
	for _, functions := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("functions=%d", functions), func(b *testing.B) {
			s := plan.Snapshot{At: t0}
			for i := range 50 {
				s.Nodes = append(s.Nodes, plan.Node{Name: fmt.Sprintf("n%02d", i), Memory: 1 << 40})
			}
			var wants []plan.Want
			for i := range functions {
				f := plan.Function{Name: fmt.Sprintf("f%04d", i), Revision: 1, Max: 20, Memory: 1 << 20}
				w := plan.Want{Function: f.Name, Key: i%4 == 0}
				for k := range 8 {
					n := &s.Nodes[(i+k)%len(s.Nodes)]
					n.Zygotes = append(n.Zygotes, plan.Zygote{Function: f.Name, Bytes: 1 << 25, Idle: k >= 4})
					n.MemoryUsed += 1 << 25
					if k < 4 {
						r := replica(fmt.Sprint(f.Name, k), n.Name, plan.Ready, 1)
						f.Replicas, w.Slots = append(f.Replicas, r), append(w.Slots, plan.Slot{Replica: r.Name, Node: n.Name})
					}
				}
				s.Functions, wants = append(s.Functions, f), append(wants, w)
			}
			for b.Loop() {
				if _, err := (KeyStages{}).Warm(s, wants); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestReplicasAheadOfNeedArePlacedLast checks that a replica that starts ahead of need never takes
// the place of a first or second replica of a function with tasks, whatever their names are.
func TestReplicasAheadOfNeedArePlacedLast(t *testing.T) {
	for name, placer := range map[string]plan.Placer{"spread": Spread{}, "first fit": FirstFit{}, "dispersed": Dispersed{}} {
		t.Run(name, func(t *testing.T) {
			s := world()
			s.Nodes = s.Nodes[:1]
			s.Functions[0].Zero, s.Functions[0].Expected = true, 1
			s.Functions[1].Waiting = 9
			for g, want := range map[int]string{1: "+@a", 2: "+@a", 3: ""} { // room for three
				wants, err := placer.Place(s, plan.Alloc{{Function: "f", Count: 1}, {Function: "g", Count: g}})
				if err != nil {
					t.Fatal(err)
				}
				if len(wants[1].Slots) != g || show(wants[0].Slots) != want || (want == "") != (wants[0].Short != "") {
					t.Errorf("%d of g: %+v, want %q for f", g, wants, want)
				}
			}
			s.Functions[0].Waiting = 1 // now it has a task
			if wants, err := placer.Place(s, plan.Alloc{{Function: "f", Count: 1}, {Function: "g", Count: 3}}); err != nil || show(wants[0].Slots) != "+@a" {
				t.Errorf("%+v, %v, want a place for the first replica of f", wants, err)
			}
		})
	}
}

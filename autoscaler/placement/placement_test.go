package placement

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

func TestSpreadIsAPlacer(t *testing.T)    { plantest.RunPlacer(t, Spread{}) }
func TestDispersedIsAPlacer(t *testing.T) { plantest.RunPlacer(t, Dispersed{}) }
func TestFirstFitIsAPlacer(t *testing.T)  { plantest.RunPlacer(t, FirstFit{}) }
func TestKeyStagesIsAWarmer(t *testing.T) {
	plantest.RunWarmer(t, Spread{}, KeyStages{})
}

var t0 = time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)

// world has three nodes of 100 bytes, and two functions with 30 bytes per replica.
func world() plan.Snapshot {
	return plan.Snapshot{
		At:    t0,
		Nodes: []plan.Node{{Name: "a", Memory: 100}, {Name: "b", Memory: 100}, {Name: "c", Memory: 100}},
		Functions: []plan.Function{
			{Name: "f", Revision: 1, Max: 20, Memory: 30},
			{Name: "g", Revision: 1, Max: 20, Memory: 30},
		},
	}
}

func replica(name, node string, state plan.State, age time.Duration) plan.Replica {
	return plan.Replica{Name: name, Revision: 1, Node: node, State: state, Since: t0.Add(-age)}
}

// show writes slots as "kept@node" or "+@node".
func show(slots []plan.Slot) string {
	var out []string
	for _, s := range slots {
		name := s.Replica
		if name == "" {
			name = "+"
		}
		out = append(out, name+"@"+s.Node+strings.TrimSuffix("/"+s.Device, "/"))
	}
	return strings.Join(out, " ")
}

func TestPlaceKeepsReplicasAndAddsNewOnes(t *testing.T) {
	spread, first := plan.Placer(Spread{}), plan.Placer(FirstFit{})
	for name, tc := range map[string]struct {
		placer plan.Placer
		change func(*plan.Snapshot)
		f, g   int // wanted
		want   string
		short  string
	}{
		"spread":    {spread, func(*plan.Snapshot) {}, 3, 0, "+@a +@b +@c", ""},
		"first fit": {first, func(*plan.Snapshot) {}, 4, 0, "+@a +@a +@a +@b", ""},
		"spread, the zygote decides a tie": {spread, func(s *plan.Snapshot) {
			s.Nodes[1].Zygotes = []plan.Zygote{{Function: "f", Bytes: 10}}
		}, 2, 0, "+@b +@a", ""},
		"first fit, the zygote first": {first, func(s *plan.Snapshot) {
			s.Nodes[1].Zygotes = []plan.Zygote{{Function: "f", Bytes: 10}}
			s.Nodes[1].MemoryUsed = 30
		}, 3, 0, "+@b +@b +@a", ""},
		"a processor is promised once": {first, func(s *plan.Snapshot) {
			for i, milli := range []int{1000, 2000, 0} {
				s.Nodes[i].CPUMilli = milli
			}
			s.Functions[0].CPUMilli = 600
			s.Functions[0].Replicas = []plan.Replica{replica("r1", "a", plan.Ready, 1), replica("old", "b", plan.Draining, 9)}
		}, 6, 0, "r1@a +@b +@b +@b", "4 of 6 placed: one more needs 30 B and 600m of a processor, of which at most 400m of 1000m are not promised to others; of 3 nodes, a has the most free memory, 100 B"},
		"more memory decides a tie": {spread, func(s *plan.Snapshot) { s.Nodes[0].MemoryUsed = 20 }, 1, 0, "+@b", ""},
		"newest dropped, draining not kept": {spread, func(s *plan.Snapshot) {
			s.Functions[0].Replicas = []plan.Replica{
				replica("r1", "a", plan.Ready, 1), replica("r2", "a", plan.Ready, 3), replica("r3", "b", plan.Starting, 9),
				replica("r4", "a", plan.Draining, 99), replica("r5", "a", plan.Ready, 2),
			}
		}, 2, 0, "r2@a r5@a", ""},
		"starting kept after ready": {spread, func(s *plan.Snapshot) {
			s.Functions[0].Replicas = []plan.Replica{replica("r1", "a", plan.Starting, 9), replica("r2", "a", plan.Ready, 1)}
		}, 3, 0, "r2@a r1@a +@b", ""},
		"unfit nodes keep but get none": {spread, func(s *plan.Snapshot) {
			s.Nodes[0].Unavailable, s.Nodes[1].Unavailable = "x", "y"
			s.Functions[0].Replicas = []plan.Replica{replica("r1", "a", plan.Ready, 9), replica("r2", "c", plan.Starting, 1)}
		}, 3, 0, "r2@c r1@a +@c", ""},
		"old revisions are replaced": {spread, func(s *plan.Snapshot) {
			s.Functions[0].Replicas = []plan.Replica{replica("r1", "a", plan.Ready, 9)}
			s.Functions[0].Revision = 2
		}, 1, 0, "+@a", ""},
		"each function gets its first before one gets its second": {first, func(s *plan.Snapshot) {
			s.Nodes = s.Nodes[:1]
		}, 5, 1, "+@a +@a", "2 of 5 placed: one more needs 30 B; of 1 nodes, a has the most free memory, 10 B"},
		"a zygote costs memory too": {first, func(s *plan.Snapshot) {
			s.Nodes[2].Zygotes = []plan.Zygote{{Function: "f", Bytes: 50}}
			s.Nodes[2].MemoryUsed = 90
		}, 3, 0, "+@a +@b", "2 of 3 placed: one more needs 30 B"},
		"idle zygotes give way": {first, func(s *plan.Snapshot) {
			s.Nodes = s.Nodes[:1]
			s.Nodes[0].MemoryUsed = 95
			s.Nodes[0].Zygotes = []plan.Zygote{{Function: "f", Bytes: 50, Idle: true}, {Function: "g", Bytes: 25, Idle: true}, {Function: "h", Bytes: 20}}
		}, 2, 0, "+@a", "1 of 2 placed: one more needs 30 B; of 1 nodes, a has the most free memory, 0 B"},
		"a zygote does not give way to its own replica": {first, func(s *plan.Snapshot) {
			s.Nodes = s.Nodes[:1]
			s.Nodes[0].MemoryUsed = 95
			s.Nodes[0].Zygotes = []plan.Zygote{{Function: "f", Bytes: 50, Idle: true}, {Function: "g", Bytes: 24, Idle: true}}
		}, 1, 0, "", "0 of 1 placed: one more needs 30 B; of 1 nodes, a has the most free memory, 29 B"},
		"a zygote gives way once": {first, func(s *plan.Snapshot) {
			s.Nodes = s.Nodes[:1]
			s.Nodes[0].MemoryUsed = 100
			s.Nodes[0].Zygotes = []plan.Zygote{{Function: "g", Bytes: 40, Idle: true}}
		}, 2, 0, "+@a", "1 of 2 placed: one more needs 30 B; of 1 nodes, a has the most free memory, 10 B"},
		"a zygote is loaded up to the threshold, a replica beyond": {first, func(s *plan.Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Threshold = 85
			}
			s.Nodes[0].MemoryUsed = 20
			s.Nodes[2].Zygotes, s.Nodes[2].MemoryUsed = []plan.Zygote{{Function: "f", Bytes: 50}}, 70
		}, 4, 0, "+@c +@b", "2 of 4 placed: one more needs 80 B; of 3 nodes, a has the most free memory, 65 B"},
		"no node": {spread, func(s *plan.Snapshot) { s.Nodes = nil }, 1, 0, "", "0 of 1 placed: there is no node; start `stagecoach keysmanager`"},
		"no node that takes one": {spread, func(s *plan.Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Unavailable = "gone"
			}
		}, 1, 0, "", "0 of 1 placed: none of 3 nodes takes a replica"},
		"devices": {first, func(s *plan.Snapshot) {
			s.Functions[0].GPU, s.Functions[0].DeviceMemory = 2, 30
			s.Nodes[1].Devices = []plan.Device{
				{ID: "g0", Memory: 90},
				{ID: "g1", Memory: 90, MemoryUsed: 70},
				{ID: "g2", Memory: 90, MemoryUsed: 50},
				{ID: "g3", Memory: 90, Unavailable: "lost"},
				{ID: "g4", Memory: 90, MemoryUsed: 10},
			}
		}, 2, 0, "+@b/g0,g4", "1 of 2 placed: one more needs 30 B and 2 devices with 30 B free each, of 5 that are there, 4 of them well; of 3 nodes"},
		"whole devices": {first, func(s *plan.Snapshot) {
			s.Functions[0].GPU = 1
			s.Functions[1].GPU, s.Functions[1].DeviceMemory = 1, 1
			s.Nodes[1].Devices = []plan.Device{
				{ID: "g0", Memory: 160, MemoryUsed: 11},
				{ID: "g1", Memory: 160, MemoryUsed: 10},
				{ID: "g2", Memory: 160},
			}
			s.Functions[1].Replicas = []plan.Replica{{Name: "small", Node: "b", Device: "g2", State: plan.Draining}}
		}, 2, 1, "+@b/g1", "1 of 2 placed: one more needs 30 B and 1 devices of its own, of 3 that are there, 3 of them well"},
		"devices that are not well": {first, func(s *plan.Snapshot) {
			s.Functions[0].GPU = 1
			s.Nodes[1].Devices = []plan.Device{{ID: "g0", Memory: 90, Unavailable: "lost"}, {ID: "g1", Memory: 90, MemoryUsed: 90}, {ID: "g2", Memory: 90}}
			for i, device := range []string{"g0", "g1", "g9"} {
				r := replica(fmt.Sprint("r", i), "b", plan.Ready, 9)
				r.Device = device
				s.Functions[0].Replicas = append(s.Functions[0].Replicas, r)
			}
		}, 2, 0, "r1@b/g1 +@b/g2", ""},
		"devices that are barred": {first, func(s *plan.Snapshot) {
			s.Functions[0].GPU, s.Functions[1].GPU = 1, 1
			s.Nodes[1].Devices = []plan.Device{{ID: "g0", Memory: 90}, {ID: "g1", Memory: 90}}
			s.Nodes[2].Devices = []plan.Device{{ID: "g0", Memory: 90}}
			s.Functions[0].Bars = []plan.Bar{{Node: "b", Device: "g0", Until: t0.Add(time.Minute), Cause: "want 80 B"}}
			r := replica("r0", "b", plan.Ready, 9)
			r.Device = "g0"
			s.Functions[0].Replicas = []plan.Replica{r}
		}, 3, 0, "+@b/g1 +@c/g0", "2 of 3 placed: one more needs 30 B and 1 devices of its own, of 3 that are there, 3 of them well; of 3 nodes, a has the most free memory, 100 B; device g0 of node b is not tried until 12:01:00: want 80 B"},
		"a bar is one function's, and one node's": {first, func(s *plan.Snapshot) {
			s.Functions[0].GPU, s.Functions[1].GPU = 1, 1
			s.Functions[0].DeviceMemory, s.Functions[1].DeviceMemory = 10, 10
			s.Nodes[1].Devices = []plan.Device{{ID: "g0", Memory: 90}}
			s.Nodes[2].Devices = []plan.Device{{ID: "g0", Memory: 90}}
			s.Functions[0].Bars = []plan.Bar{{Node: "b", Device: "g0", Until: t0.Add(time.Minute), Cause: "x"}}
		}, 1, 2, "+@c/g0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := world()
			tc.change(&s)
			wants, err := tc.placer.Place(s, plan.Alloc{{Function: "f", Count: tc.f}, {Function: "g", Count: tc.g}})
			if err != nil {
				t.Fatal(err)
			}
			if got := show(wants[0].Slots); got != tc.want {
				t.Errorf("slots %q, want %q", got, tc.want)
			}
			if got := wants[0].Short; !strings.HasPrefix(got, tc.short) || (tc.short == "") != (got == "") {
				t.Errorf("short %q, want %q", got, tc.short)
			}
			if len(wants[1].Slots) != tc.g {
				t.Errorf("g has %d slots, want %d: %s", len(wants[1].Slots), tc.g, wants[1].Short)
			}
		})
	}
	if _, err := spread.Place(world(), plan.Alloc{{Function: "h", Count: 1}}); err == nil || !strings.Contains(err.Error(), `"h"`) {
		t.Errorf("an unknown function: %v", err)
	}
}

func TestKeyStagesWarmsWhereReplicasRunOrGrow(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*plan.Snapshot)
		wants  []plan.Want
		want   string // function@node, ! for key
	}{
		"where it runs":                {func(*plan.Snapshot) {}, []plan.Want{{Function: "f", Slots: []plan.Slot{{Node: "b"}}}}, "f@b"},
		"a key stage by the corrector": {func(*plan.Snapshot) {}, []plan.Want{{Function: "f", Key: true, Slots: []plan.Slot{{Node: "b"}}}}, "f@b!"},
		"a key stage that sleeps":      {func(s *plan.Snapshot) { s.Functions[0].Zero = true }, []plan.Want{{Function: "f", Key: true}}, "f@a!"},
		"more than its minimum":        {func(*plan.Snapshot) {}, []plan.Want{{Function: "f", Slots: []plan.Slot{{Node: "b"}, {Node: "a"}}}}, "f@a! f@b!"},
		"had more than its minimum": {func(s *plan.Snapshot) {
			s.Functions[0].Replicas = []plan.Replica{replica("r1", "c", plan.Draining, 1), replica("r2", "b", plan.Ready, 1)}
		}, []plan.Want{{Function: "f", Slots: []plan.Slot{{Replica: "r2", Node: "b"}}}}, "f@b! f@c!"},
		"room where it is": {func(s *plan.Snapshot) {
			grows(s, 70)
			s.Nodes[0].MemoryUsed, s.Nodes[2].MemoryUsed = 1, 1
		}, []plan.Want{grown(true)}, "f@b!"},
		"room where it is, and plenty elsewhere": {func(s *plan.Snapshot) {
			grows(s, 70)
			s.Nodes[0].MemoryUsed = 1
		}, []plan.Want{grown(true)}, "f@b! f@c!"},
		"ahead on a node with room": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[0].MemoryUsed = 1
		}, []plan.Want{grown(true)}, "f@b! f@c!"},
		"ahead where it is already": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[0].MemoryUsed, s.Nodes[0].Zygotes = 20, []plan.Zygote{{Function: "f", Bytes: 20, Idle: true}}
			s.Nodes[2].MemoryUsed = 1
		}, []plan.Want{grown(true)}, "f@a! f@b!"},
		"ahead, as long as there is memory": {func(s *plan.Snapshot) {
			grows(s, 71)
			for _, i := range []int{0, 2} {
				s.Nodes[i].MemoryUsed, s.Nodes[i].Threshold, s.Nodes[i].Zygotes = 50, 80, []plan.Zygote{{Function: "f", Bytes: 20, Idle: true}}
			}
			s.Nodes[2].MemoryUsed = 51
		}, []plan.Want{{Function: "f", Key: true, Slots: []plan.Slot{{Replica: "r1", Node: "b"}, {Node: "b"}}}}, "f@a! f@b!"},
		"ahead for as many as it has": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[0].MemoryUsed, s.Nodes[2].MemoryUsed = 40, 50 // for one more each
		}, []plan.Want{{Function: "f", Key: true, Slots: []plan.Slot{{Replica: "r1", Node: "b"}, {Node: "b"}}}}, "f@a! f@b! f@c!"},
		"ahead for as many as it may have": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Functions[0].Max = 1
		}, []plan.Want{grown(true)}, "f@b!"},
		"others ahead where there is plenty of memory": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[2].MemoryUsed = 1
		}, []plan.Want{grown(false)}, "f@a f@b"},
		"half of the threshold is plenty": {func(s *plan.Snapshot) {
			grows(s, 71)
			for _, i := range []int{0, 2} {
				s.Nodes[i].Memory, s.Nodes[i].Threshold, s.Nodes[i].MemoryUsed = 120, 110, int64(5+i/2)
			}
		}, []plan.Want{grown(false)}, "f@a f@b"},
		"where not all of its replicas are, though others' are there": {func(s *plan.Snapshot) {
			grows(s, 70)
			s.Nodes[0].MemoryUsed, s.Nodes[2].MemoryUsed = 1, 60
			s.Nodes[2].Zygotes = []plan.Zygote{{Function: "f", Bytes: 20, Idle: true}}
			s.Functions[1].Replicas = []plan.Replica{replica("s1", "c", plan.Ready, 1), replica("s2", "c", plan.Ready, 1)}
		}, []plan.Want{grown(true), {Function: "g", Key: true, Slots: []plan.Slot{{Replica: "s1", Node: "c"}, {Replica: "s2", Node: "c"}}}}, "f@b! f@c! g@c!"},
		"others ahead until they are as many as may be": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Functions[0].Max = 1
		}, []plan.Want{grown(false)}, "f@b"},
		"not what fails to start": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Functions[0].Failing.Count = 1
		}, []plan.Want{grown(false)}, "f@b"},
		"not what starts as fast without": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Functions[0].Service.Mean = time.Second
			s.Functions[0].Starts = []plan.Start{{Path: "cold", Mean: 2 * time.Second, N: 1}, {Path: "fork", Mean: time.Second, N: 1}}
		}, []plan.Want{grown(false)}, "f@b"},
		"a node loads one ahead at a time, the key stage's first": {func(s *plan.Snapshot) {
			both(s)
			s.Nodes = s.Nodes[:2]
		}, []plan.Want{{Function: "f", Slots: []plan.Slot{{Replica: "r1", Node: "b"}}}, {Function: "g", Key: true, Slots: []plan.Slot{{Replica: "s1", Node: "b"}}}}, "f@b g@a! g@b!"},
		"not on a node that loads": {func(s *plan.Snapshot) {
			both(s)
			s.Nodes[0].Zygotes = []plan.Zygote{{Function: "g", Bytes: 1}}
			s.Nodes[2].MemoryUsed = 1
		}, []plan.Want{grown(false), {Function: "g"}}, "f@b g@b"},
		"one each, on nodes of their own": {both, []plan.Want{
			{Function: "f", Slots: []plan.Slot{{Replica: "r1", Node: "b"}}}, {Function: "g", Slots: []plan.Slot{{Replica: "s1", Node: "b"}}},
		}, "f@a f@b g@b g@c"},
		"ahead, nothing gives way to it": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[0].MemoryUsed, s.Nodes[0].Zygotes = 60, []plan.Zygote{{Function: "g", Bytes: 60, Idle: true}}
			s.Nodes[2].MemoryUsed, s.Nodes[2].Threshold = 40, 89
		}, []plan.Want{grown(true)}, "f@b!"},
		"ahead, not on nodes that take nothing": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Nodes[0].Unavailable, s.Nodes[2].Unavailable = "gone", "gone"
		}, []plan.Want{grown(true)}, "f@b!"},
		"ahead, where devices are": {func(s *plan.Snapshot) {
			grows(s, 20)
			f := &s.Functions[0]
			f.GPU, f.DeviceMemory, f.Replicas[0].Device = 1, 40, "g0"
			s.Nodes[1].Devices = []plan.Device{{ID: "g0", Memory: 90, MemoryUsed: 40}, {ID: "g1", Memory: 90, MemoryUsed: 51}}
			s.Nodes[2].Devices = []plan.Device{{ID: "g0", Memory: 40}}
		}, []plan.Want{{Function: "f", Key: true, Slots: []plan.Slot{{Replica: "r1", Node: "b", Device: "g0"}}}}, "f@b! f@c!"},
		"ahead, not on a device that the plan gives away": {func(s *plan.Snapshot) {
			grows(s, 71)
			for i := range 2 {
				s.Functions[i].GPU, s.Functions[i].Memory = 1, 1
			}
			s.Nodes[2].Devices = []plan.Device{{ID: "g0", Memory: 40}}
		}, []plan.Want{grown(true), {Function: "g", Slots: []plan.Slot{{Node: "c", Device: "g0"}}}}, "f@b! g@c"},
		"ahead in turn": {func(s *plan.Snapshot) {
			grows(s, 71)
			s.Functions[1].Replicas = []plan.Replica{replica("s1", "b", plan.Ready, 1)}
			s.Nodes[1].Zygotes = append(s.Nodes[1].Zygotes, plan.Zygote{Function: "g", Bytes: 20})
			s.Nodes[0].MemoryUsed, s.Nodes[2].MemoryUsed = 50, 50
		}, []plan.Want{
			{Function: "f", Key: true, Slots: []plan.Slot{{Replica: "r1", Node: "b"}, {Node: "b"}}},
			{Function: "g", Key: true, Slots: []plan.Slot{{Replica: "s1", Node: "b"}, {Node: "b"}}},
		}, "f@a! f@b! g@b! g@c!"},
		"asleep, in its old bed": {func(s *plan.Snapshot) {
			s.Functions[0].Zero = true
			s.Nodes[1].Zygotes, s.Nodes[1].MemoryUsed = []plan.Zygote{{Function: "f", Bytes: 100}}, 100
		}, []plan.Want{{Function: "f"}, {Function: "g"}}, "f@b"},
		"asleep, most memory": {func(s *plan.Snapshot) { s.Functions[0].Zero, s.Nodes[0].MemoryUsed = true, 1 }, []plan.Want{{Function: "f"}}, "f@b"},
		"asleep, nothing gives way to it": {func(s *plan.Snapshot) {
			s.Functions[0].Zero, s.Nodes = true, s.Nodes[:2]
			s.Nodes[0].Zygotes, s.Nodes[0].MemoryUsed = []plan.Zygote{{Function: "g", Bytes: 90, Idle: true}}, 90
			s.Nodes[1].MemoryUsed, s.Nodes[1].Threshold = 50, 81
		}, []plan.Want{{Function: "f"}}, "f@b"},
		"asleep, above the threshold": {func(s *plan.Snapshot) {
			s.Functions[0].Zero, s.Nodes = true, s.Nodes[:1]
			s.Nodes[0].MemoryUsed, s.Nodes[0].Threshold = 50, 79
		}, []plan.Want{{Function: "f"}}, ""},
		"asleep, no memory": {func(s *plan.Snapshot) {
			s.Functions[0].Zero, s.Nodes = true, s.Nodes[:1]
			s.Nodes[0].MemoryUsed = 50
		}, []plan.Want{{Function: "f"}, {Function: "g", Slots: []plan.Slot{{Node: "a"}}}}, "g@a"},
	} {
		t.Run(name, func(t *testing.T) {
			s := world()
			tc.change(&s)
			warm, err := KeyStages{}.Warm(s, tc.wants)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, w := range warm {
				if w.Warmth != plan.Host {
					t.Errorf("%+v, want host-warm", w)
				}
				key := ""
				if w.Key {
					key = "!"
				}
				got = append(got, w.Function+"@"+w.Node+key)
			}
			if strings.Join(got, " ") != tc.want {
				t.Errorf("warm %q, want %q", strings.Join(got, " "), tc.want)
			}
		})
	}
}

// both has f and g run on b, which has their parameters.
func both(s *plan.Snapshot) {
	grows(s, 71)
	s.Functions[1].Replicas = []plan.Replica{replica("s1", "b", plan.Ready, 1)}
	s.Nodes[1].Zygotes = append(s.Nodes[1].Zygotes, plan.Zygote{Function: "g", Bytes: 20})
}

// grows has f run on b, which has its parameters and so much memory in use.
func grows(s *plan.Snapshot, used int64) {
	s.Functions[0].Replicas = []plan.Replica{replica("r1", "b", plan.Ready, 1)}
	s.Nodes[1].MemoryUsed, s.Nodes[1].Zygotes = used, []plan.Zygote{{Function: "f", Bytes: 20}}
}

func grown(key bool) plan.Want {
	return plan.Want{Function: "f", Key: key, Slots: []plan.Slot{{Replica: "r1", Node: "b"}}}
}

// TestPlacingAgainChangesNothing checks that a placer returns the same plan again after the plan
// was carried out.
func TestPlacingAgainChangesNothing(t *testing.T) {
	s := world()
	a := plan.Alloc{{Function: "f", Count: 5}, {Function: "g", Count: 2}}
	wants, err := Spread{}.Place(s, a)
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range wants {
		for k, slot := range w.Slots {
			s.Functions[i].Replicas = append(s.Functions[i].Replicas, replica(fmt.Sprintf("%s%d", w.Function, k), slot.Node, plan.Ready, time.Duration(9-k)))
			wants[i].Slots[k].Replica = fmt.Sprintf("%s%d", w.Function, k)
		}
	}
	for i := range s.Nodes {
		s.Nodes[i].MemoryUsed = s.Nodes[i].Memory
	}
	again, err := Spread{}.Place(s, a)
	if err != nil || !reflect.DeepEqual(again, wants) {
		t.Errorf("%+v, %v, want %+v", again, err, wants)
	}
}

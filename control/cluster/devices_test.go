package cluster

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// place observes, places the given number of replicas of each function with a placer, and applies
// the plan.
func (w *world) place(n int) []plan.Want {
	w.t.Helper()
	s, err := w.l.Observe(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	var a plan.Alloc
	for _, f := range s.Functions {
		a = append(a, plan.Line{Function: f.Name, Count: n, Why: "test"})
	}
	wants, err := placement.FirstFit{}.Place(s, a)
	p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At, Wants: wants}
	if err == nil {
		err = p.Validate(s)
	}
	if err == nil {
		err = w.l.Apply(w.t.Context(), p)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
	return wants
}

// devices writes the replicas of f.ns as "name device".
func (w *world) devices() string {
	var out []string
	for _, r := range w.l.Replicas(pipeline.ParseKey("f.ns")) {
		out = append(out, r.Name+" "+r.Device)
	}
	return strings.Join(out, ", ")
}

// TestALostDeviceIsDrained checks that an unhealthy device loses its replicas, and is used again
// when it is healthy.
func TestALostDeviceIsDrained(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		n := l.nodes["a"].hands.(*fakeNode) //nolint:forcetypeassert // as newWorld makes it
		devices := func(unwell string) {
			w.set(func() {
				n.devices = []plan.Device{{ID: "gpu0", Memory: 160, Unavailable: unwell}, {ID: "gpu1", Memory: 160}}
			})
		}
		devices("")
		w.specs[0].GPU = 1
		w.place(2)
		w.expect("each has a device", w.devices(), "f-00001 gpu0, f-00002 gpu1")
		devices("it is lost")
		wants := w.place(2)
		w.expect("the lost one has none", w.devices(), "f-00002 gpu1")
		if short := wants[0].Short; !strings.Contains(short, "1 of 2 placed") || !strings.Contains(short, "2 that are there, 1 of them well") {
			t.Errorf("short: %q", short)
		}
		for _, e := range l.Events(pipeline.ParseKey("f.ns")) {
			if e.Kind == Draining && e.Cause != "device gpu0 of node a is not well: it is lost" {
				t.Errorf("drained because %q", e.Cause)
			}
		}
		if kinds := w.kinds(); !strings.HasSuffix(kinds, "f-00001 draining, f-00001 stopped") {
			t.Errorf("timeline %s", kinds)
		}
		devices("")
		w.place(2)
		w.expect("it is used again", w.devices(), "f-00002 gpu1, f-00003 gpu0")
	})
}

// TestStartingReplicasTakeDevices checks that memory that a starting replica is about to reserve is
// not given to another.
func TestStartingReplicasTakeDevices(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		n := l.nodes["a"].hands.(*fakeNode) //nolint:forcetypeassert // as newWorld makes it
		w.specs = append(w.specs, spec("g", 1))
		for i := range w.specs {
			w.specs[i].GPU, w.specs[i].DeviceMemory = 1, 100
		}
		w.set(func() { n.devices = []plan.Device{{ID: "gpu0", Memory: 160}} })
		w.attach = after(time.Second)
		if wants := w.place(1); len(wants[0].Slots) != 1 || len(wants[1].Slots) != 0 {
			t.Errorf("both were placed at once: %+v", wants)
		}
		if wants := w.place(1); len(wants[1].Slots) != 0 || !strings.Contains(wants[1].Short, "1 devices with 100 B free each") {
			t.Errorf("both were placed: %+v", wants)
		}
		if n.devices[0].MemoryUsed != 0 {
			t.Error("the node's own device was changed")
		}
	})
}

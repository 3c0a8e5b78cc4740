package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestBarsGrowWithEachFailure(t *testing.T) {
	t0 := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(s int) time.Time { return t0.Add(time.Duration(s) * time.Second) }
	type add struct {
		revision   uint64
		devices    string // a leading ! means that the replica had answered
		begun, now int    // seconds
		want       string
	}
	for name, tc := range map[string][]add{
		"twice as long each time": {
			{1, "g0", 0, 1, "g0 30s"},
			{1, "g0", 40, 41, "g0 1m0s"},
			{1, "g0", 110, 111, "g0 2m0s"},
			{1, "g0", 300, 301, "g0 4m0s"},
			{1, "g0", 600, 601, "g0 8m0s"},
			{1, "g0", 1200, 1201, "g0 10m0s"},
			{1, "g0", 1900, 1901, "g0 10m0s"},
		},
		"devices have their own":             {{1, "g0", 0, 1, "g0 30s"}, {1, "g1", 0, 1, "g1 30s"}, {1, "g0", 40, 41, "g0 1m0s"}},
		"a call may have been too large":     {{1, "!g0", 0, 1, ""}, {1, "!g0", 40, 41, ""}, {1, "!g0", 80, 81, "g0 30s"}, {1, "!g0", 120, 121, "g0 1m0s"}},
		"which is forgotten":                 {{1, "!g0", 0, 1, ""}, {1, "!g0", 40, 41, ""}, {1, "!g0", 640, 641, ""}},
		"not while it comes up":              {{1, "!g0", 0, 1, ""}, {1, "g0", 40, 41, "g0 30s"}},
		"all of a replica":                   {{1, "g0,g1", 0, 1, "g0,g1 30s"}},
		"what began before counts with it":   {{1, "g0", 0, 1, "g0 30s"}, {1, "g0", 1, 2, ""}},
		"another revision begins anew":       {{1, "g0", 0, 1, "g0 30s"}, {2, "g0", 40, 41, "g0 30s"}, {1, "g0", 80, 81, ""}},
		"after a good while it begins anew":  {{1, "g0", 0, 1, "g0 30s"}, {1, "g0", 40, 631, "g0 30s"}},
		"just before that while it does not": {{1, "g0", 0, 1, "g0 30s"}, {1, "g0", 40, 630, "g0 1m0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			var b bars
			for i, a := range tc {
				barred, until := b.add(a.revision, "n", strings.Split(strings.TrimPrefix(a.devices, "!"), ","), a.devices[0] == '!', at(a.begun), at(a.now), "why")
				got := ""
				if len(barred) > 0 {
					got = fmt.Sprint(strings.Join(barred, ","), " ", until.Sub(at(a.now)))
				}
				if got != a.want {
					t.Errorf("step %d: %q, want %q", i, got, a.want)
				}
			}
		})
	}
	var b bars
	b.add(1, "n2", []string{"g0"}, false, at(0), at(1), "why")
	b.add(1, "n1", []string{"g1", "g0"}, false, at(0), at(2), "why")
	var where []string
	for _, x := range b.now(at(3)) {
		where = append(where, x.Node+"/"+x.Device)
	}
	if got := strings.Join(where, " "); got != "n1/g0 n1/g1 n2/g0" {
		t.Errorf("bars %s, want them sorted", got)
	}
	if n := len(b.now(at(31))); n != 2 {
		t.Errorf("%d hold after 30 s, want 2", n)
	}
	// A replica that was being started.
	b.add(1, "n1", []string{"g0"}, true, at(3), at(4), "too large")
	if n := len(b.now(at(31))); n != 2 {
		t.Errorf("%d hold after 30 s and a call that barred nothing, want 2", n)
	}
	if b.now(at(1000)); len(b.all) != 0 {
		t.Errorf("%+v are known, want none", b.all)
	}
}

func TestOutOfMemoryBarsTheNamedDevice(t *testing.T) {
	both := []string{"GPU-1", "GPU-2"}
	for _, tc := range []struct{ named, want []string }{
		{[]string{"GPU-2"}, both[1:]}, {nil, both}, {[]string{"GPU-10"}, both},
	} {
		if got := blamed(both, &task.MemoryError{Devices: tc.named}); !slices.Equal(got, tc.want) {
			t.Errorf("the replica named %q: got %q, want %q", tc.named, got, tc.want)
		}
	}
}

// twoDevices gives node a two devices, and f.ns a need of one.
func (w *world) twoDevices() {
	n := w.l.nodes["a"].hands.(*fakeNode) //nolint:forcetypeassert // as newWorld makes it
	w.set(func() { n.devices = []plan.Device{{ID: "gpu0", Memory: 160}, {ID: "gpu1", Memory: 160}} })
	w.specs[0].GPU = 1
}

// answered returns how waiting tasks were answered since the last call.
func (w *world) answered() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	failed := w.failed
	w.failed = nil
	return failed
}

// TestOutOfMemoryBarsTheDevice checks that a replica that is out of memory stops, and that the next
// replica gets another device. If all devices are barred, waiting tasks are answered. The device is
// tried again after half a minute, and after longer if it fails again.
func TestOutOfMemoryBarsTheDevice(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.twoDevices()
		w.place(1)
		w.expect("at first", w.devices(), "f-00001 gpu0")
		l.OutOfMemory("f-00001", &task.MemoryError{Text: "want 2 GiB, 1 GiB of 40 GiB free"})
		l.OutOfMemory("f-00001", &task.MemoryError{Text: "again, by another call"})
		l.OutOfMemory("f-00099", &task.MemoryError{Text: "nobody"})
		w.place(1)
		w.expect("elsewhere", w.devices(), "f-00002 gpu1")
		if kinds := w.kinds(); !strings.HasPrefix(kinds, "f-00001 ordered, f-00001 started, f-00001 ready, f-00001 barred, ") || strings.Count(kinds, "barred") != 1 {
			t.Errorf("timeline %s", kinds)
		}
		for _, e := range l.Events(pipeline.ParseKey("f.ns")) {
			if e.Kind == Barred && e.Cause != "gpu0 not tried for 30s: want 2 GiB, 1 GiB of 40 GiB free" || e.Kind == Draining && !strings.HasPrefix(e.Cause, "out of memory: want 2 GiB") {
				t.Errorf("%s because %q", e.Kind, e.Cause)
			}
		}
		if n, _, _ := l.Failure(pipeline.ParseKey("f.ns")); n != 0 || len(w.answered()) > 0 {
			t.Errorf("%d failed starts, want none, and nobody to be told", n)
		}
		time.Sleep(10 * time.Second)
		l.OutOfMemory("f-00002", &task.MemoryError{Text: "want 2 GiB"})
		wants := w.place(1)
		w.expect("nowhere", w.devices(), "")
		if short := wants[0].Short; !strings.Contains(short, "device gpu0 of node a is not tried until ") || !strings.Contains(short, "device gpu1 of node a is not tried until ") {
			t.Errorf("short %q", short)
		}
		if told := w.answered(); len(told) != 1 || !strings.HasPrefix(told[0], `function "f.ns" was out of memory, and there is no other device for it: 0 of 1 placed`) || !strings.Contains(told[0], "stagecoach.dev/gpu-memory") {
			t.Errorf("waiting tasks were told %q", told)
		}
		for _, device := range []string{"gpu0", "gpu1"} {
			if n := testutil.ToFloat64(l.metrics.memory.WithLabelValues("a", device)); n != 1 {
				t.Errorf("%v replicas of device %s were counted, want 1", n, device)
			}
		}
		time.Sleep(20*time.Second - time.Millisecond)
		w.place(1)
		w.expect("not yet", w.devices(), "")
		time.Sleep(time.Millisecond)
		w.place(1)
		w.expect("half a minute later", w.devices(), "f-00003 gpu0")
		l.OutOfMemory("f-00003", &task.MemoryError{Text: "want 2 GiB"})
		w.place(1)
		if bars := l.Bars(pipeline.ParseKey("f.ns")); len(bars) != 2 || bars[0].Count != 2 || time.Until(bars[0].Until) != time.Minute {
			t.Errorf("bars %+v", bars)
		}
		w.set(func() { w.specs[0].Revision++ })
		w.place(2)
		w.expect("another revision", w.devices(), "f-00004 gpu0, f-00005 gpu1")
		if bars := l.Bars(pipeline.ParseKey("f.ns")); len(bars) != 0 {
			t.Errorf("bars %+v", bars)
		}
	})
}

// TestOutOfMemoryAtTheStart checks that the device is barred and not the function, and that a
// function that fits nowhere is not tried in a loop.
func TestOutOfMemoryAtTheStart(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.twoDevices()
		full := map[string]bool{"gpu0": true, "gpu1": true}
		on := map[string]string{}
		w.start = func(_ context.Context, o node.Order) error {
			w.set(func() { on[o.Replica] = o.Device })
			return nil
		}
		w.attach = func(_ context.Context, name string) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if full[on[name]] {
				return fmt.Errorf("no hello: exit status 1: %w", &task.MemoryError{Text: "out of memory on device " + on[name] + ": want 2 GiB, 1 GiB of 40 GiB free"})
			}
			return nil
		}
		n := l.nodes["a"].hands.(*fakeNode) //nolint:forcetypeassert // as newWorld makes it
		for range 5 {
			w.place(1)
			time.Sleep(causeWait) // before it counts as failed
			synctest.Wait()
		}
		if n.starts != 2 {
			t.Errorf("%d starts, want one a device", n.starts)
		}
		if count, _, _ := l.Failure(pipeline.ParseKey("f.ns")); count != 0 {
			t.Errorf("%d failed starts of the function, want none", count)
		}
		if told := w.answered(); len(told) == 0 || !strings.Contains(told[0], "out of memory on device gpu1: want 2 GiB, 1 GiB of 40 GiB free") {
			t.Errorf("waiting tasks were told %q", told)
		}
		for range 4 * 60 { // at 30 s, 90 s and 210 s each
			time.Sleep(time.Second)
			w.place(1)
		}
		if n.starts != 8 {
			t.Errorf("%d starts within four minutes, want 8", n.starts)
		}
		w.set(func() { full["gpu1"] = false })
		time.Sleep(4 * time.Minute)
		for range 3 {
			w.place(1)
			time.Sleep(causeWait)
			synctest.Wait()
		}
		if got := w.devices(); !strings.HasSuffix(got, " gpu1") || !strings.HasSuffix(w.states(), " ready") {
			t.Errorf("replicas %s, %s, want one on gpu1", got, w.states())
		}
	})
}

// TestAReplicaThatDiesOutOfMemory checks that the device is barred, even if the replica had been
// ready for long or is not ready yet. Without a device, it checks that the death counts as a failed
// start.
func TestAReplicaThatDiesOutOfMemory(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.twoDevices()
		w.place(1)
		l.Answered("f-00001", time.Millisecond, time.Millisecond)
		time.Sleep(time.Hour)
		l.Lost("f-00001", task.Death{
			Cause: "exit status 1: out of memory on device gpu0: want 2 GiB", Memory: &task.MemoryError{Text: "out of memory on device gpu0: want 2 GiB"},
		})
		w.place(1)
		time.Sleep(time.Millisecond)
		w.place(1)
		w.expect("elsewhere", w.devices(), "f-00002 gpu1")
		if bars := l.Bars(pipeline.ParseKey("f.ns")); len(bars) != 1 || bars[0].Device != "gpu0" || bars[0].Cause != "out of memory on device gpu0: want 2 GiB" {
			t.Errorf("bars %+v", bars)
		}
	})
	// The replica answers before it is known to be ready.
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.twoDevices()
		w.attach = func(_ context.Context, name string) error {
			l.OutOfMemory(name, &task.MemoryError{Text: "want 2 GiB"})
			return nil
		}
		w.stop = func(_ context.Context, name string) error {
			l.Lost(name, task.Death{Cause: "killed by SIGTERM"})
			return nil
		}
		w.place(1)
		if n, _, cause := l.Failure(pipeline.ParseKey("f.ns")); n != 0 || len(l.Bars(pipeline.ParseKey("f.ns"))) != 1 {
			t.Errorf("%d failed starts, %s, want none and a bar: %+v", n, cause, l.Bars(pipeline.ParseKey("f.ns")))
		}
	})
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		time.Sleep(time.Minute)
		l.OutOfMemory("f-00001", &task.MemoryError{Text: "want 2 GiB"})
		w.want(1)
		if n, _, cause := l.Failure(pipeline.ParseKey("f.ns")); n != 1 || cause != "want 2 GiB" || len(l.Bars(pipeline.ParseKey("f.ns"))) != 0 {
			t.Errorf("%d failed starts: %s; bars %+v", n, cause, l.Bars(pipeline.ParseKey("f.ns")))
		}
		w.expect("not before the pause is over", w.states(), "")
		time.Sleep(firstBackoff)
		w.want(1)
		w.expect("after it", w.states(), "f-00002 ready")
	})
}

// TestTasksOfDeniedFunctionAreAnswered checks that tasks of a function that gets no replica are
// answered once it has none.
func TestTasksOfDeniedFunctionAreAnswered(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		deny := func() {
			s, err := l.Observe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At}
			for _, f := range s.Functions {
				p.Wants = append(p.Wants, plan.Want{Function: f.Name, Revision: f.Revision, Short: "the budget is used up", Denied: true})
			}
			if err := l.Apply(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		deny()
		if told := w.answered(); len(told) != 1 || told[0] != `function "f.ns" has no replica: the budget is used up` {
			t.Errorf("waiting tasks were told %q", told)
		}
	})
}

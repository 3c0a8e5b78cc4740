package autoscaler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// onDevices returns the function of calm with devices. A task takes 100 ms with 500m of CPU, 60 ms
// with 1000m and 40 ms with 2000m.
func onDevices() plan.Function {
	f := calm()
	f.GPU, f.Demand.Rate, f.Replicas = 1, 13, replicas(3, plan.Ready)
	for _, quota := range []int{500, 1000, 2000} {
		f.Profile = append(f.Profile, plan.Point{CPUMilli: quota, Batch: 1, Mean: time.Duration(20+40000/quota) * time.Millisecond, N: 50})
	}
	return f
}

// TestExchangeGivesIdleCPUThatSavesAReplica checks that a function on devices gets CPU that no
// other replica declares, as long as that saves a replica.
func TestExchangeGivesIdleCPUThatSavesAReplica(t *testing.T) {
	before := Course{At: t0.Add(-time.Second), Asked: 3}
	given := before
	given.CPU, given.CPUAt, given.Inverse = 1333, t0.Add(-30*time.Second), 1.0/1333
	long := given
	long.CPUAt = t0.Add(-2 * cpuHold)
	fast := func(f *plan.Function) { f.CPUNow, f.Service.Mean = 1333, 50*time.Millisecond }
	for name, tc := range map[string]struct {
		change func(*plan.Function)
		past   Course
		asked  int
		count  int
		cpu    int
		why    string
	}{
		// 4000m less 1500m declared leaves 833m more for each of three replicas.
		"an even share":          {func(*plan.Function) {}, before, 3, 3, 1333, "cpu 500m to 1333m"},
		"as far as measured":     {func(f *plan.Function) { f.Replicas = f.Replicas[:1] }, before, 3, 3, 2000, "cpu 500m to 2000m"},
		"kept":                   {fast, given, 3, 3, 1333, "cpu 1333m"},
		"not for a tenth":        {fast, Course{At: given.At, Asked: 3, CPU: 1250, CPUAt: given.CPUAt}, 3, 3, 1250, "cpu 1250m"},
		"no device":              {func(f *plan.Function) { f.GPU = 0 }, before, 3, 3, 0, "so it is"},
		"no profile":             {func(f *plan.Function) { f.Profile = nil }, before, 3, 3, 0, "so it is"},
		"no limit":               {func(f *plan.Function) { f.CPULimit = 0 }, before, 3, 3, 0, "so it is"},
		"unknown service":        {func(f *plan.Function) { f.Service = plan.Service{} }, before, 3, 3, 0, "so it is"},
		"none asleep":            {func(*plan.Function) {}, before, 0, 0, 0, "so it is"},
		"none to save":           {func(f *plan.Function) { f.Min = 3 }, before, 3, 3, 0, "so it is"},
		"none to save, but late": {func(f *plan.Function) { f.Min, f.Wait.Mean = 3, time.Second }, before, 3, 3, 1333, "cpu 500m to 1333m"},
		"no cores": {func(f *plan.Function) {
			f.CPULimit = 1400
		}, before, 3, 3, 0, "so it is"},
		"given back in a while":  {func(f *plan.Function) { fast(f); f.Demand.Rate = 1 }, given, 1, 1, 1333, "cpu 1333m"},
		"given back":             {func(f *plan.Function) { fast(f); f.Demand.Rate = 1 }, long, 1, 1, 0, "cpu back to 500m"},
		"one is too few without": {func(f *plan.Function) { fast(f); f.Demand.Rate = 8 }, long, 1, 1, 1333, "cpu 1333m"},
		// With 1333m a task takes 50 ms, so two replicas would do. With 700m it takes 77 ms.
		"taken back by the node": {func(f *plan.Function) {
			fast(f)
			f.CPULimit, f.Demand.Rate, f.Replicas = 700, 25, replicas(6, plan.Ready)
		}, given, 2, 3, 0, "3 with less CPU than so far"},
	} {
		t.Run(name, func(t *testing.T) {
			f := onDevices()
			tc.change(&f)
			l, next := correct(t, QuartConfig{NoPID: true, NoSmooth: true}, f, tc.asked, tc.past)
			if l.Count != tc.count || l.CPUMilli != tc.cpu || next.CPU != tc.cpu || !strings.Contains(l.Why, tc.why) {
				t.Errorf("%d replicas of %dm (%s), want %d of %dm (%s)", l.Count, l.CPUMilli, l.Why, tc.count, tc.cpu, tc.why)
			}
			if l, _ := correct(t, QuartConfig{NoPID: true, NoSmooth: true, NoCPU: true}, f, tc.asked, tc.past); l.CPUMilli != 0 {
				t.Errorf("%dm although CPU is left out", l.CPUMilli)
			}
		})
	}
}

// TestExchangeGivesNoCPUTwice checks that domains that decide at the same time do not get the same
// CPU.
func TestExchangeGivesNoCPUTwice(t *testing.T) {
	s := plan.Snapshot{At: t0, Nodes: []plan.Node{{Name: "n", CPUMilli: 7000}}}
	for i := range 4 {
		f := onDevices()
		f.Name = fmt.Sprint(i)
		for k := range f.Replicas {
			f.Replicas[k].Node = "n"
		}
		s.Functions = append(s.Functions, f)
	}
	sum := 0
	for _, f := range s.Functions {
		a, _, err := NewQuart(QuartConfig{}).Correct(s, plan.Domain{Functions: []string{f.Name}}, plan.Alloc{{Function: f.Name, Count: 3}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		sum += 3 * a[0].CPUMilli
	}
	if sum > 7000 || sum < 6900 {
		t.Errorf("%dm for twelve replicas, want the node's 7000m", sum)
	}
}

// TestExchangeIgnoresNodesWithoutDevices checks that a small node without devices does not limit
// the CPU, because no replica can start there.
func TestExchangeIgnoresNodesWithoutDevices(t *testing.T) {
	for devices, want := range map[int]int{0: 1333, 1: 700} {
		f := onDevices()
		for k := range f.Replicas {
			f.Replicas[k].Node = "n"
		}
		gpus := []plan.Device{{ID: "0"}, {ID: "1"}, {ID: "2"}}
		s := plan.Snapshot{At: t0, Functions: []plan.Function{f}, Nodes: []plan.Node{{Name: "n", CPUMilli: 4000, Devices: gpus}, {Name: "small", CPUMilli: 700, Devices: gpus[:devices]}}}
		a, _, err := NewQuart(QuartConfig{}).Correct(s, plan.Domain{Functions: []string{f.Name}}, plan.Alloc{{Function: f.Name, Count: 3}}, nil)
		if err != nil || a[0].CPUMilli != want {
			t.Errorf("beside a node of 700m with %d devices: %+v, %v, want %dm", devices, a, err, want)
		}
	}
}

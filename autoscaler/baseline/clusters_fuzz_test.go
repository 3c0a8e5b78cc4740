package baseline

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// FuzzClusters gives HPA, KPA, Oracle and Static arbitrary signals, settings and clocks, and
// memories that went through JSON. Each count must be within bounds and have a reason. The same
// arguments must give the same counts. For HPA and KPA, more waiting tasks must never give a lower
// count.
func FuzzClusters(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 239, 127, 0, 0, 0, 0, 0, 0, 240, 127, 1, 0, 0, 0, 0, 0, 248, 127, 9, 9, 9, 9})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() uint64 {
			var b [8]byte
			data = data[copy(b[:], data):]
			return binary.LittleEndian.Uint64(b[:])
		}
		float := func() float64 { return math.Float64frombits(next()) }
		hpa := NewHPA(HPAConfig{Target: float(), Stabilize: time.Duration(next())})
		kpa := NewKPA(KPAConfig{Target: float(), Stable: time.Duration(next()), Panic: float(), Threshold: float(), Up: float(), Down: float()})
		known := OracleConfig{Wait: float(), Floor: float64(next() % 40), Tick: time.Duration(next() % uint64(2*time.Second))}
		for range next() % 50 {
			known.Arrivals = append(known.Arrivals, time.Duration(next()%uint64(time.Hour)))
		}
		slices.Sort(known.Arrivals)
		known.Stages = []OracleStage{{Function: "a", Service: time.Duration(next() % uint64(time.Minute)), Start: time.Duration(next() % uint64(time.Minute)), Batch: int(next() % 5), Slots: int(next() % 3), Most: int(next() % 9), BatchCost: float64(next() % 3)}}
		oracle, err := NewOracle(known)
		if err != nil {
			oracle = Oracle{}
		}
		static := Static{Level: float()}

		var h HPAMemory
		var k KPAMemory
		var o OracleMemory
		at := began
		for range 8 {
			s := plan.Snapshot{At: at, Pipelines: []plan.Pipeline{{Name: "p", Stages: []string{"a", "b"}}}}
			for _, name := range []string{"a", "b"} {
				f := plan.Function{Name: name, Revision: 1, Min: 1, Max: 1 + int(next()%50), Batch: int(next() % 9), Slots: int(int32(next())), Zero: next()%2 == 0, ZeroAge: time.Duration(next())}
				f.Busy = plan.Busy{Known: next()%4 > 0, Share: float()}
				f.Waiting, f.Running = int(next()), int(int32(next()))
				for range next() % 30 {
					f.Replicas = append(f.Replicas, plan.Replica{Revision: 1, State: plan.State(next() % 3), Since: at.Add(time.Duration(int32(next())) * 10)})
				}
				s.Functions = append(s.Functions, f)
			}
			h, k, o = stored(t, h), stored(t, k), stored(t, o)
			more(t, hpa, s, h)
			more(t, kpa, s, k)
			h, k, o = decided(t, hpa, s, h), decided(t, kpa, s, k), decided(t, oracle, s, o)
			decided(t, static, s, struct{}{})
			at = at.Add(time.Duration(int64(next()) % int64(10*time.Minute)))
		}
	})
}

// stored returns a memory after it went through JSON.
func stored[M any](t *testing.T, m M) (out M) {
	t.Helper()
	b, err := json.Marshal(m)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatalf("memory %+v: %v", m, err)
	}
	return out
}

// more checks that more tasks never give fewer replicas.
func more[M any](t *testing.T, a plan.Allocator[M], s plan.Snapshot, m M) {
	t.Helper()
	d := plan.Domains(s)[0]
	lines, _, err := a.Allocate(s, d, m)
	s.Functions = append([]plan.Function(nil), s.Functions...)
	s.Functions[0].Waiting = min(max(s.Functions[0].Waiting, 0), math.MaxInt-100) + 100
	busier, _, failed := a.Allocate(s, d, m)
	if err != nil || failed != nil || busier[0].Count < lines[0].Count {
		t.Fatalf("%T: %+v, %v, with more to do %+v, %v", a, lines, err, busier, failed)
	}
}

package baseline

import (
	"encoding/binary"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// FuzzPapers gives the policies of papers a row of two stages with any signals. Counts must be
// within bounds, with a reason, and the same for the same arguments.
func FuzzPapers(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 239, 127, 0, 0, 0, 0, 0, 0, 240, 127, 1, 0, 0, 0, 0, 0, 248, 127})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() uint64 {
			var b [8]byte
			data = data[copy(b[:], data):]
			return binary.LittleEndian.Uint64(b[:])
		}
		var inf INFlessMemory
		var line InferLineMemory
		var mix CocktailMemory
		at := began
		for range 6 {
			s := plan.Snapshot{At: at, Pipelines: []plan.Pipeline{{Name: "p", SLO: time.Duration(next()), Stages: []string{"a", "f01.ns"}}}}
			for _, name := range []string{"a", "f01.ns"} {
				f := plan.Function{Name: name, Revision: 1, Min: 1, Max: 1 + int(next()%50), Batch: int(int32(next())) >> (next() % 32), Slots: int(int32(next())), Zero: next()%2 == 0}
				f.Demand = plan.Demand{Known: true, Rate: math.Float64frombits(next())}
				for i := range f.Demand.Envelope {
					f.Demand.Envelope[i] = int(next())
				}
				f.Service = plan.Service{Known: next()%4 > 0, Mean: time.Duration(next())}
				f.Service.Batches = []plan.Batched{{Size: int(next() % 5), Mean: time.Duration(next())}}
				f.Wait = plan.Wait{Known: true, P99: time.Duration(next()), Oldest: time.Duration(next())}
				f.Waiting = int(int32(next()))
				s.Functions = append(s.Functions, f)
			}
			inf = decided(t, NewINFless(INFlessConfig{Alpha: math.Float64frombits(next()), KeepAlive: time.Duration(next())}), s, inf)
			line = decided(t, NewInferLine(InferLineConfig{Plan: anyPlan(), Stable: time.Duration(next()), Look: time.Duration(next())}), s, line)
			mix = decided(t, NewCocktail(CocktailConfig{Period: time.Duration(next()), Headroom: math.Float64frombits(next()), Keep: int(next())}), s, mix)
			at = at.Add(time.Duration(next() % uint64(10*time.Minute)))
		}
	})
}

func decided[M any](t *testing.T, a plan.Allocator[M], s plan.Snapshot, m M) M {
	t.Helper()
	d := plan.Domains(s)[0]
	lines, next, err := a.Allocate(s, d, m)
	if err != nil || len(lines) != len(s.Functions) {
		t.Fatalf("%T: %+v, %v, want a line a function", a, lines, err)
	}
	for i, l := range lines {
		f := &s.Functions[i]
		if least, most := f.Bounds(); l.Count < least || l.Count > most || l.Batch < 1 || l.Batch > max(f.Batch, 1) || l.Why == "" || l.Function != f.Name {
			t.Fatalf("%T: %+v, want %d to %d replicas, batches of %d at most and a reason", a, l, least, most, f.Batch)
		}
	}
	if again, _, _ := a.Allocate(s, d, m); !reflect.DeepEqual(again, lines) {
		t.Fatalf("%T: %+v, want the same as before, %+v", a, again, lines)
	}
	return next
}

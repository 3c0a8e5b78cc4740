package demand

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

var start = time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)

// request is a complete request of the pipeline split -> (read, look) -> join: split returns items,
// of which read gets one per call, and look is skipped unless looked.
func request(app string, items int, work func() time.Duration, looked bool) *Ended {
	e := &Ended{App: app, Complete: true, Edges: []Edge{{"split", "read"}, {"split", "look"}, {"read", "join"}, {"look", "join"}}}
	e.Calls = append(e.Calls, Call{Stage: "split", Function: "split.ns", Work: work(), Given: 1, Returned: items})
	for range items {
		e.Calls = append(e.Calls, Call{Stage: "read", Function: "read.ns", Batch: 4, Work: work(), Given: 1, Returned: 1, Length: 128})
	}
	given := items
	if looked {
		e.Calls = append(e.Calls, Call{Stage: "look", Function: "look-small.ns", Work: work(), Given: items, Returned: 2 * items})
		given += 2 * items
	}
	e.Calls = append(e.Calls, Call{Stage: "join", Function: "join.ns", Work: work(), Given: given, Returned: 1})
	return e
}

func near(t *testing.T, what string, got, want, by float64) {
	t.Helper()
	if !(math.Abs(got-want) <= by*math.Abs(want)+1e-12) {
		t.Errorf("%s: got %v, want %v ± %v", what, got, want, by)
	}
}

func TestQuantilesOfWorkHaveABoundedError(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	l := New(DefaultLimits())
	var all []float64
	for range 3000 {
		d := time.Duration(5e6 + rnd.ExpFloat64()*2e7)
		given := 1 + rnd.IntN(4)
		all = append(all, (d / time.Duration(given)).Seconds())
		l.Add(start, &Ended{App: "a.ns", Calls: []Call{{Stage: "s", Function: []string{"s.ns", "v.ns"}[rnd.IntN(2)], Batch: 1 + rnd.IntN(9), Work: d, Given: given}}})
	}
	slices.Sort(all)
	a, ok := l.App("a.ns", start)
	if !ok || len(a.Stages) != 1 || len(a.Stages[0].Lanes) != 10 {
		t.Fatalf("%v, %+v, want one stage with two functions of five classes", ok, a)
	}
	work := a.Work("s")
	for _, q := range []float64{0.01, 0.5, 0.9, 0.99, 1} {
		near(t, fmt.Sprint("quantile ", q), work.Quantile(q), all[max(int(math.Ceil(q*float64(len(all))))-1, 0)], sketch.Error+1e-9)
	}
	var sum, squares, shares float64
	for _, v := range all {
		sum, squares = sum+v, squares+v*v
	}
	mean := sum / float64(len(all))
	near(t, "mean", work.Mean, mean, 1e-9)
	near(t, "CV", work.CV, math.Sqrt(squares/float64(len(all))/(mean*mean)-1), 1e-6)
	near(t, "weight", work.Weight, 3000, 1e-9)
	for i, b := range work.Buckets {
		if shares += b.Weight; i > 0 && work.Buckets[i-1].Value >= b.Value {
			t.Errorf("bucket %d: %v after %v, want them sorted", i, b.Value, work.Buckets[i-1].Value)
		}
	}
	near(t, "sum of shares", shares, 1, 1e-6)
	if none := a.Work("none"); none.Weight != 0 || none.Quantile(0.5) != 0 {
		t.Errorf("an unknown stage: %+v, want nothing", none)
	}
}

func TestFactorsAndProbabilitiesFollowTheGraph(t *testing.T) {
	l := New(DefaultLimits())
	work := func() time.Duration { return time.Millisecond }
	for i := range 100 {
		l.Add(start, request("a.ns", 1+i%3, work, i%4 == 0)) // 199 items in 100 requests
	}
	// A failed request teaches no probabilities.
	failed := request("a.ns", 3, work, false)
	failed.Complete, failed.Edges, failed.Calls = false, nil, failed.Calls[:2]
	l.Add(start, failed)
	a, _ := l.App("a.ns", start)
	next := map[string]Next{}
	for _, s := range a.Stages {
		for _, n := range s.Next {
			next[s.Name+">"+n.To] = n
		}
		if s.Name == "read" {
			near(t, "calls per request", s.PerRequest, 1.99, 1e-9)
			near(t, "length", s.Length.Quantile(0.5), 128, sketch.Error)
			near(t, "batch", s.Lanes[0].Batch, 4, 1e-9)
		}
	}
	looked := 0 // items in the requests that are looked at
	for i := 0; i < 100; i += 4 {
		looked += 1 + i%3
	}
	for edge, want := range map[string][2]float64{
		"split>read": {1, 1.99}, "split>look": {0.25, float64(looked) / 100}, "read>join": {1, 1}, "look>join": {1, 2},
	} {
		near(t, edge+" probability", next[edge].Probability, want[0], 1e-9)
		near(t, edge+" factor", next[edge].Factor, want[1], 1e-9)
	}
}

func TestOldCallsFadeByHalfLife(t *testing.T) {
	l := New(DefaultLimits())
	add := func(at time.Time, d time.Duration, n int) {
		for range n {
			l.Add(at, &Ended{App: "a.ns", Complete: true, Calls: []Call{{Stage: "s", Function: "s.ns", Work: d}}})
		}
	}
	add(start, time.Second, 300)
	add(start.Add(time.Hour), 2*time.Second, 50)
	now := start.Add(time.Hour)
	a, _ := l.App("a.ns", now)
	w := a.Work("s")
	near(t, "weight", w.Weight, 200, 1e-9) // 300 of an hour ago count as 150
	near(t, "mean", w.Mean, (150+100)/200.0, 1e-9)
	near(t, "requests", a.Requests, 200, 1e-9)
	a, _ = l.App("a.ns", now.Add(2*time.Hour))
	near(t, "weight two hours later", a.Stages[0].Lanes[0].Work.Weight, 50, 1e-9)
	near(t, "mean two hours later", a.Stages[0].Lanes[0].Work.Mean, 1.25, 1e-9)

	// After weeks, the distribution is as it was, until a call comes.
	a, _ = l.App("a.ns", now.Add(1000*time.Hour))
	w = a.Work("s")
	near(t, "median weeks later", w.Quantile(0.5), 1, sketch.Error)
	for i := range 30 { // many times as long as the weights can express
		add(now.Add(time.Duration(i+1)*1000*time.Hour), 3*time.Second, 1)
	}
	now = now.Add(30 * 1000 * time.Hour)
	a, _ = l.App("a.ns", now)
	w = a.Work("s")
	near(t, "mean after a new call", w.Mean, 3, 1e-6)
	near(t, "weight after a new call", w.Weight, 1, 1e-6)

	// A clock that was set back does not keep the future for ever.
	add(start, 4*time.Second, 9)
	if a, _ = l.App("a.ns", start); !a.Last.Equal(start) {
		t.Errorf("last %v, want %v", a.Last, start)
	}
	w = a.Work("s")
	near(t, "mean after the clock was set back", w.Mean, 3.9, 1e-6)
}

// TestManyCallsFade: a cell does not stop to learn because its weights are large.
func TestManyCallsFade(t *testing.T) {
	l := New(DefaultLimits())
	e := &Ended{App: "a.ns", Calls: []Call{{Stage: "s", Function: "s.ns", Work: time.Second, Length: 7}}}
	l.Add(start, e)
	s := l.apps["a.ns"].stages[0]
	c := s.cells[0]
	more := 4 * float64(mostCalls)
	c.calls, c.sum, c.squares, s.sized = more, more, more, more
	c.work.Add(int64(time.Second), more)
	s.lengths.Add(7, more)
	e.Calls[0].Work = 2 * time.Second
	for range 10 {
		l.Add(start, e)
	}
	a, _ := l.App("a.ns", start)
	w := a.Work("s")
	for _, weight := range []float64{w.Weight, a.Stages[0].Length.Weight} {
		if weight < mostCalls/2 || weight > mostCalls+1 {
			t.Errorf("weight %v, want %d to %d", weight, mostCalls/2, mostCalls)
		}
	}
	if w.Buckets[len(w.Buckets)-1].Weight < 8.0/mostCalls {
		t.Errorf("%+v, want the latest calls to count", w.Buckets)
	}
}

func TestMergeIsTheUnion(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	left, right, both := New(DefaultLimits()), New(DefaultLimits()), New(DefaultLimits())
	for i := range 900 {
		at := start.Add(time.Duration(i) * time.Minute) // 15 half-lives
		e := request(fmt.Sprintf("a%d.ns", rnd.IntN(5)), 1+rnd.IntN(3), func() time.Duration { return time.Duration(1e6 + rnd.ExpFloat64()*1e8) }, rnd.IntN(2) == 0)
		both.Add(at, e)
		if rnd.IntN(3) == 0 {
			left.Add(at, e)
		} else {
			right.Add(at, e)
		}
	}
	left.Merge(right)
	now := start.Add(15 * time.Hour)
	for i := range 5 {
		name := fmt.Sprintf("a%d.ns", i)
		got, _ := left.App(name, now)
		want, _ := both.App(name, now)
		if !got.Last.Equal(want.Last) || len(got.Stages) != len(want.Stages) {
			t.Fatalf("%s: got %v and %d stages, want %v and %d", name, got.Last, len(got.Stages), want.Last, len(want.Stages))
		}
		near(t, "requests", got.Requests, want.Requests, 1e-9)
		for k, s := range want.Stages {
			g, w := got.Work(s.Name), want.Work(s.Name)
			near(t, "weight", g.Weight, w.Weight, 1e-9)
			near(t, "mean", g.Mean, w.Mean, 1e-9)
			for _, q := range []float64{0.1, 0.5, 0.99} {
				near(t, "quantile", g.Quantile(q), w.Quantile(q), 2*sketch.Error)
			}
			for j, n := range s.Next {
				near(t, "probability", got.Stages[k].Next[j].Probability, n.Probability, 1e-9)
				near(t, "factor", got.Stages[k].Next[j].Factor, n.Factor, 1e-9)
			}
		}
	}
	order := func(l *Learner) (names []string) {
		for e := l.order.Front(); e != nil; e = e.Next() {
			names = append(names, e.Value.(*app).name)
		}
		return names
	}
	if !slices.Equal(order(left), order(both)) {
		t.Errorf("order %v, want %v", order(left), order(both))
	}
	checkBytes(t, left)
}

// checkBytes counts the bytes of all applications again.
func checkBytes(t *testing.T, l *Learner) {
	t.Helper()
	sum := 0
	for _, a := range l.apps {
		if a.bytes != a.size() {
			t.Errorf("%s: %d bytes, want %d", a.name, a.bytes, a.size())
		}
		sum += a.size()
	}
	if l.bytes != sum || l.order.Len() != len(l.apps) {
		t.Errorf("%d bytes and %d places for %d applications with %d bytes", l.bytes, l.order.Len(), len(l.apps), sum)
	}
}

// TestTenThousandApplications: of applications with one call each, the latest stay.
func TestTenThousandApplications(t *testing.T) {
	before := heap()
	l := New(DefaultLimits())
	for i := range 10_000 {
		l.Add(start.Add(time.Duration(i)*time.Millisecond), request(fmt.Sprintf("app-%05d.ns", i), 2, func() time.Duration { return time.Second }, true))
		l.Add(start.Add(time.Duration(i)*time.Millisecond), request("often.ns", 2, func() time.Duration { return time.Second }, true))
	}
	used := heap() - before
	checkBytes(t, l)
	limits := DefaultLimits()
	if l.Apps() != limits.Apps || l.Bytes() > limits.Bytes || l.Forgotten() != 10_001-uint64(limits.Apps) {
		t.Errorf("%d applications, %d bytes, %d forgotten", l.Apps(), l.Bytes(), l.Forgotten())
	}
	if used > int64(l.Bytes())*5/4 {
		t.Errorf("%d bytes of memory, want at most 5/4 of the %d that are counted", used, l.Bytes())
	}
	for name, want := range map[string]bool{"often.ns": true, "app-00000.ns": false, "app-09000.ns": false, "app-09001.ns": true, "app-09999.ns": true} {
		if _, ok := l.App(name, start); ok != want {
			t.Errorf("%s: known %v, want %v", name, ok, want)
		}
	}
	runtime.KeepAlive(l)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestLargeApplicationsForgetTheirOldestParts feeds applications whose functions, batches, lengths
// and times are all different.
func TestLargeApplicationsForgetTheirOldestParts(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	limits := DefaultLimits()
	limits.Bytes = 1 << 20
	before := heap()
	l := New(limits)
	for i := range 15_000 {
		e := Ended{App: fmt.Sprintf("large-%d.ns", i%20), Complete: true}
		for range 3 {
			stage := fmt.Sprint("stage-", rnd.IntN(30))
			e.Calls = append(e.Calls, Call{
				Stage: stage, Function: fmt.Sprintf("%s-v%d.ns", stage, rnd.IntN(4)), Batch: 1 + rnd.IntN(64),
				Work: time.Duration(math.Exp(10 + rnd.Float64()*20)), Given: rnd.IntN(5), Returned: rnd.IntN(9), Length: rnd.IntN(100_000),
			})
		}
		for k := range 100 {
			e.Edges = append(e.Edges, Edge{e.Calls[0].Stage, fmt.Sprint("stage-", k)})
		}
		l.Add(start.Add(time.Duration(i)*time.Second), &e)
		if l.Bytes() > limits.Bytes {
			t.Fatalf("%d bytes after %d requests, want at most %d", l.Bytes(), i, limits.Bytes)
		}
		if n := l.apps[e.App].bytes; n > limits.AppBytes {
			t.Fatalf("%s: %d bytes after %d requests, want at most %d", e.App, n, i, limits.AppBytes)
		}
	}
	if used := heap() - before; used > int64(l.Bytes())*5/4 {
		t.Errorf("%d bytes of memory, want at most 5/4 of the %d that are counted", used, l.Bytes())
	}
	checkBytes(t, l)
	if l.Bytes() < limits.Bytes/2 {
		t.Errorf("%d bytes, want the limit to be used", l.Bytes())
	}
	l.Add(start, &Ended{App: string(make([]byte, mostText+1)), Calls: []Call{{}}})
	l.Add(start, &Ended{App: "large-0.ns", Calls: []Call{{Stage: string(make([]byte, mostText+1))}}})
	if b, _ := l.Encode(func(string) bool { return true }, math.MaxInt); !decodes(b) {
		t.Error("what was learned cannot be decoded")
	}
	runtime.KeepAlive(l)
}

func decodes(b []byte) bool {
	_, err := Decode(b, DefaultLimits())
	return err == nil
}

func everything(string) bool { return true }

// learned is a learner with some applications.
func learned() *Learner {
	rnd := rand.New(rand.NewPCG(9, 10))
	l := New(DefaultLimits())
	for i := range 60 {
		work := func() time.Duration { return time.Duration(1e6 + rnd.ExpFloat64()*1e8) }
		l.Add(start.Add(time.Duration(i)*30*time.Minute), request(fmt.Sprintf("a%d.ns", i%3), 1+rnd.IntN(3), work, i%5 == 0))
	}
	return l
}

func TestRecordsAreReadAsWritten(t *testing.T) {
	l := learned()
	b, left := l.Encode(everything, math.MaxInt)
	back, err := Decode(b, DefaultLimits())
	if err != nil || left != 0 {
		t.Fatal(err, left)
	}
	checkBytes(t, back)
	now := start.Add(40 * time.Hour)
	for i := range 3 {
		want, _ := l.App(fmt.Sprintf("a%d.ns", i), now)
		got, ok := back.App(fmt.Sprintf("a%d.ns", i), now)
		want.Bytes, got.Bytes = 0, 0 // of bins that were allocated ahead
		if !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
	}
	if !reflect.DeepEqual(l.Functions(now), back.Functions(now)) || len(back.Functions(now)) != 4 {
		t.Errorf("functions %+v, want %+v", back.Functions(now), l.Functions(now))
	}
	if again, _ := back.Encode(everything, math.MaxInt); !bytes.Equal(again, b) {
		t.Error("the record of a record's learner differs")
	}

	// What does not fit is what was used least recently.
	b, left = l.Encode(everything, len(b)-1)
	back, err = Decode(b, DefaultLimits())
	if err != nil || left != 1 || back.Apps() != 2 || back.apps["a0.ns"] != nil {
		t.Errorf("%v, %d left, %d applications, want all but a0", err, left, back.Apps())
	}
	b, _ = l.Encode(func(app string) bool { return app == "a1.ns" }, math.MaxInt)
	if back, err = Decode(b, DefaultLimits()); err != nil || back.Apps() != 1 || back.apps["a1.ns"] == nil {
		t.Errorf("%v, %d applications, want a1 alone", err, back.Apps())
	}
}

func TestDamagedAndNewerRecordsAreRefused(t *testing.T) {
	good, _ := learned().Encode(everything, math.MaxInt)
	newer := slices.Clone(good[:len(good)/2]) // a later version may have another form
	newer[len(magic)] = Version + 1
	if _, err := Decode(newer, DefaultLimits()); !errors.Is(err, ErrNewer) || errors.Is(err, ErrDamaged) {
		t.Errorf("a newer record: %v, want ErrNewer", err)
	}
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 1 << (i % 8)
		if _, err := Decode(bad, DefaultLimits()); !errors.Is(err, ErrDamaged) && !(i == len(magic) && errors.Is(err, ErrNewer)) {
			t.Fatalf("a bit of byte %d changed: %v, want ErrDamaged", i, err)
		}
		if _, err := Decode(good[:i], DefaultLimits()); !errors.Is(err, ErrDamaged) {
			t.Fatalf("cut off at %d: %v, want ErrDamaged", i, err)
		}
	}
}

// FuzzDecode: whatever bytes with a right checksum say, a learner that takes them works, and is
// within its limits.
func FuzzDecode(f *testing.F) {
	good, _ := learned().Encode(everything, math.MaxInt)
	body := func(b []byte) []byte { return b[len(magic)+1 : len(b)-4] }
	f.Add(body(good))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := Decode(signed(b), Limits{Apps: 2, Bytes: 32 << 10, AppBytes: 16 << 10, HalfLife: time.Hour})
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("%v, want ErrDamaged", err)
			}
			return
		}
		if l.Apps() > 2 {
			t.Fatalf("%d applications, want at most 2", l.Apps())
		}
		checkBytes(t, l)
		l.Functions(start)
		l.Add(start, request("a.ns", 2, func() time.Duration { return time.Second }, true))
		l.Add(start.Add(100*time.Hour), request("a0.ns", 2, func() time.Duration { return time.Second }, true))
		again, _ := l.Encode(everything, math.MaxInt)
		o, err := Decode(again, DefaultLimits())
		if err != nil {
			t.Fatalf("a decoded learner encodes what is refused: %v", err)
		}
		o.Merge(l)
		a, _ := o.App("a.ns", start)
		w := a.Work("read")
		w.Quantile(0.5)
	})
}

// signed makes a record of a body.
func signed(b []byte) []byte {
	l := New(DefaultLimits())
	head, _ := l.Encode(everything, math.MaxInt)
	return seal(append(head[:len(head)-4:len(head)-4], b...))
}

// TestTheSameRequestsTeachTheSame: no order of a map is in an output.
func TestTheSameRequestsTeachTheSame(t *testing.T) {
	a, _ := learned().Encode(everything, math.MaxInt)
	for range 10 {
		if b, _ := learned().Encode(everything, math.MaxInt); !bytes.Equal(a, b) {
			t.Fatal("two learners of the same requests differ")
		}
	}
	f := learned().Functions(start)
	if !slices.IsSortedFunc(f, func(a, b Function) int { return cmp.Compare(a.Name, b.Name) }) {
		t.Errorf("%+v, want them sorted", f)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	l := New(DefaultLimits())
	e := request("a.ns", 2, func() time.Duration { return time.Second }, true)
	l.Add(start, e)
	at := start
	if n := testing.AllocsPerRun(1000, func() { at = at.Add(time.Minute); l.Add(at, e) }); n != 0 {
		t.Errorf("%v allocations per request, want none", n)
	}
}

// BenchmarkAdd learns from requests of five calls; ns/call is per call.
func BenchmarkAdd(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 1))
	l := New(DefaultLimits())
	all := make([]*Ended, 256)
	for i := range all {
		all[i] = request(fmt.Sprintf("a%d.ns", i%64), 2, func() time.Duration { return time.Duration(1e7 + rnd.ExpFloat64()*1e7) }, true)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		l.Add(start.Add(time.Duration(i)*time.Millisecond), all[i%len(all)])
		i++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/5, "ns/call")
}

// BenchmarkFunctions summarizes 1,000 applications of four stages, as each tick does.
func BenchmarkFunctions(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 1))
	l := New(DefaultLimits())
	for i := range 100_000 {
		l.Add(start, request(fmt.Sprintf("a%d.ns", i%1000), 2, func() time.Duration { return time.Duration(1e7 + rnd.ExpFloat64()*1e7) }, true))
	}
	for b.Loop() {
		l.Functions(start)
	}
	record, _ := l.Encode(everything, math.MaxInt)
	b.ReportMetric(float64(l.Bytes())/float64(l.Apps()), "B/app")
	b.ReportMetric(float64(len(record))/float64(l.Apps()), "encodedB/app")
}

// TestFactorsOfVariants checks the items that a next stage gets per function that serves a stage,
// over all batch sizes, with the age of what is known.
func TestFactorsOfVariants(t *testing.T) {
	l := New(DefaultLimits())
	add := func(at time.Time, function string, batch, returned int) {
		l.Add(at, &Ended{App: "a.ns", Complete: true, Edges: []Edge{{"find", "read"}}, Calls: []Call{
			{Stage: "find", Function: function, Batch: batch, Work: time.Second, Given: 2, Returned: returned},
			{Stage: "read", Function: "read.ns", Work: time.Second, Given: returned, Returned: returned},
		}})
	}
	add(start, "good.ns", 1, 6)
	add(start, "good.ns", 8, 10)
	add(start.Add(time.Minute), "small.ns", 1, 2)
	a, _ := l.App("a.ns", start.Add(time.Minute))
	got := a.Stages[0].Next[0].Variants
	if len(got) != 2 || got[0].Function != "good.ns" || got[0].Factor != 4 || got[1].Function != "small.ns" || got[1].Factor != 1 ||
		math.Abs(got[1].Calls-1) > 1e-9 || !got[0].Last.Equal(start) || !got[1].Last.Equal(start.Add(time.Minute)) {
		t.Errorf("factors %+v, want 4 of good.ns and 1 of small.ns, which is newer", got)
	}
	for _, f := range l.Functions(start.Add(time.Minute)) {
		if f.Name == "good.ns" && (f.Items != 4 || !f.Last.Equal(start)) {
			t.Errorf("%+v, want 4 items per item, last at the start", f)
		}
	}
}

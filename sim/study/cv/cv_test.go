package cv

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sample returns a sample of a station with this many neighbours.
func sample(r *rand.Rand, neighbours int) Sample {
	s := Sample{Want: r.NormFloat64()}
	for range 1 + neighbours {
		var x [AttentionFeatures]float64
		for k := range x {
			x[k] = r.NormFloat64()
		}
		s.Seen.X = append(s.Seen.X, x)
		s.Seen.CV = append(s.Seen.CV, 3*r.Float64())
	}
	return s
}

// weights returns the initial weights of training, slightly changed.
func weights(r *rand.Rand) AttentionWeights {
	w := begin(r)
	for _, v := range values(&w) {
		*v += r.NormFloat64() / 5
	}
	return w
}

// TestGradientIsTheDerivativeOfTheLoss compares each derivative with a difference quotient.
func TestGradientIsTheDerivativeOfTheLoss(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	const step = 1e-6
	for neighbours := range 5 {
		for range 10 {
			w, s := weights(r), sample(r, neighbours)
			var g AttentionWeights
			loss := Gradient(&w, &s, &g)
			if again := Gradient(&w, &s, nil); again != loss {
				t.Fatalf("a loss of %v, and %v without derivatives", loss, again)
			}
			for k, v := range values(&w) {
				was := *v
				*v = was + step
				above := Gradient(&w, &s, nil)
				*v = was - step
				below := Gradient(&w, &s, nil)
				*v = was
				want := (above - below) / (2 * step)
				if got := *values(&g)[k]; math.Abs(got-want) > 1e-6*(1+math.Abs(want)) {
					t.Fatalf("%d neighbours, weight %d: derivative %v, want %v", neighbours, k, got, want)
				}
			}
		}
	}
}

// TestTrainLearnsFromNeighbours checks that training is deterministic, and that it learns to use
// the neighbours' CVs.
func TestTrainLearnsFromNeighbours(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	draw := func(n int) []Sample {
		out := make([]Sample, n)
		for i := range out {
			out[i] = sample(r, 2)
			x := out[i].Seen.X
			out[i].Want = x[0][0]/2 + math.Tanh(x[1][3])
			if out[i].Seen.CV[2] > out[i].Seen.CV[1] { // the burstier neighbour decides
				out[i].Want = x[0][0]/2 + math.Tanh(x[2][3])
			}
		}
		return out
	}
	training, validation := draw(2000), draw(500)
	start := begin(rand.New(rand.NewPCG(weightsSeed, 0)))
	var last Fit
	w := Train(training, validation, func(f Fit) { last = f })
	before, after := Loss(&start, validation), Loss(&w, validation)
	printed := slices.Clone(validation)
	for i := range printed {
		printed[i].Seen = AsPrinted(printed[i].Seen)
	}
	if after > before/3 || w.Theta < 0.3 || last.Epoch != epochs || Loss(&w, printed) < 1.2*after {
		t.Errorf("loss %.4f after %d epochs, with θ %.2f, and %.4f without θ·CV_j; want a third of %.4f, a positive θ, and more without it",
			after, last.Epoch, w.Theta, Loss(&w, printed), before)
	}
	if again := Train(training, validation, nil); again != w {
		t.Error("trained again, weights are others")
	}
}

// TestWeightsFile checks that weights.go is what training writes.
func TestWeightsFile(t *testing.T) {
	got, err := Go(NewAttention().w)
	if err != nil {
		t.Fatal(err)
	}
	const file = "weights.go"
	want, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is not what weights are written as (%v): make train-cv", file, err)
	}
}

// TestTrainingUsesNothingOfTheComparison checks that training used no pipelines, CVs, loads or
// seeds of the comparison.
func TestTrainingUsesNothingOfTheComparison(t *testing.T) {
	seen := map[any]bool{}
	for _, r := range slices.Concat(TrainingRuns(), ValidationRuns()) {
		seen[r.Shape], seen[r.CV], seen[r.scenario.Seed] = true, true, true
		if r.Load == "modulated" {
			seen[r.scenario.Pipelines[0].Arrivals.MMPP] = true
		}
	}
	loads := map[string]int{}
	for _, r := range HeldBackRuns(180) {
		loads[r.Load]++
		if mmpp := r.scenario.Pipelines[0].Arrivals.MMPP; seen[r.Shape] || seen[r.CV] || seen[r.scenario.Seed] || seen[mmpp] {
			t.Errorf("run %s, CV %g, seed %d, %q: was learned from", r.Shape, r.CV, r.scenario.Seed, mmpp)
		}
	}
	if len(loads) != 3 {
		t.Errorf("loads %v, want three kinds", loads)
	}
}

// TestCompare compares predictors on stored records: a part of what a few runs recorded. Only
// -rewrite runs them again. So the test depends on the predictors, but not on how the policies size
// functions.
func TestCompare(t *testing.T) {
	const kept = "testdata/records.json"
	runs := HeldBackRuns(9)
	if golden.Rewriting() {
		records := record(t, runs)
		for i := range records {
			part := records[i][:0]
			for k := 0; k < len(records[i]); k += 8 {
				part = append(part, records[i][k])
			}
			records[i] = part
		}
		write(t, kept, marshal(t, records))
	}
	var records [][]Recorded
	if err := json.Unmarshal(content(t, kept), &records); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := WriteMarkdown(&b, Contenders(), Compare(runs, records, Contenders())); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "compare.md", b.String())
}

// TestRecord checks runs with fixed replica counts: each has a record about every 5 s, persistence
// has the smallest error, and no predictor has a large one.
func TestRecord(t *testing.T) {
	var runs []Run
	for _, r := range HeldBackRuns(30) {
		if r.Sizing == "fixed" && len(runs) < 3 {
			runs = append(runs, r)
		}
	}
	records := record(t, runs)
	for i, r := range records {
		if len(r) < 25 || len(r) > 40 || len(r[0].Network.Stations) != len(graph(runs[i].Shape)) || slices.Max(r[0].Depth) == 0 {
			t.Errorf("run %d, %s: %d records, the first %+v; want one about every 5 s, of each stage", i, runs[i].Shape, len(r), r[0])
		}
	}
	by := Compare(runs, records, Contenders())[0].By
	for c, e := range by {
		if e.Log.Mean <= 0 || e.Log.Mean > 0.3 || e.Log.Mean < by[reference].Log.Mean-0.01 {
			t.Errorf("%s is off by %v, persistence by %v; want some, not much, and not less", Contenders()[c].Name, e.Log, by[reference].Log)
		}
	}
}

func record(t *testing.T, runs []Run) [][]Recorded {
	t.Helper()
	records, err := Record(t.Context(), runs, func(int, int) {})
	if err != nil {
		t.Fatal(err)
	}
	return records
}

func content(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, file string, b []byte) {
	t.Helper()
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return append(b, '\n')
}

// TestPairJoinsDecisionsOneWindowApart checks that a decision is paired with the measurement one
// window later. Decisions during the warm-up are left out.
func TestPairJoinsDecisionsOneWindowApart(t *testing.T) {
	w := &witness{}
	for second := range 100 {
		w.saw(time.Time{}.Add(time.Duration(second+1)*time.Second), qna.Network{Stations: []qna.Station{{CA2: float64(second)}, {}}, Links: []qna.Link{{From: 1, To: 0}}})
	}
	got := w.pair()
	if len(got) != 8 {
		t.Fatalf("%d are kept, want one every 5 s from 40 to 79", len(got))
	}
	for i, r := range got {
		if now := r.Network.Stations[0].CA2; now != float64(40+5*i) || r.Later[0] != now+20 || !slices.Equal(r.Depth, []int{1, 0}) {
			t.Errorf("%v, want measured at %d s and 20 s later, behind another", r, 40+5*i)
		}
	}
}

package cv

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// diamond returns a network with a bursty station before two stations that both lead to a fourth.
func diamond() qna.Network {
	return qna.Network{
		Stations: []qna.Station{
			{Rate: 20, Servers: 3, Rho: 0.6, CS2: 0.25, CA2: 9},
			{Rate: 20, Servers: 2, Rho: 0.8, CS2: 1, CA2: 5},
			{Rate: 20, Servers: 9, Rho: 0.3, CS2: 0.04, CA2: 7},
			{Rate: 18, Servers: 4, Rho: 0.7, CS2: 0.5, CA2: 4},
		},
		Links: []qna.Link{{From: 0, To: 1}, {From: 0, To: 2}, {From: 1, To: 3}, {From: 2, To: 3}},
	}
}

// anyWeights returns random weights.
func anyWeights(r *rand.Rand) AttentionWeights {
	var w AttentionWeights
	fill := func(row []float64) {
		for k := range row {
			row[k] = r.NormFloat64() / 3
		}
	}
	for k := range w.W {
		fill(w.W[k][:])
	}
	for k := range w.B {
		fill(w.B[k][:])
	}
	fill(w.A[:])
	fill(w.C[:])
	fill(w.V[:])
	fill(w.Own[:])
	w.Theta, w.Bias = 0.7, 0.1
	return w
}

// TestAttentionUsesEachCV checks that θ makes the prediction for a station depend on its own CV and
// on the CV of each neighbour, before or behind it. In QUART's Eq. 4 as printed, θ would cancel.
// The test sets the weights of all features of burstiness to 0, so that CVs can act only through
// θ·CV_j.
func TestAttentionUsesEachCV(t *testing.T) {
	w := anyWeights(rand.New(rand.NewPCG(1, 1)))
	for k := range w.W {
		w.W[k][0], w.W[k][1], w.W[k][7] = 0, 0, 0
	}
	w.Own = [AttentionFeatures]float64{}
	predict := func(theta float64, change int) float64 {
		n, w := diamond(), w
		n.Stations[change].CA2 *= 2
		w.Theta = theta
		return (Attention{w}).Predict(n)[1]
	}
	none := func(theta float64) float64 { w := w; w.Theta = theta; return (Attention{w}).Predict(diamond())[1] }
	for i, name := range []string{"that before", "its own", "none of its neighbours", "that behind"} {
		moved := math.Abs(predict(w.Theta, i) - none(w.Theta))
		if is, want := moved > 1e-6, i != 2; is != want {
			t.Errorf("with twice the Ca² of %s, station 1 is predicted %g away, want it moved: %v", name, moved, want)
		}
		if moved := math.Abs(predict(0, i) - none(0)); moved != 0 {
			t.Errorf("without θ, twice the Ca² of %s moves what is predicted by %g, want nothing: the test is of θ", name, moved)
		}
	}
}

// TestAttentionIgnoresOrder checks that the order of stations and links does not matter.
func TestAttentionIgnoresOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for _, a := range []Attention{NewAttention(), {anyWeights(r)}} {
		n := diamond()
		want := a.Predict(n)
		for range 20 {
			to := r.Perm(len(n.Stations))
			other := qna.Network{Stations: make([]qna.Station, len(to))}
			for i, s := range n.Stations {
				other.Stations[to[i]] = s
			}
			for _, l := range n.Links {
				other.Links = append(other.Links, qna.Link{From: to[l.From], To: to[l.To]})
			}
			r.Shuffle(len(other.Links), func(i, j int) { other.Links[i], other.Links[j] = other.Links[j], other.Links[i] })
			got := a.Predict(other)
			for i := range want {
				if math.Abs(got[to[i]]-want[i]) > 1e-9 {
					t.Fatalf("station %d: %v as number %d, want %v", i, got[to[i]], to[i], want[i])
				}
			}
		}
	}
}

func TestPersistence(t *testing.T) {
	got := Persistence(qna.Network{Stations: []qna.Station{{CA2: 9}, {}, {CA2: math.NaN()}, {CA2: 1e9}, {CA2: 1e-9}, {CA2: 2, Factor: 3}}, Links: []qna.Link{{From: 0, To: 1}}})
	if want := []float64{9, 1, 1, qna.Most, qna.Least, 2}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestWeightsHaveTheRecipesVersion checks that the weights have the recipe's version. If it fails
// after a change of features, shape or training, raise AttentionRecipe and train again.
func TestWeightsHaveTheRecipesVersion(t *testing.T) {
	if trainedRecipe != AttentionRecipe {
		t.Errorf("weights are of recipe %d, want %d: make train-cv", trainedRecipe, AttentionRecipe)
	}
	got := NewAttention().Predict(diamond())
	for i, s := range diamond().Stations {
		if got[i] < s.CA2/2 || got[i] > 2*s.CA2 {
			t.Errorf("station %d: Ca² of %v, want within a factor of 2 of the %v measured: what is learned keeps close to it", i, got[i], s.CA2)
		}
	}
}

// TestCorrectorWithEachPredictor checks that the corrector keeps its contract with each predictor.
func TestCorrectorWithEachPredictor(t *testing.T) {
	for name, p := range map[string]Predictor{"qna": qna.Predict, "persistence": Persistence, "attention": NewAttention().Predict} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plantest.RunCorrector(t, NewCorrector(autoscaler.QuartConfig{}, p))
		})
	}
}

// FuzzPredictors checks that all predictions are within bounds, for any measurements and any graph.
func FuzzPredictors(f *testing.F) {
	f.Add(uint8(3), []byte{0, 1, 1, 2}, []byte{})
	f.Add(uint8(4), []byte{0, 1, 0, 2, 1, 3, 2, 3, 3, 0, 1, 1}, []byte("\x00\x00\x00\x00\x00\x00\xf8\x7f\x00\x00\x00\x00\x00\x00\xf0\x7f"))
	// hardly any of each
	f.Add(uint8(11), []byte("0"), []byte("0000000000000000000000000000000000000000"))
	all := map[string]Predictor{
		"qna": qna.Predict, "persistence": Persistence, "attention": NewAttention().Predict,
		"attention of large weights":               (Attention{AttentionWeights{Bias: 100}}).Predict,
		"attention of weights that are no numbers": (Attention{AttentionWeights{Theta: math.Inf(1), Bias: math.NaN()}}).Predict,
	}
	f.Fuzz(func(t *testing.T, stations uint8, links, numbers []byte) {
		if stations == 0 {
			return
		}
		number := func() float64 {
			if len(numbers) < 8 {
				return 1.5
			}
			v := math.Float64frombits(binary.LittleEndian.Uint64(numbers))
			numbers = numbers[8:]
			return v
		}
		var n qna.Network
		for range min(stations, 20) {
			n.Stations = append(n.Stations, qna.Station{Rate: number(), Servers: int(int32(math.Float64bits(number()))), Rho: number(), CS2: number(), CA2: number(), Factor: number()})
		}
		for ; len(links) > 1; links = links[2:] {
			n.Links = append(n.Links, qna.Link{From: int(links[0]) % len(n.Stations), To: int(links[1]) % len(n.Stations)})
		}
		for name, predict := range all {
			out := predict(n)
			if len(out) != len(n.Stations) {
				t.Fatalf("%s: %d predictions of %d stations", name, len(out), len(n.Stations))
			}
			for i, v := range out {
				if !(v >= qna.Least && v <= qna.Most) {
					t.Fatalf("%s: station %d of %+v: %v, want %v to %v", name, i, n, v, qna.Least, qna.Most)
				}
			}
		}
	})
}

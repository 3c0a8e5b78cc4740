package cv

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// Predictor predicts how bursty arrivals at each station of a network will be. It returns the
// squared coefficient of variation of the times between arrivals, positive and finite. The
// predictors are [Persistence], [qna.Predict] and [Attention.Predict]. On held-back simulations,
// Persistence and Attention are equally good, and QNA is worse (docs/adr/0045).
type Predictor func(n qna.Network) []float64

// Persistence is a [Predictor]: it returns the measured burstiness. Without a measurement, it
// returns 1, the value of a Poisson process.
func Persistence(n qna.Network) []float64 {
	out := make([]float64, len(n.Stations))
	for i, s := range n.Stations {
		out[i] = qna.Known(s.CA2)
	}
	return out
}

// Attention predicts burstiness from features of a station and of its neighbours, as QUART
// (ICDCS'24, Eq. 4–6) does. It takes the features x of the station, of the stations before it and
// of those behind it. It sums them, weighted by a softmax, and computes the predicted burstiness
// from the sum. [Train] learns the weights from simulations. Attention does not use a station's
// Factor. Build it with [NewAttention].
//
// It differs from the paper in the softmax. In Eq. 4, all terms j of station i have the same
// summand θ·CV_i. That summand cancels, so the weights do not depend on any CV. Here the term of
// station j has the summand θ·CV_j: α_ij = softmax_j(LReLU(aᵀ[W·x_i ‖ W·x_j]) + θ·CV_j). In the
// paper, CV_i is the CV of the neighbours' features. Here it is the CV of the times between
// arrivals.
//
// The paper does not say what the features are, nor what f in Eq. 6 is. Here f is a network with
// one layer of tanh. Its inputs are x_i, W·x_i and x'_i of Eq. 5, and its output is ln Ca².
type Attention struct{ w AttentionWeights }

// NewAttention returns an Attention with the weights of weights.go.
func NewAttention() Attention { return Attention{trainedWeights()} }

// AttentionRecipe is the version of the method that makes the weights: the runs, features, shape
// and training. If you change any of these, raise the version and make the weights again (`make
// train-cv`). A test fails if the weights have another version.
const AttentionRecipe = 1

// The shape of an Attention.
const (
	AttentionFeatures = 10 // per station
	AttentionWidth    = 6  // of W·x
	AttentionHidden   = 8  // of the layer of tanh
)

// AttentionWeights are the learned weights of an Attention. The array types make the compiler
// reject weights of another shape.
type AttentionWeights struct {
	W     [AttentionWidth][AttentionFeatures]float64
	A     [2 * AttentionWidth]float64                  // of W·x_i, then of W·x_j
	Theta float64                                      // of CV_j
	B     [AttentionHidden][2 * AttentionWidth]float64 // of x'_i, then of W·x_i
	C     [AttentionHidden]float64
	V     [AttentionHidden]float64
	Own   [AttentionFeatures]float64 // of x_i, added to the layer's output
	Bias  float64
}

// leakySlope is the slope of LReLU below zero (Veličković et al., Graph Attention Networks, ICLR
// 2018).
const leakySlope = 0.2

// Attended is what an Attention sees of a station: the station itself, then the stations before it,
// then those behind it.
type Attended struct {
	X  [][AttentionFeatures]float64
	CV []float64
}

// Predict is a [Predictor].
func (a Attention) Predict(n qna.Network) []float64 {
	out := make([]float64, len(n.Stations))
	for i, seen := range See(n) {
		v := read(&a.w, &seen).out
		if v != v { // some weights are NaN
			v = math.Log(qna.Known(n.Stations[i].CA2))
		}
		out[i] = clamp(math.Exp(v), qna.Least, qna.Most)
	}
	return out
}

// See returns what an [Attention] sees of each station. All numbers are bounded, even if a
// measurement is NaN or infinite.
func See(n qna.Network) []Attended {
	out := make([]Attended, len(n.Stations))
	for i := range n.Stations {
		out[i].add(n, i, i, 0, 0)
	}
	for _, l := range n.Links {
		if l.From == l.To {
			continue
		}
		out[l.To].add(n, l.To, l.From, 1, 0)
		out[l.From].add(n, l.From, l.To, 0, 1)
	}
	return out
}

// add adds what station i sees of station j. j is before i, behind i, or i itself.
func (a *Attended) add(n qna.Network, i, j int, before, behind float64) {
	s := n.Stations[j]
	ca2, unknown := qna.Known(s.CA2), 0.0
	if !(s.CA2 > 0) {
		unknown = 1
	}
	rho, cs2, rate := clamp(s.Rho, 0, 1), clamp(s.CS2, qna.Least, qna.Most), logRate(s.Rate)
	a.X = append(a.X, [AttentionFeatures]float64{
		math.Log(ca2),
		unknown,
		rho,
		math.Log(cs2),
		math.Log(float64(min(max(s.Servers, 1), 1000))),
		rate,
		rate - logRate(n.Stations[i].Rate),
		// of its departures
		math.Log(clamp(qna.Departure(ca2, cs2, rho, s.Servers), qna.Least, qna.Most)),
		before,
		behind,
	})
	a.CV = append(a.CV, math.Sqrt(ca2))
}

// logRate returns the logarithm of a rate per second divided by 10 per second.
func logRate(rate float64) float64 { return math.Log(clamp(rate, 0.01, 1e4) / 10) }

// clamp returns v within low and high, or low if v is not a number.
func clamp(v, low, high float64) float64 {
	if !(v >= low) {
		return low
	}
	return min(v, high)
}

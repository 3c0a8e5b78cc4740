package autoscaler

import "math"

// Persistence predicts that arrivals stay as bursty as they were measured to be; where nothing was measured, that they come by chance.
type Persistence struct{}

// Predict implements Predictor.
func (Persistence) Predict(n Network) []float64 {
	out := make([]float64, len(n.Stations))
	for i, s := range n.Stations {
		out[i] = knownC2(s.CA2)
	}
	return out
}

// Attention predicts by what it has learned of neighbours, as QUART (ICDCS'24, Eq. 4–6) does: features x of a station, of those
// before and of those behind it are weighed by a softmax and summed, and what comes out is read as how bursty arrivals will be. Its
// weights were learned from simulations: see package cv. A station's factor has no part in it. Build it with [NewAttention].
//
// In the paper's Eq. 4 each term of the softmax over j has the same θ·CV_i, which cancels: the weights depend on no CV at all. Here a
// term has its own station's: α_ij = softmax_j(LReLU(aᵀ[W·x_i ‖ W·x_j]) + θ·CV_j). Its CV_i is of neighbours' features, here it is of the
// times between arrivals. It leaves open what features there are, and what f of Eq. 6 is: here it has x_i, W·x_i and Eq. 5's x'_i, a
// layer of tanh, and ln Ca² comes out of it.
type Attention struct{ w AttentionWeights }

// NewAttention returns an Attention with the weights that were learned.
func NewAttention() Attention { return Attention{trainedWeights()} }

// AttentionRecipe is the version of what weights are made by: runs, features, shape, training. It is counted up with each change, and weights
// are then made anew: a test holds it against theirs.
const AttentionRecipe = 1

// WithWeights returns an Attention with other weights.
func WithWeights(w AttentionWeights) Attention { return Attention{w} }

// The shape of an Attention.
const (
	AttentionFeatures = 10 // of a station
	AttentionWidth    = 6  // of W·x
	AttentionHidden   = 8  // of the layer of tanh
)

// AttentionWeights are what an Attention learns. Their sizes are those of its shape: others do not compile.
type AttentionWeights struct {
	W     [AttentionWidth][AttentionFeatures]float64
	A     [2 * AttentionWidth]float64                  // of W·x_i, then of W·x_j
	Theta float64                                      // of CV_j
	B     [AttentionHidden][2 * AttentionWidth]float64 // of x'_i, then of W·x_i
	C     [AttentionHidden]float64
	V     [AttentionHidden]float64
	Own   [AttentionFeatures]float64 // of x_i, past all else
	Bias  float64
}

// Weights are those that a has.
func (a Attention) Weights() AttentionWeights { return a.w }

// LeakySlope is that of LReLU below zero (Veličković et al., Graph Attention Networks, ICLR 2018).
const LeakySlope = 0.2

// Attended is what an Attention sees of a station: itself first, then those before and those behind it.
type Attended struct {
	X  [][AttentionFeatures]float64
	CV []float64
}

// Predict implements Predictor.
func (a Attention) Predict(n Network) []float64 {
	out := make([]float64, len(n.Stations))
	for i, seen := range n.Attended() {
		v := a.w.read(seen)
		if v != v { // weights that are no numbers
			v = math.Log(knownC2(n.Stations[i].CA2))
		}
		out[i] = clamp(math.Exp(v), leastC2, mostC2)
	}
	return out
}

// read returns ln Ca².
func (w *AttentionWeights) read(seen Attended) float64 {
	h := make([][AttentionWidth]float64, len(seen.X))
	score := make([]float64, len(seen.X))
	most := math.Inf(-1)
	for j := range seen.X {
		for k := range w.W {
			h[j][k] = dot(w.W[k][:], seen.X[j][:])
		}
		s := dot(w.A[:AttentionWidth], h[0][:]) + dot(w.A[AttentionWidth:], h[j][:])
		if s < 0 {
			s *= LeakySlope
		}
		score[j] = s + w.Theta*seen.CV[j]
		most = max(most, score[j])
	}
	var in [2 * AttentionWidth]float64 // x', then W·x
	sum := 0.0
	for j := range h {
		e := math.Exp(score[j] - most)
		sum += e
		for k := range h[j] {
			in[k] += e * h[j][k]
		}
	}
	for k := range h[0] {
		in[k] /= sum
		in[AttentionWidth+k] = h[0][k]
	}
	out := w.Bias + dot(w.Own[:], seen.X[0][:])
	for k := range w.B {
		out += w.V[k] * math.Tanh(w.C[k]+dot(w.B[k][:], in[:]))
	}
	return out
}

// dot is the scalar product of two vectors of the same length.
func dot(a, b []float64) float64 {
	sum := 0.0
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// Attended returns what an [Attention] sees of each station. All numbers are bounded, whatever is measured.
func (n Network) Attended() []Attended {
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

// add has station i look at station j, which is before it, or behind it, or itself.
func (a *Attended) add(n Network, i, j int, before, behind float64) {
	s := n.Stations[j]
	ca2, unknown := knownC2(s.CA2), 0.0
	if !(s.CA2 > 0) {
		unknown = 1
	}
	rho, cs2, rate := clamp(s.Rho, 0, 1), clamp(s.CS2, leastC2, mostC2), logRate(s.Rate)
	a.X = append(a.X, [AttentionFeatures]float64{
		math.Log(ca2),
		unknown,
		rho,
		math.Log(cs2),
		math.Log(float64(min(max(s.Servers, 1), 1000))),
		rate,
		rate - logRate(n.Stations[i].Rate),
		math.Log(clamp(Departure(ca2, cs2, rho, s.Servers), leastC2, mostC2)), // what it lets go
		before,
		behind,
	})
	a.CV = append(a.CV, math.Sqrt(ca2))
}

// logRate is of a rate a second, and 0 for 10.
func logRate(rate float64) float64 { return math.Log(clamp(rate, 0.01, 1e4) / 10) }

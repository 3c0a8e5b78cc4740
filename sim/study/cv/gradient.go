package cv

import "math"

const (
	width  = AttentionWidth
	hidden = AttentionHidden
)

// forward is one prediction of ln Ca², with the intermediate values that the gradient needs.
type forward struct {
	h     [][width]float64 // W·x
	raw   []float64        // aᵀ[h_i ‖ h_j]
	alpha []float64
	in    [2 * width]float64 // x', then h_i
	tanh  [hidden]float64
	out   float64
}

// read predicts from what is seen of a station.
func read(w *AttentionWeights, seen *Attended) forward {
	n := len(seen.X)
	f := forward{h: make([][width]float64, n), raw: make([]float64, n), alpha: make([]float64, n)}
	most := math.Inf(-1)
	for j := range seen.X {
		for k := range w.W {
			f.h[j][k] = dot(w.W[k][:], seen.X[j][:])
		}
		f.raw[j] = dot(w.A[:width], f.h[0][:]) + dot(w.A[width:], f.h[j][:])
		f.alpha[j] = leaky(f.raw[j])*f.raw[j] + w.Theta*seen.CV[j]
		most = max(most, f.alpha[j])
	}
	sum := 0.0
	for j, score := range f.alpha {
		f.alpha[j] = math.Exp(score - most)
		sum += f.alpha[j]
	}
	for j := range f.alpha {
		f.alpha[j] /= sum
		for k := range f.h[j] {
			f.in[k] += f.alpha[j] * f.h[j][k]
		}
	}
	copy(f.in[width:], f.h[0][:])
	f.out = w.Bias + dot(w.Own[:], seen.X[0][:])
	for k := range w.B {
		f.tanh[k] = math.Tanh(w.C[k] + dot(w.B[k][:], f.in[:]))
		f.out += w.V[k] * f.tanh[k]
	}
	return f
}

// leaky returns the slope of LReLU at v.
func leaky(v float64) float64 {
	if v < 0 {
		return leakySlope
	}
	return 1
}

// Gradient returns a sample's loss. It adds the loss's derivatives to g, unless g is nil.
func Gradient(w *AttentionWeights, s *Sample, g *AttentionWeights) float64 {
	f := read(w, &s.Seen)
	e := f.out - s.Want
	root := math.Sqrt(1 + e*e)
	if g == nil {
		return root - 1
	}
	d := e / root
	g.Bias += d
	add(g.Own[:], d, s.Seen.X[0][:])
	var in [2 * width]float64 // derivatives by f.in; the other names likewise
	for k := range w.B {
		g.V[k] += d * f.tanh[k]
		inner := d * w.V[k] * (1 - f.tanh[k]*f.tanh[k])
		g.C[k] += inner
		add(g.B[k][:], inner, f.in[:])
		add(in[:], inner, w.B[k][:])
	}
	h := make([][width]float64, len(f.h))
	copy(h[0][:], in[width:])
	f.attention(w, s, in[:width], h, g)
	for j := range h {
		for k := range g.W {
			add(g.W[k][:], h[j][k], s.Seen.X[j][:])
		}
	}
	return root - 1
}

// attention propagates the derivatives z of x' back to h, Theta and A.
func (f *forward) attention(w *AttentionWeights, s *Sample, z []float64, h [][width]float64, g *AttentionWeights) {
	mean := 0.0
	for j := range h {
		mean += f.alpha[j] * dot(z, f.h[j][:])
	}
	for j := range h {
		score := f.alpha[j] * (dot(z, f.h[j][:]) - mean) // derivative of a softmax
		g.Theta += score * s.Seen.CV[j]
		raw := score * leaky(f.raw[j])
		add(g.A[:width], raw, f.h[0][:])
		add(g.A[width:], raw, f.h[j][:])
		add(h[0][:], raw, w.A[:width])
		add(h[j][:], raw, w.A[width:])
		add(h[j][:], f.alpha[j], z)
	}
}

func dot(a, b []float64) float64 {
	sum := 0.0
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// add multiplies b by the factor by and adds the product to a.
func add(a []float64, by float64, b []float64) {
	for i := range a {
		a[i] += by * b[i]
	}
}

package cv

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Sample is a station at a decision, and ln Ca² as measured later.
type Sample struct {
	Seen Attended
	Want float64
}

// Samples returns the stations of runs for which a later measurement exists, limited to a view.
func Samples(runs [][]Recorded, view View) []Sample {
	var out []Sample
	for _, run := range runs {
		for _, r := range run {
			for i, seen := range See(r.Network) {
				if later := r.Later[i]; later > 0 {
					out = append(out, Sample{view(seen), math.Log(bound(later))})
				}
			}
		}
	}
	return out
}

// The bounds of squared coefficients of variation, from package autoscaler.
const (
	leastC2 = 0.1
	mostC2  = 36
)

// Constants of training by Adam (Kingma and Ba, ICLR 2015). They are the usual ones. The learning
// rate falls to 0 along half a cosine.
const (
	epochs    = 30
	batchSize = 64
	fastest   = 3e-3
	beta1     = 0.9
	beta2     = 0.999
	tiny      = 1e-8
)

// Fit says how far training is.
type Fit struct {
	Epoch, Epochs        int
	Training, Validation float64 // loss
}

// Train fits weights to the training samples. It returns the weights after the epoch with the
// smallest loss on the validation samples. On one processor architecture, the result depends only
// on the samples. If report is not nil, it is called after each epoch.
func Train(training, validation []Sample, report func(Fit)) AttentionWeights {
	r := rand.New(rand.NewPCG(weightsSeed, 0))
	w := begin(r)
	best, least := w, Loss(&w, validation)
	var gradient, first, second AttentionWeights
	ps, gs, ms, vs := values(&w), values(&gradient), values(&first), values(&second)
	order := make([]int, len(training))
	for i := range order {
		order[i] = i
	}
	step, steps := 0, epochs*((len(training)+batchSize-1)/batchSize)
	for epoch := range epochs {
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		loss := 0.0
		for batch := range slices.Chunk(order, batchSize) {
			gradient = AttentionWeights{}
			for _, i := range batch {
				loss += Gradient(&w, &training[i], &gradient)
			}
			step++
			rate := fastest / 2 * (1 + math.Cos(math.Pi*float64(step)/float64(steps)))
			rate *= math.Sqrt(1-math.Pow(beta2, float64(step))) / (1 - math.Pow(beta1, float64(step)))
			for k := range ps {
				g := *gs[k] / float64(len(batch))
				*ms[k] = beta1**ms[k] + (1-beta1)*g
				*vs[k] = beta2**vs[k] + (1-beta2)*g*g
				*ps[k] -= rate * *ms[k] / (math.Sqrt(*vs[k]) + tiny)
			}
		}
		fit := Fit{epoch + 1, epochs, loss / float64(len(training)), Loss(&w, validation)}
		if fit.Validation < least {
			best, least = w, fit.Validation
		}
		if report != nil {
			report(fit)
		}
	}
	for _, p := range values(&best) {
		*p = math.Round(*p*1e6) / 1e6 // rounded as they are written
	}
	return best
}

// begin returns the initial weights: small random numbers (Glorot and Bengio, AISTATS 2010), which
// predict about the measured burstiness.
func begin(r *rand.Rand) AttentionWeights {
	var w AttentionWeights
	draw := func(row []float64, out int) {
		for k := range row {
			row[k] = r.NormFloat64() * math.Sqrt(2/float64(len(row)+out))
		}
	}
	for k := range w.W {
		draw(w.W[k][:], len(w.W))
	}
	draw(w.A[:], 1)
	for k := range w.B {
		draw(w.B[k][:], len(w.B))
	}
	draw(w.V[:], 1)
	w.Own[0] = 1
	return w
}

// Loss returns the mean of √(1+e²)−1 over the samples, where e is the error of ln Ca². That is
// about e²/2 for a small error and about |e| for a large one. So the loss is not dominated by
// measurements over a few arrivals, which can be any number.
func Loss(w *AttentionWeights, samples []Sample) float64 {
	sum := 0.0
	for i := range samples {
		sum += Gradient(w, &samples[i], nil)
	}
	return sum / float64(max(len(samples), 1))
}

// values returns pointers to all weights.
func values(w *AttentionWeights) []*float64 {
	out := []*float64{&w.Theta, &w.Bias}
	add := func(row []float64) {
		for k := range row {
			out = append(out, &row[k])
		}
	}
	for k := range w.W {
		add(w.W[k][:])
	}
	for k := range w.B {
		add(w.B[k][:])
	}
	add(w.A[:])
	add(w.C[:])
	add(w.V[:])
	add(w.Own[:])
	return out
}

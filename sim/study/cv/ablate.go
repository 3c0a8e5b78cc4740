package cv

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
)

// View is what of a station's neighbourhood an attention may see: to learn what each part is worth.
type View func(autoscaler.Attended) autoscaler.Attended

// Whole is all of it.
func Whole(a autoscaler.Attended) autoscaler.Attended { return a }

// Alone is the station by itself.
func Alone(a autoscaler.Attended) autoscaler.Attended {
	return autoscaler.Attended{X: a.X[:1], CV: a.CV[:1]}
}

// AsPrinted has θ·CV_i in each term of the softmax over j, as QUART's Eq. 4 is printed: it cancels.
func AsPrinted(a autoscaler.Attended) autoscaler.Attended {
	cv := make([]float64, len(a.CV))
	for j := range cv {
		cv[j] = a.CV[0]
	}
	return autoscaler.Attended{X: a.X, CV: cv}
}

// Learned is a contender that sees no more than a view.
func Learned(name string, w autoscaler.AttentionWeights, view View) Contender {
	return Contender{name, func(n autoscaler.Network) []float64 {
		out := make([]float64, 0, len(n.Stations))
		for _, seen := range n.Attended() {
			seen = view(seen)
			out = append(out, math.Exp(read(&w, &seen).out))
		}
		return out
	}}
}

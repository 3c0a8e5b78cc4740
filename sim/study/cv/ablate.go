package cv

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/sim/qna"
)

// View changes what an [Attention] sees of a station and its neighbours, to measure what each part
// is worth.
type View func(Attended) Attended

// Whole is the [View] of everything.
func Whole(a Attended) Attended { return a }

// Alone is a [View] of the station without its neighbours.
func Alone(a Attended) Attended {
	return Attended{X: a.X[:1], CV: a.CV[:1]}
}

// AsPrinted is a [View] for QUART's Eq. 4 as printed: each term of the softmax over j has θ·CV_i,
// which cancels.
func AsPrinted(a Attended) Attended {
	cv := make([]float64, len(a.CV))
	for j := range cv {
		cv[j] = a.CV[0]
	}
	return Attended{X: a.X, CV: cv}
}

// Learned returns a contender that sees only a view.
func Learned(name string, w AttentionWeights, view View) Contender {
	return Contender{name, func(n qna.Network) []float64 {
		out := make([]float64, 0, len(n.Stations))
		for _, seen := range See(n) {
			seen = view(seen)
			out = append(out, math.Exp(read(&w, &seen).out))
		}
		return out
	}}
}

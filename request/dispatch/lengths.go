package dispatch

import (
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

const (
	// lengthFade is the time in which the weight of an arrival falls to 1/e. Lengths change less
	// often than rates.
	lengthFade = 2 * time.Minute
	// fewestLengths is the weight of arrivals that are needed to know the shares.
	fewestLengths = 10
)

// lengths counts the arrivals at a stage by the length of their inputs. The classes are cut at the
// max-lengths of the stage's lanes. Counts fade with time.
type lengths struct {
	bounds []int     // of the classes, ascending; 0, for all other inputs, comes last
	counts []float64 // parallel to bounds
	at     time.Time // of the counts
}

// cut changes the classes to those of some lanes. New classes start without arrivals.
func (l *lengths) cut(lanes []*Lane) {
	var bounds []int
	for _, lane := range lanes {
		if !lane.removed && lane.maxLength > 0 {
			bounds = append(bounds, lane.maxLength)
		}
	}
	slices.Sort(bounds)
	bounds = append(slices.Compact(bounds), 0)
	if !slices.Equal(bounds, l.bounds) {
		*l = lengths{bounds: bounds, counts: make([]float64, len(bounds))}
	}
}

// add counts an arrival. An input of unknown length, 0, counts with the last class, because its
// lane must take any input.
func (l *lengths) add(now time.Time, length int) {
	if len(l.bounds) < 2 {
		return // there is only one class
	}
	if d := now.Sub(l.at); !l.at.IsZero() && d > 0 {
		f := math.Exp(-d.Seconds() / lengthFade.Seconds())
		for i := range l.counts {
			l.counts[i] *= f
		}
	}
	if now.After(l.at) {
		l.at = now
	}
	last := len(l.bounds) - 1
	i, _ := slices.BinarySearch(l.bounds[:last], length)
	if length == 0 {
		i = last
	}
	l.counts[i]++
}

// read returns the share of each class; nil: too few arrivals are known, or there is one class.
func (l *lengths) read(now time.Time) []plan.LengthShare {
	sum := 0.0
	for _, n := range l.counts {
		sum += n
	}
	if d := now.Sub(l.at); len(l.bounds) < 2 || sum*math.Exp(-max(d, 0).Seconds()/lengthFade.Seconds()) < fewestLengths {
		return nil
	}
	out := make([]plan.LengthShare, len(l.bounds))
	for i, bound := range l.bounds {
		out[i] = plan.LengthShare{MaxLength: bound, Share: l.counts[i] / sum}
	}
	return out
}

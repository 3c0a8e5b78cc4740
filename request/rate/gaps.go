package rate

import "time"

const (
	longestGap  = time.Minute // a longer gap means that the load had ended
	enoughGaps  = 1000        // older gaps than these do not count
	fewestGaps  = 5           // needed to know the CV
	fewestLong  = 1.5         // number of gaps that make up most of the time; a burst has at most one
	leastCovers = 1.0         // seconds that all gaps together must cover
)

// gaps are gaps between arrivals as multiples of their mean, so that gaps of different rates can be
// added. A change of the rate then does not look like bursts.
type gaps struct{ n, squares float64 }

// add sets g to the gaps of c, and as many of the earlier gaps as are needed. It leaves out the
// gaps of c if most of their time is one gap.
func (g *gaps) add(c counts, earlier gaps) {
	*g = gaps{}
	if c.time >= leastCovers && c.time*c.time >= fewestLong*c.squares {
		mean := c.time / c.gaps
		g.n, g.squares = c.gaps, c.squares/(mean*mean)
	}
	if part := min(1, (enoughGaps-g.n)/earlier.n); earlier.n > 0 && part > 0 {
		g.n += part * earlier.n
		g.squares += part * earlier.squares
	}
}

// cv2 returns the squared CV of the gaps, if the rate changed at split k. The gaps before and after
// the change are then multiples of different means, and the gap across it is of neither. If these
// are few, gaps of before count, too.
func (h *history) cv2(k int) float64 {
	var all gaps
	all.add(h.before(k), h.past)
	all.add(h.splits[k].inner(), all)
	if all.n < fewestGaps {
		return 0
	}
	return max(all.squares/all.n-1, 0)
}

package dispatch

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// An envelope has the largest number of arrivals in any stretch of time, for several lengths of
// stretches (see plan.Envelope). Per length, arrivals are counted in 8 cells of equal width. A
// stretch ends with an arrival, somewhere in its last cell, so it is up to one cell shorter than
// its length. Cells need bounded memory. Exact counts would need the time of each arrival.
const (
	cells    = 8
	eras     = 12
	eraLong  = 5 * time.Second // length of an era; the eras make up the minute that is remembered
	cellLong = plan.ShortestStretch / cells
)

// bursts measures a plan.Envelope. The zero value is ready. Time must not go backwards. The cost of
// an arrival is a few steps for each length.
type bursts struct {
	lengths [len(plan.Envelope{})]stretch
	newest  int64                             // number of the newest era
	most    [eras][len(plan.Envelope{})]int32 // per era: the largest count of each length
}

// stretch counts the arrivals of the latest cells, for one length.
type stretch struct {
	cell  int64 // number of the newest cell
	sum   int32
	count [cells]int32
}

// add counts an arrival at a time since the start of measuring.
func (b *bursts) add(at time.Duration) {
	era := int64(at / eraLong)
	for i := max(b.newest+1, era-eras+1); i <= era; i++ {
		b.most[i%eras] = [len(plan.Envelope{})]int32{}
	}
	b.newest = max(b.newest, era)
	most := &b.most[b.newest%eras]
	for i := range b.lengths {
		most[i] = max(most[i], b.lengths[i].add(int64(at/(cellLong<<i))))
	}
}

// add counts an arrival in a cell. It returns the count of the whole stretch that ends there.
func (s *stretch) add(cell int64) int32 {
	for i := max(s.cell+1, cell-cells+1); i <= cell; i++ {
		s.sum -= s.count[i%cells]
		s.count[i%cells] = 0
	}
	s.cell = max(s.cell, cell)
	s.count[s.cell%cells]++
	s.sum++
	return s.sum
}

// read returns the largest count of each length within the last 55 to 60 s.
func (b *bursts) read(at time.Duration) (out plan.Envelope) {
	for era := max(int64(at/eraLong)-eras+1, 0); era <= b.newest; era++ {
		for i, n := range b.most[era%eras] {
			out[i] = max(out[i], int(n))
		}
	}
	return out
}

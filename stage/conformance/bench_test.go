package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/wire"
)

// BenchmarkNoop is what it costs to have a stage do nothing, per call: one batch at a time of one call and of 16, and 8
// batches at a time. Go and Python in one run: go test -bench Noop -run '^$' ./stage/conformance
func BenchmarkNoop(b *testing.B) {
	for _, tc := range []struct{ slots, batch int }{{1, 1}, {1, 16}, {8, 1}} {
		for _, s := range []sdk{{"go", goStage}, {"python", pythonStage}} {
			b.Run(fmt.Sprintf("%s/slots=%d/batch=%d", s.name, tc.slots, tc.batch), func(b *testing.B) {
				r := s.begin(b, "noop", fmt.Sprint("max_inflight=", tc.slots))
				texts := make([]string, tc.batch)
				for i := range texts {
					texts[i] = "some text of a call"
				}
				payload := batch(time.Now().Add(time.Hour), texts...)
				for id := range tc.slots {
					r.send(wire.FrameBatch, uint64(id), payload)
				}
				left := make([]int, tc.slots) // results of a batch that are yet to come
				for id := range left {
					left[id] = tc.batch
				}
				b.ResetTimer()
				for range b.N * tc.batch {
					f, err := r.conn.Read()
					if err != nil || f.Type != wire.FrameResult {
						b.Fatal(f.Type, err, r.stderr.String())
					}
					if left[f.Batch]--; left[f.Batch] == 0 {
						left[f.Batch] = tc.batch
						r.send(wire.FrameBatch, f.Batch, payload)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*tc.batch), "ns/call")
			})
		}
	}
}

package conformance

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// BenchmarkNoop measures a call of a stage that does nothing: wall time, and the stage's processor
// time. It runs one batch of one call at a time, one batch of 16 calls at a time, and 8 batches at
// a time. One run compares Go and Python: go test -bench Noop -run '^$' ./stage/conformance
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
				left := make([]int, tc.slots) // outstanding results per batch
				for id := range left {
					left[id] = tc.batch
				}
				busy := cpu(b, r.cmd.Process.Pid)
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
				b.ReportMetric(float64((cpu(b, r.cmd.Process.Pid)-busy).Nanoseconds())/float64(b.N*tc.batch), "stage-cpu-ns/call")
			})
		}
	}
}

// cpu returns the processor time that a process has used, in steps of 10 ms.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	// The fields after the name, from the third on.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var ticks int
	for _, n := range f[11:13] { // utime, stime
		t, err := strconv.Atoi(n)
		if err != nil {
			b.Fatal(err)
		}
		ticks += t
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

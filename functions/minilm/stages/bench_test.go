package stages

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// BenchmarkLayer measures the cost per token in batches of several shapes. BatchTokens was chosen
// from its results.
func BenchmarkLayer(b *testing.B) {
	s, err := zygote.Open(zygote.Options{Library: proctest.Built(b, "ort", "libonnxruntime.so.1"), Model: proctest.Built(b, "models", "minilm", "layer-3.onnx"), Threads: 1, Start: 1})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(s.Close)
	for _, shape := range [][]int64{{1, 8}, {8, 8}, {64, 8}, {1, 32}, {16, 32}, {64, 32}, {1, 256}, {2, 256}, {8, 256}} {
		tokens := shape[0] * shape[1]
		batch := []tensor.Tensor{
			{Name: "hidden.2", Datatype: "FP32", Shape: append(shape[:2:2], 384), Data: make([]byte, 4*384*tokens)},
			{Name: maskName, Datatype: "INT64", Shape: shape, Data: bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0}, int(tokens))},
		}
		b.Run(fmt.Sprintf("texts=%d/tokens=%d", shape[0], shape[1]), func(b *testing.B) {
			for b.Loop() {
				if _, err := s.Run(batch); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(int64(b.N)*tokens), "µs/token")
		})
	}
}

package stages

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Pool returns the hooks of the stage that computes one vector of length 1 from the vectors of each
// text.
func Pool() stage.Hooks {
	return withModel(func(m Model) (hook, error) { return pool(m), nil })
}

func pool(m Model) hook {
	return func(c *stage.Call) (tensor.Activation, error) {
		all := [][]float32{}
		for i, it := range c.Items() {
			if it.Tensors == nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: bytes of type %q, want the tensors of the last layer", i, it.ContentType))
			}
			out, err := m.Run(it.Tensors)
			if err != nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: %w", i, err))
			}
			all = append(all, rows(out[0])...)
		}
		b, err := json.Marshal(all)
		if err != nil {
			return nil, fmt.Errorf("embeddings: %w", err)
		}
		return tensor.Activation{{ContentType: "application/json", Bytes: b}}, nil
	}
}

// rows splits a tensor FP32 [n,width] into its rows.
func rows(t tensor.Tensor) [][]float32 {
	out := make([][]float32, t.Shape[0])
	width := int(t.Shape[1])
	for i := range out {
		out[i] = make([]float32, width)
		for j := range out[i] {
			out[i][j] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*(i*width+j):]))
		}
	}
	return out
}

package stages

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// embeddingName is the name of the whole model's output: FP32 [batch, 384], each row of length 1.
const embeddingName = "embedding"

// width is the number of values of an embedding.
const width = 384

// Pool returns the hooks of the stage that computes one vector of length 1 from the vectors of each
// text. Of items from the whole model, which has computed this already, it takes the embeddings.
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
			out, err := pooled(m, it.Tensors)
			if err != nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: %w", i, err))
			}
			all = append(all, rows(out)...)
		}
		b, err := json.Marshal(all)
		if err != nil {
			return nil, fmt.Errorf("embeddings: %w", err)
		}
		return tensor.Activation{{ContentType: "application/json", Bytes: b}}, nil
	}
}

// pooled returns the embeddings of an item's texts, FP32 [batch, width].
func pooled(m Model, tensors []tensor.Tensor) (tensor.Tensor, error) {
	if len(tensors) != 1 || tensors[0].Name != embeddingName {
		out, err := m.Run(tensors)
		if err != nil {
			return tensor.Tensor{}, err
		}
		return out[0], nil
	}
	t := tensors[0]
	if t.Datatype != "FP32" || len(t.Shape) != 2 || t.Shape[1] != width || len(t.Data)%(4*width) != 0 || int64(len(t.Data)/(4*width)) != t.Shape[0] {
		return tensor.Tensor{}, fmt.Errorf("tensor %q: %s %v with %d bytes, want FP32 [batch, %d]", t.Name, t.Datatype, t.Shape, len(t.Data), width)
	}
	return t, nil
}

// rows splits a tensor FP32 [batch, width] into its rows.
func rows(t tensor.Tensor) [][]float32 {
	out := make([][]float32, t.Shape[0])
	for i := range out {
		out[i] = make([]float32, width)
		for j := range out[i] {
			out[i][j] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*(i*width+j):]))
		}
	}
	return out
}

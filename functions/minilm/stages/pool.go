package stages

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// embeddingName is the name of the whole model's output: FP32 [batch, 384], each row of length 1.
const embeddingName = "embedding"

// width is the number of values of an embedding.
const width = 384

// Pool returns the hooks of the stage that computes one vector of length 1 from the vectors of each
// text. Of items from the whole model, which has computed this already, it takes the embeddings.
func Pool() stage.Hooks {
	return withModel(func() (hook, error) { return pool, nil })
}

func pool(c *stage.Call) (work stage.Work, err error) {
	items := c.Items()
	done := make([]*tensor.Tensor, len(items)) // embeddings that need no run
	for i, it := range items {
		if it.Tensors == nil {
			return work, stage.BadInput(fmt.Errorf("item %d: bytes of type %q, want the tensors of the last layer", i, it.ContentType))
		}
		if len(it.Tensors) != 1 || it.Tensors[0].Name != embeddingName {
			work.Sets = append(work.Sets, it.Tensors)
			continue
		}
		if done[i] = &it.Tensors[0]; !isEmbedding(*done[i]) {
			return work, stage.BadInput(fmt.Errorf("item %d: tensor %q: %s %v with %d bytes, want FP32 [batch, %d]",
				i, done[i].Name, done[i].Datatype, done[i].Shape, len(done[i].Data), width))
		}
	}
	work.Answer = func(of []join.Result) (tensor.Activation, error) { return embeddings(done, of) }
	return work, nil
}

func isEmbedding(t tensor.Tensor) bool {
	return t.Datatype == "FP32" && len(t.Shape) == 2 && t.Shape[1] == width && len(t.Data)%(4*width) == 0 && int64(len(t.Data)/(4*width)) == t.Shape[0]
}

// embeddings returns the answer of a call: the embeddings of all items as JSON. Where done is nil,
// the next result has the item's embeddings.
func embeddings(done []*tensor.Tensor, of []join.Result) (tensor.Activation, error) {
	all := [][]float32{}
	for i, t := range done {
		if t == nil {
			r := of[0]
			if of = of[1:]; r.Err != nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: %w", i, r.Err))
			}
			t = &r.Outputs[0]
		}
		all = append(all, rows(*t)...)
	}
	b, err := json.Marshal(all)
	if err != nil {
		return nil, fmt.Errorf("embeddings: %w", err)
	}
	return tensor.Activation{{ContentType: "application/json", Bytes: b}}, nil
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

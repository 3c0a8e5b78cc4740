package stages

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// The names of the tensors of a tokenised text. The model has the first two as inputs. Package onnx
// has the same names, but a stage binary should not contain it.
const (
	idsName   = "input_ids"
	maskName  = "attention_mask"
	typesName = "token_type_ids"
)

// tokenised returns the item of one text: three tensors INT64 [1, tokens]. A text alone has no
// padding, so its mask is 1 everywhere. It is one sentence, so its types are 0.
func tokenised(ids []int64) tensor.Item {
	t := padded([][]int64{ids})
	types := tensor.Tensor{Name: typesName, Datatype: t[0].Datatype, Shape: t[0].Shape, Data: make([]byte, len(t[0].Data))}
	return tensor.Item{Tensors: append(t, types)}
}

// tokensOf returns the tokens of a tokenised text without the padding behind the last one. Only
// input_ids must be there. Ids are below vocabulary.
func tokensOf(tensors []tensor.Tensor, vocabulary int) ([]int64, error) {
	values := map[string][]int64{}
	for i := range tensors {
		t := &tensors[i]
		if t.Name != idsName && t.Name != maskName && t.Name != typesName || values[t.Name] != nil {
			return nil, fmt.Errorf("tensor %.60q, want %s, %s and %s, each once", t.Name, idsName, maskName, typesName)
		}
		v, err := row(t)
		if err != nil {
			return nil, err
		}
		values[t.Name] = v
	}
	ids, mask := values[idsName], values[maskName]
	if ids == nil {
		return nil, fmt.Errorf("%d tensors without %s, want it", len(tensors), idsName)
	}
	for _, name := range []string{maskName, typesName} {
		if v := values[name]; v != nil && len(v) != len(ids) {
			return nil, fmt.Errorf("%s of %d tokens, want %d, as in %s", name, len(v), len(ids), idsName)
		}
	}
	if mask != nil {
		n := len(mask)
		for n > 0 && mask[n-1] == 0 {
			n--
		}
		if n == 0 || slices.ContainsFunc(mask[:n], func(m int64) bool { return m != 1 }) {
			return nil, fmt.Errorf("%s, want 1 for each token, then 0 for padding", maskName)
		}
		ids = ids[:n]
	}
	if i := slices.IndexFunc(ids, func(id int64) bool { return id < 0 || id >= int64(vocabulary) }); i >= 0 {
		return nil, fmt.Errorf("%s has %d, want an id from 0 to %d", idsName, ids[i], vocabulary-1)
	}
	if slices.ContainsFunc(values[typesName], func(v int64) bool { return v != 0 }) {
		return nil, fmt.Errorf("%s, want 0: the model knows one sentence per text", typesName)
	}
	return ids, nil
}

// row returns the elements of a tensor INT64 [1, tokens] with at least one token.
func row(t *tensor.Tensor) ([]int64, error) {
	if t.Datatype != "INT64" || len(t.Shape) != 2 || t.Shape[0] != 1 || t.Shape[1] < 1 || len(t.Data)%8 != 0 || int64(len(t.Data)/8) != t.Shape[1] {
		return nil, fmt.Errorf("tensor %q: %s %v with %d bytes, want INT64 [1, tokens]", t.Name, t.Datatype, t.Shape, len(t.Data))
	}
	out := make([]int64, t.Shape[1])
	for i := range out {
		out[i] = int64(binary.LittleEndian.Uint64(t.Data[8*i:]))
	}
	return out, nil
}

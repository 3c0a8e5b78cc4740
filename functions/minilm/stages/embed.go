package stages

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Limits of a request.
const (
	MaxTokens   = 256  // per text, as in the model's training; further tokens are cut off
	MaxTexts    = 1000 // per request
	BatchTokens = 512  // per batch, with padding
)

// The names of the model's inputs. Package onnx has the same names, but a stage binary should not
// contain it.
const (
	idsName  = "input_ids"
	maskName = "attention_mask"
)

// Model computes outputs from inputs. zygote.Session implements it.
type Model interface {
	Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error)
}

// hook answers one call.
type hook func(c *stage.Call) (tensor.Activation, error)

// Embed returns the hooks of the stage that turns texts into tokens, and tokens into vectors. The
// file vocab.txt is beside the model.
func Embed() stage.Hooks {
	return withModel(func(m Model) (hook, error) {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(os.Getenv(wire.EnvModel)), "vocab.txt"))
		if err != nil {
			return nil, fmt.Errorf("the tokeniser's vocabulary: %w", err)
		}
		tokenizer, err := wordpiece.New(string(b))
		if err != nil {
			return nil, err
		}
		return embed(m, tokenizer), nil
	})
}

// withModel returns the hooks of a stage that needs the replica's model.
func withModel(bind func(Model) (hook, error)) stage.Hooks {
	var answer hook
	return stage.Hooks{
		Place: func(_ context.Context, r *stage.Replica) (err error) {
			if r.Model() == nil {
				return fmt.Errorf("no model, want the environment %s to name one", wire.EnvModel)
			}
			answer, err = bind(r.Model())
			return err
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { return answer(c) }),
	}
}

func embed(m Model, tokenizer *wordpiece.Tokenizer) hook {
	return func(c *stage.Call) (tensor.Activation, error) {
		items := c.Items()
		if len(items) > MaxTexts {
			return nil, stage.BadInput(fmt.Errorf("%d texts, want at most %d per request", len(items), MaxTexts))
		}
		texts := make([][]int64, len(items))
		for i, it := range items {
			text, err := textOf(it)
			if err != nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: %w, want text", i, err))
			}
			texts[i] = tokenizer.IDs(text, MaxTokens)
		}
		var out tensor.Activation
		for _, batch := range batches(texts) {
			result, err := m.Run(padded(batch))
			if err != nil {
				return nil, err
			}
			out = append(out, tensor.Item{Tensors: result})
		}
		return out, nil
	}
}

// textOf returns an item's text: a JSON string, or UTF-8 bytes of any content type.
func textOf(it tensor.Item) (string, error) {
	if it.Tensors != nil {
		return "", fmt.Errorf("%d tensors", len(it.Tensors))
	}
	if strings.Contains(it.ContentType, "json") {
		var s string
		if err := json.Unmarshal(it.Bytes, &s); err != nil {
			return "", fmt.Errorf("%.40q of type %q", it.Bytes, it.ContentType)
		}
		return s, nil
	}
	if !utf8.Valid(it.Bytes) {
		return "", fmt.Errorf("%d bytes of type %q that are not UTF-8", len(it.Bytes), it.ContentType)
	}
	return string(it.Bytes), nil
}

// batches splits texts, in order. Each batch, padded to its longest text, has at most BatchTokens
// tokens, of which at most a quarter is padding.
func batches(texts [][]int64) (out [][][]int64) {
	begin, longest, tokens := 0, 0, 0
	for i, text := range texts {
		longest, tokens = max(longest, len(text)), tokens+len(text)
		if all := longest * (i + 1 - begin); all > BatchTokens || 4*(all-tokens) > all {
			out = append(out, texts[begin:i])
			begin, longest, tokens = i, len(text), len(text)
		}
	}
	if begin < len(texts) {
		out = append(out, texts[begin:])
	}
	return out
}

// padded returns the model's inputs for a batch.
func padded(batch [][]int64) []tensor.Tensor {
	longest := 0
	for _, text := range batch {
		longest = max(longest, len(text))
	}
	shape := []int64{int64(len(batch)), int64(longest)}
	// Padding is token 0.
	ids, mask := make([]byte, 8*len(batch)*longest), make([]byte, 8*len(batch)*longest)
	for i, text := range batch {
		for j, id := range text {
			at := 8 * (i*longest + j)
			binary.LittleEndian.PutUint64(ids[at:], uint64(id))
			mask[at] = 1
		}
	}
	return []tensor.Tensor{
		{Name: idsName, Datatype: "INT64", Shape: shape, Data: ids},
		{Name: maskName, Datatype: "INT64", Shape: shape, Data: mask},
	}
}

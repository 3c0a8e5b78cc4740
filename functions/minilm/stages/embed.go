package stages

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Limits of a request.
const (
	MaxTokens   = 256  // per text, as in the model's training; further tokens are cut off
	MaxTexts    = 1000 // per request
	BatchTokens = 512  // per batch, with padding
)

// Environment variables that limit the length of texts for [Embed], in tokens: 2 to [MaxTokens].
const (
	// EnvMaxLength refuses longer inputs. The default is MaxTokens.
	EnvMaxLength = "MINILM_MAX_LENGTH"
	// EnvReadLength cuts off the end of longer inputs: answers are faster and less accurate. The
	// default is MaxTokens.
	EnvReadLength = "MINILM_READ_LENGTH"
)

// hook returns what a call asks of the model.
type hook func(c *stage.Call) (stage.Work, error)

// Embed returns the hooks of the stage that turns tokens into what its model computes from them:
// the first vectors of all tokens, or with the whole model, the embedding of each text. It also
// takes texts, for which the file vocab.txt is beside the model.
func Embed() stage.Hooks {
	return withModel(func() (hook, error) {
		var e embedder
		var err error
		if e.tokenizer, err = vocabulary(filepath.Join(filepath.Dir(os.Getenv(wire.EnvModel)), "vocab.txt")); err != nil {
			return nil, err
		}
		if e.most, err = limit(EnvMaxLength); err != nil {
			return nil, err
		}
		if e.read, err = limit(EnvReadLength); err != nil {
			return nil, err
		}
		return e.embed, nil
	})
}

// limit returns a number of tokens from the environment.
func limit(name string) (int, error) {
	v := os.Getenv(name)
	if v == "" {
		return MaxTokens, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 2 || n > MaxTokens {
		return 0, fmt.Errorf("environment %s: got %q, want 2 to %d tokens", name, v, MaxTokens)
	}
	return n, nil
}

// withModel returns the hooks of a stage that runs the replica's model for all calls of a batch
// together.
func withModel(bind func() (hook, error)) stage.Hooks {
	var prepare hook
	var runner *join.Runner
	return stage.Hooks{
		MaxBatch: stage.MostTogether,
		Place: func(_ context.Context, r *stage.Replica) (err error) {
			if r.Model() == nil {
				return fmt.Errorf("no model, want the environment %s to name one", wire.EnvModel)
			}
			runner = join.New(r.Model(), r.Log)
			prepare, err = bind()
			return err
		},
		Infer: stage.Together(
			func(sets [][]tensor.Tensor) []join.Result { return runner.Run(sets) },
			func(c *stage.Call) (stage.Work, error) { return prepare(c) }),
	}
}

// embedder prepares the first stage of the model, or the whole model.
type embedder struct {
	tokenizer  *wordpiece.Tokenizer
	most, read int // tokens per text: texts above most are refused, and texts above read cut off
}

func (e embedder) embed(c *stage.Call) (work stage.Work, err error) {
	items := c.Items()
	if err := countTexts(items); err != nil {
		return work, err
	}
	texts := make([][]int64, len(items))
	for i, it := range items {
		if texts[i], err = e.tokens(it); err != nil {
			return work, stage.BadInput(fmt.Errorf("item %d: %w", i, err))
		}
	}
	for _, batch := range batches(texts) {
		work.Sets = append(work.Sets, padded(batch))
	}
	work.Answer = func(of []join.Result) (out tensor.Activation, err error) {
		for _, r := range of {
			if r.Err != nil {
				return nil, r.Err
			}
			out = append(out, tensor.Item{Tensors: r.Outputs})
		}
		return out, nil
	}
	return work, nil
}

// tokens returns the tokens of an item: a tokenised text, or a text.
func (e embedder) tokens(it tensor.Item) ([]int64, error) {
	var ids []int64
	if it.Tensors == nil {
		text, err := textOf(it)
		if err != nil {
			return nil, fmt.Errorf("%w, want text or the tensor %s", err, idsName)
		}
		ids = e.tokenizer.IDs(text, MaxTokens)
	} else {
		var err error
		if ids, err = tokensOf(it.Tensors, e.tokenizer.Size()); err != nil {
			return nil, err
		}
	}
	if len(ids) > e.most {
		return nil, fmt.Errorf("got %d tokens, want at most %d", len(ids), e.most)
	}
	if len(ids) > e.read {
		ids = append(ids[:e.read-1:e.read-1], ids[len(ids)-1]) // the last token ends the text
	}
	return ids, nil
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

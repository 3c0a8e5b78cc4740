package stages

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// counted is a model that counts its runs.
type counted struct {
	join.Model
	runs int
}

func (c *counted) Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error) {
	c.runs++
	return c.Model.Run(inputs, outputs...)
}

// together answers several calls as a batch.
func together(t *testing.T, r *join.Runner, h hook, calls []*stage.Call) []tensor.Activation {
	t.Helper()
	var sets [][]tensor.Tensor
	works := make([]stage.Work, len(calls))
	for i, c := range calls {
		var err error
		if works[i], err = h(c); err != nil {
			t.Fatal(err)
		}
		sets = append(sets, works[i].Sets...)
	}
	results := r.Run(sets)
	out := make([]tensor.Activation, len(calls))
	for i, w := range works {
		var err error
		if out[i], err = w.Answer(results[:len(w.Sets)]); err != nil {
			t.Fatal(err)
		}
		results = results[len(w.Sets):]
	}
	return out
}

// layer is the hook of functions/onnx.
func layer(c *stage.Call) (stage.Work, error) {
	var work stage.Work
	for _, it := range c.Items() {
		work.Sets = append(work.Sets, it.Tensors)
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

// TestBatchesOfCallsEqualSingleCalls sends the texts of the reference, one call per text, through
// the stages as batches, and compares the embeddings with those of single calls. The texts have
// several lengths, so shorter ones are padded.
func TestBatchesOfCallsEqualSingleCalls(t *testing.T) {
	tok := tokenizer(t)
	type step struct {
		name string
		hook hook
	}
	steps := []step{{"embed", embedder{tok, MaxTokens, MaxTokens}.embed}}
	for l := range 6 {
		steps = append(steps, step{fmt.Sprintf("layer-%d", l+1), layer})
	}
	steps = append(steps, step{"pool", pool})
	for name, steps := range map[string][]step{"cut": steps, "whole": {{"whole", embedder{tok, MaxTokens, MaxTokens}.embed}}} {
		var calls, single []*stage.Call
		for _, r := range references(t) {
			calls, single = append(calls, call(text(r.Text))), append(single, call(text(r.Text)))
		}
		for _, s := range steps {
			m := &counted{Model: model(t, s.name)}
			r := join.New(m, slog.New(slog.DiscardHandler))
			together(t, r, s.hook, calls) // the first joined runs are checked
			m.runs = 0
			joined := together(t, r, s.hook, calls)
			if m.runs > len(calls)/2 {
				t.Errorf("%s: %d runs for %d calls, want at most half", s.name, m.runs, len(calls))
			}
			t.Logf("%s: %d runs for %d calls", s.name, m.runs, len(calls))
			for i := range calls {
				out, err := alone(m, s.hook)(single[i])
				if err != nil {
					t.Fatal(err)
				}
				single[i], calls[i] = call(out...), call(joined[i]...)
			}
		}
		far := 0.0
		for i := range calls {
			a, b := embeddingOf(t, calls[i]), embeddingOf(t, single[i])
			far = max(far, distance(a, b))
		}
		if !(far <= 1e-5) {
			t.Errorf("%s: batches are %g off single calls, want at most 1e-5", name, far)
		}
		t.Logf("%s: at most %.1e off", name, far)
	}
}

// embeddingOf returns the only embedding among a call's items.
func embeddingOf(t *testing.T, c *stage.Call) []float32 {
	t.Helper()
	it := c.Items()[0]
	if it.Tensors != nil {
		return slices.Concat(rows(it.Tensors[0])...)
	}
	var all [][]float32
	if err := json.Unmarshal(it.Bytes, &all); err != nil || len(all) != 1 || len(all[0]) != width {
		t.Fatalf("%d embeddings, %v", len(all), err)
	}
	return all[0]
}

package stage

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// echo returns the sets as they are, and counts them.
func echo(ran *[]int) func(sets [][]tensor.Tensor) []join.Result {
	return func(sets [][]tensor.Tensor) []join.Result {
		*ran = append(*ran, len(sets))
		out := make([]join.Result, len(sets))
		for i, s := range sets {
			if out[i].Outputs = s; s[0].Name == "bad" {
				out[i].Err = errors.New("wrong shape")
			}
		}
		return out
	}
}

func named(names ...string) *Call {
	c := &Call{ctx: context.Background()}
	items := make(tensor.Activation, len(names))
	for i, n := range names {
		items[i].Tensors = []tensor.Tensor{{Name: n}}
	}
	c.Input = tensor.Input{{Items: items}}
	return c
}

func TestOneBadItemFailsOnlyItsCall(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	canceled := named("x")
	canceled.ctx = ended
	text := &Call{ctx: t.Context(), Input: tensor.Input{{Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte("x")}}}}}
	var ran []int
	infer := Together(echo(&ran), perItem(func(c *Call, it tensor.Item) ([]tensor.Tensor, error) {
		if len(it.Tensors) > 0 && it.Tensors[0].Name == "panic" {
			panic("before")
		}
		return tensors(c, it)
	}, func(_ *Call, out []tensor.Tensor) (tensor.Item, error) {
		if out[0].Name == "late" {
			panic("after")
		}
		return tensor.Item{Tensors: out}, nil
	}))
	calls := []*Call{named("a", "b"), named("c", "bad"), canceled, text, named("panic"), named(), named("late"), named("d")}
	results := infer(t.Context(), calls)
	for i, want := range []struct {
		code task.Code
		text string
	}{
		{task.OK, "[a b]"},
		{task.BadInput, "item 1: wrong shape"},
		{task.Canceled, "context canceled"},
		{task.BadInput, `item 0: content type "text/plain", want tensors: {"inputs":[{"name","datatype","shape","data"}]}`},
		{task.Failed, "the function panicked: before"},
		{task.OK, "[]"},
		{task.Failed, "the function panicked: after"},
		{task.OK, "[d]"},
	} {
		got, of := task.OK, []string{}
		for _, it := range results[i].Output {
			of = append(of, it.Tensors[0].Name)
		}
		what := fmt.Sprint(of)
		if err := results[i].Err; err != nil {
			got, what = code(err), err.Error()
		}
		if got != want.code || what != want.text {
			t.Errorf("call %d: %v %q, want %v %q", i, got, what, want.code, want.text)
		}
	}
	if len(ran) != 1 || ran[0] != 6 {
		t.Errorf("runs of %v sets, want one of 6", ran)
	}
}

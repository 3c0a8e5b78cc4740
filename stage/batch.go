package stage

import (
	"context"

	"github.com/stagecoach-serving/stagecoach/stage/join"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// MostTogether is the MaxBatch of stages that run a model for all calls of a batch together. The
// annotation stagecoach.dev/batch can only lower it.
const MostTogether = 256

// Work is what a call asks of its stage's model.
type Work struct {
	// Sets are the inputs of the model, one set per run that the call would need on its own.
	Sets [][]tensor.Tensor
	// Answer makes the call's answer from the results of the sets, in order. Its error is the call's
	// error.
	Answer func(of []join.Result) (tensor.Activation, error)
}

// Together makes an Infer hook that runs the model for all calls of a batch together. prepare turns
// a call into work; run computes the sets of all calls, as [join.Runner.Run] does. An error or a
// panic of prepare or Answer is the error of its call alone.
func Together(run func(sets [][]tensor.Tensor) []join.Result, prepare func(c *Call) (Work, error)) func(context.Context, []*Call) []Result {
	return func(_ context.Context, calls []*Call) []Result {
		out, works := make([]Result, len(calls)), make([]Work, len(calls))
		var sets [][]tensor.Tensor
		for i, c := range calls {
			if works[i], out[i].Err = one(prepare, c); out[i].Err == nil {
				sets = append(sets, works[i].Sets...)
			}
		}
		results := run(sets)
		for i, c := range calls {
			if out[i].Err != nil {
				continue
			}
			n := len(works[i].Sets)
			out[i].Output, out[i].Err = one(func(*Call) (tensor.Activation, error) { return works[i].Answer(results[:n:n]) }, c)
			results = results[n:]
		}
		return out
	}
}

package main

import (
	"context"
	"io"

	"github.com/stagecoach-serving/stagecoach/sim/simulate"
)

// evaluate runs the commands of the evaluation. evaluation.go sets it in builds that have the
// evaluation.
var evaluate simulate.Evaluation

// runSimulator runs `stagecoach sim`, with the evaluation if this build has it.
func runSimulator(ctx context.Context, args []string, out io.Writer) error {
	return simulate.Run(ctx, args, out, evaluate)
}

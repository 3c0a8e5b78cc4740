package main

import (
	"context"
	"io"

	"github.com/stagecoach-serving/stagecoach/sim/simulate"
)

// evaluate is set in builds with the evaluation, by evaluation.go.
var evaluate simulate.Evaluation

// runSimulator runs `stagecoach sim`, with the evaluation if this build has it.
func runSimulator(ctx context.Context, args []string, out io.Writer) error {
	return simulate.Run(ctx, args, out, evaluate)
}

package main

import (
	"context"
	"io"
)

// evaluate is set in builds with the evaluation, by evaluation.go.
var evaluate evaluation

// runSimulator runs `stagecoach sim`, with the evaluation if this build has it.
func runSimulator(ctx context.Context, args []string, out io.Writer) error {
	return runSim(ctx, args, out, evaluate)
}

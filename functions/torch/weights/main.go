// Command weights makes the parameters of functions/torch/transformer: random numbers, in a size
// that a user wants to try.
//
//	weights [--stages 8] [--stage-size 8M] [--dtype F32] [--seed 1] FOLDER
//
// FOLDER gets one file per stage, 1.safetensors and so on. Existing files are not made again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/stagecoach-serving/stagecoach/functions/torch/synthetic"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := run(ctx, os.Args[1:], os.Stdout); {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "weights:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("weights", flag.ContinueOnError)
	stages := flags.Int("stages", 8, "number of stages of the model")
	size := flags.String("stage-size", "8M", "size of the parameters of each stage in bytes, or with M or G: 700M, 5.4G")
	dtype := flags.String("dtype", "F32", "their datatype: F32 or BF16")
	seed := flags.Uint64("seed", 1, "seed of the random numbers")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return fmt.Errorf("%d arguments, want FOLDER", flags.NArg())
	}
	bytes, err := synthetic.ParseSize(*size)
	if err != nil {
		return fmt.Errorf("--stage-size: %w", err)
	}
	t, err := synthetic.Of(*stages, bytes, safetensors.Dtype(*dtype))
	if err != nil {
		return err
	}
	all, least, most := t.Sizes()
	fmt.Fprintf(out, "weights: %d stages of %d blocks, %d wide, %s: %.1f to %.1f MB each, %.1f MB together; random and untrained\n",
		t.Stages, t.Blocks, t.Width, t.Dtype, float64(least)/1e6, float64(most)/1e6, float64(all)/1e6)
	return t.Write(ctx, flags.Arg(0), *seed, func(path string, done int64) {
		if done > 0 {
			fmt.Fprintf(out, "weights: %s\n", path)
		}
	})
}

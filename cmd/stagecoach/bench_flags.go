package main

import (
	"flag"
	"io"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/bench"
)

// reportFlags adds the flags that every bench takes.
func reportFlags(fs *flag.FlagSet) (asJSON *bool, images *string) {
	return fs.Bool("json", false, "print JSON instead of a table"), fs.String("images", "build/images", "the functions' images")
}

// printReport prints a report as a table or as JSON.
func printReport(r *bench.Report, asJSON bool, out io.Writer) error {
	if asJSON {
		return r.WriteJSON(out)
	}
	return r.WriteTable(out)
}

// median returns the median of at least one figure. For an even number of figures, it is the mean
// of the two in the middle.
func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// orNaN returns a quantile, or NaN if the sample is too small to have it.
func orNaN(q *float64) float64 {
	if q == nil {
		return math.NaN()
	}
	return *q
}

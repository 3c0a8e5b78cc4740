package main

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// off returns the error of a prediction in the goal's unit: more than 1 misses the goal. The goal
// is a quarter of the value or of a service time, whichever is more.
func off(predicted, simulated float64) float64 {
	return (predicted - simulated) / max(simulated/4, 0.25)
}

// write prints all tables.
func write(out io.Writer, cells []Cell) error {
	var b strings.Builder
	b.WriteString("### Gamma gaps: p50 and p95\n\n")
	full(&b, cells)
	for _, kind := range []string{"gamma", "hyperexponential", "modulated"} {
		for _, fixed := range []bool{false, true} {
			service := "exponential services"
			if fixed {
				service = "fixed services"
			}
			fmt.Fprintf(&b, "\n### Largest errors: %s gaps, %s\n\n", kind, service)
			worst(&b, cells, kind, fixed)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// worst writes the largest errors per CV and load, in percent of the simulated value, or of a
// service time if that is more.
func worst(b *strings.Builder, cells []Cell, kind string, fixed bool) {
	b.WriteString("| CV | load | model p50 | model p95 | before p50 | before p95 | Allen-Cunneen p50 | Allen-Cunneen p95 |\n|---|---|---|---|---|---|---|---|\n")
	for _, cv := range cvs {
		for _, load := range loads {
			var errs [6]float64
			found := false
			for _, c := range cells {
				if c.Gaps != kind || c.Fixed != fixed || c.CV != cv || c.Load != load {
					continue
				}
				found = true
				for i, e := range []float64{
					off(c.P50.Model, c.P50.Simulated), off(c.P95.Model, c.P95.Simulated),
					off(c.P50.Before, c.P50.Simulated), off(c.P95.Before, c.P95.Simulated),
					off(c.P50.AllenCunneen, c.P50.Simulated), off(c.P95.AllenCunneen, c.P95.Simulated),
				} {
					if math.Abs(e) > math.Abs(errs[i]) {
						errs[i] = e
					}
				}
			}
			if !found {
				continue
			}
			fmt.Fprintf(b, "| %g | %g |", cv, load)
			for _, e := range errs {
				fmt.Fprintf(b, " %+.0f %% |", 25*e)
			}
			b.WriteString("\n")
		}
	}
}

// full writes every cell of gamma gaps with exponential services.
func full(b *strings.Builder, cells []Cell) {
	b.WriteString("| CV | load |")
	for _, n := range servers {
		fmt.Fprintf(b, " c = %d |", n)
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", len(servers)) + "\n")
	for _, cv := range cvs {
		for _, load := range loads {
			row := ""
			for _, c := range cells {
				if c.Gaps == "gamma" && !c.Fixed && c.CV == cv && c.Load == load {
					row += fmt.Sprintf(" %s; %s |", c.P50, c.P95)
				}
			}
			if row != "" {
				fmt.Fprintf(b, "| %g | %g |%s\n", cv, load, row)
			}
		}
	}
}

// String returns the simulated value with its interval, and the prediction.
func (p Predicted) String() string {
	return fmt.Sprintf("%.3g ± %.2g, %.3g", p.Simulated, p.Half, p.Model)
}

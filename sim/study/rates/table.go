package main

import (
	"fmt"
	"io"
	"strings"
)

// write prints all tables as Markdown.
func write(out io.Writer, t tables) error {
	var b strings.Builder
	for _, kind := range []string{"step", "ramp", "spike"} {
		fmt.Fprintf(&b, "### After a %s\n\n| CV | rate |", kind)
		of := factors
		if kind == "spike" {
			of = []float64{1}
		}
		for _, f := range of {
			if kind == "spike" {
				b.WriteString(" within the goal |")
				continue
			}
			fmt.Fprintf(&b, " × %g |", f)
		}
		b.WriteString("\n|---|---|" + strings.Repeat("---|", len(of)) + "\n")
		for _, cv := range cvs {
			for _, r := range rates {
				fmt.Fprintf(&b, "| %g | %g |", cv, r)
				for _, f := range of {
					c := t.of(kind, cv, r, f)
					fmt.Fprintf(&b, " %.0f → %.0f", 100*c.Before.Within, 100*c.Now.Within)
					if kind == "step" {
						fmt.Fprintf(&b, " (%.0f → %.0f s)", c.Before.Seconds, c.Now.Seconds)
					}
					b.WriteString(" |")
				}
				b.WriteString("\n")
			}
		}
		b.WriteString("\n")
	}
	b.WriteString("### Steady rates\n\n| CV | rate | error before | error now | changes reported per hour | measured CV |\n|---|---|---|---|---|---|\n")
	for _, s := range t.Steady {
		fmt.Fprintf(&b, "| %g | %g | %.0f %% | %.0f %% | %.2f | %.2f |\n", s.CV, s.Rate, 100*s.Before, 100*s.Now, s.FalseHr, s.CVs)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// of returns one change.
func (t *tables) of(kind string, cv, r, factor float64) change {
	for _, c := range t.Changes {
		if c.Kind == kind && c.CV == cv && c.Rate == r && c.Factor == factor {
			return c
		}
	}
	return change{}
}

package cv

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// WriteMarkdown writes scores as two tables: the errors of the contenders, and how much larger
// these errors are than those of persistence. It leaves out groups with fewer than two runs.
func WriteMarkdown(w io.Writer, contenders []Contender, scores []Score) error {
	var b strings.Builder
	head := func() {
		b.WriteString("| stations | runs |")
		for _, c := range contenders {
			fmt.Fprintf(&b, " %s |", c.Name)
		}
		fmt.Fprintf(&b, "\n|---|---|%s\n", strings.Repeat("---|", len(contenders)))
	}
	b.WriteString("Mean |ln(predicted CV / measured CV)|, and mean relative error of the CV:\n\n")
	head()
	scores = slices.DeleteFunc(slices.Clone(scores), func(s Score) bool { return s.Runs < 2 })
	for _, s := range scores {
		fmt.Fprintf(&b, "| %s | %d |", s.Group, s.Runs)
		for _, e := range s.By {
			fmt.Fprintf(&b, " %s, %.1f %% |", estimate(e.Log), 100*e.Relative.Mean)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nThe former less that of %s, run by run:\n\n", contenders[reference].Name)
	head()
	for _, s := range scores {
		fmt.Fprintf(&b, "| %s | %d |", s.Group, s.Runs)
		for _, e := range s.By {
			fmt.Fprintf(&b, " %s |", signed(e.Versus))
		}
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func estimate(e sim.Estimate) string { return fmt.Sprintf("%.3f ± %.3f", e.Mean, e.CI) }
func signed(e sim.Estimate) string   { return fmt.Sprintf("%+.4f ± %.4f", e.Mean, e.CI) }

package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Explain says why the stages of a pipeline have their sizes.
func Explain(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("explain", flag.ContinueOnError)
	flags := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	name, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	api, err := flags.open("")
	if err != nil {
		return err
	}
	var x schema.Explanation
	if err := api.Get(ctx, "/system/pipelines/"+url.PathEscape(name)+"/explain"+flags.query(), &x); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(x)
	}
	return showExplanation(x, out)
}

func showExplanation(x schema.Explanation, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintf(t, "Pipeline:\t%s\n", x.Pipeline)
	if x.SLO != "" {
		fmt.Fprintf(t, "SLO:\t%s\n", x.SLO)
	}
	measured := cmp.Or(x.Measured, "a stage has no data yet")
	if x.Met != nil {
		measured += map[bool]string{true: ", met", false: ", not met"}[*x.Met]
	}
	fmt.Fprintf(t, "Measured:\t%s\n", measured)
	if !x.At.IsZero() {
		names := []string{x.Policies.Allocator, x.Policies.Corrector, x.Policies.Sharer, x.Policies.Placer, x.Policies.Warmer}
		fmt.Fprintf(t, "Decided:\t%s by %s\n", x.At.UTC().Format(time.TimeOnly), strings.Join(names, ", "))
		if x.Policies.Rank != "" {
			fmt.Fprintf(t, "Rank:\t%s\nRoute:\t%s\n", x.Policies.Rank, x.Policies.Route)
		}
	}
	if x.Policies.Price > 0 {
		fmt.Fprintf(t, "Price:\t%g replica-seconds per second of latency\n", x.Policies.Price)
	}
	if x.Budget > 0 {
		fmt.Fprintf(t, "Budget:\t%d of %d replicas of all functions\n", x.Wanted, x.Budget)
	}
	for _, n := range x.Notes {
		fmt.Fprintf(t, "Note:\t%s\n", n)
	}
	rows := explainedRows(x.Stages)
	showReplicas(rows, t)
	if err := t.Flush(); err != nil {
		return err
	}
	if err := showModel(rows, out); err != nil {
		return err
	}
	t = console.NewTable(out)
	fmt.Fprintln(t, "\nSTAGE\tWHY")
	for _, st := range rows {
		fmt.Fprintf(t, "%s\t%s\n", st.Name, strings.Join(folded(st.Why, whyWidth), "\n\t"))
		if st.Barred != "" {
			fmt.Fprintf(t, "\t%s\n", st.Barred)
		}
		for _, line := range st.Bounded {
			fmt.Fprintf(t, "\t%s\n", line)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return showRoutes(x.Stages, out)
}

// showReplicas prints what the stages have and do.
func showReplicas(rows []schema.ExplainedStage, out io.Writer) {
	fmt.Fprintln(out, "\nSTAGE\tREPLICAS\tWANTED\tKEY\tBUSY\tWAITING\tWAIT\tCPU")
	for _, st := range rows {
		cpu := "as declared"
		if st.CPUMilli > 0 {
			cpu = fmt.Sprintf("%dm", st.CPUMilli)
		}
		replicas := fmt.Sprint(st.Ready)
		if st.Starting > 0 {
			replicas += fmt.Sprintf("+%d", st.Starting)
		}
		fmt.Fprintf(out, "%s\t%s\t%d of %d-%d\t%t\t%s\t%d\t%s\t%s\n", st.Name, replicas, st.Wanted, st.Min, st.Max, st.Key,
			unknownOr("%.0f%%", st.Busy, 100), st.Waiting, cmp.Or(st.Wait, "?"), cpu)
	}
}

// showModel prints the model's inputs, and what it predicts from them for the ready replicas.
func showModel(rows []schema.ExplainedStage, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintln(t, "\nSTAGE\tRATE\tSINCE\tCV\tSERVICE\tBATCH\tBATCH TIME\tLOAD\tPREDICTED\tMEASURED\tERROR")
	for _, st := range rows {
		batch := "?"
		if st.Batch > 0 {
			batch = fmt.Sprint(st.Batch)
		}
		since := "?"
		if st.RateSince != nil {
			since = st.RateSince.UTC().Format(time.TimeOnly)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", st.Name, unknownOr("%.1f/s", st.Rate, 1), since, unknownOr("%.1f", st.CV, 1),
			cmp.Or(st.Service, "?"), batch, cmp.Or(st.BatchTime, "?"), unknownOr("%.2f", st.Load, 1), cmp.Or(st.Predicted, "?"),
			cmp.Or(st.Stayed, "?"), cmp.Or(st.NoPrediction, unknownOr("%+.0f%%", st.Error, 100)))
	}
	return t.Flush()
}

// showRoutes prints the routing tables of the stages that have one.
func showRoutes(stages []schema.ExplainedStage, out io.Writer) error {
	t := console.NewTable(out)
	if slices.ContainsFunc(stages, func(st schema.ExplainedStage) bool { return st.Table != nil }) {
		fmt.Fprintln(t, "\nSTAGE\tFROM\tLENGTH\tGO TO\tBACKUPS\tIF FULL")
	}
	for _, st := range stages {
		if st.Table == nil {
			continue
		}
		for _, r := range st.Table.Rows {
			for _, l := range r.Levels {
				length := "any"
				if l.MaxLength > 0 {
					length = fmt.Sprintf("up to %d", l.MaxLength)
				}
				if l.Part != nil {
					length += fmt.Sprintf(" (%.0f%%)", 100**l.Part)
				}
				var shares []string
				for _, s := range l.Shares {
					shares = append(shares, fmt.Sprintf("%s %.0f%%", s.Lane, 100*s.Part))
				}
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", st.Name, strings.Join(r.From, ", "), length, strings.Join(shares, ", "),
					cmp.Or(strings.Join(l.Backups, ", "), "none"), cmp.Or(l.Overflow, "wait"))
			}
		}
	}
	return t.Flush()
}

// explainedRows returns the stages, each followed by its variants with indented names.
func explainedRows(stages []schema.ExplainedStage) (rows []schema.ExplainedStage) {
	for _, st := range stages {
		rows = append(rows, st)
		for _, v := range st.Variants {
			v.Name = "  " + v.Name
			rows = append(rows, v)
		}
	}
	return rows
}

// whyWidth is the width of a reason in the table, in bytes.
const whyWidth = 100

// folded breaks a reason between its terms into lines of at most width bytes. A longer term has a
// line of its own.
func folded(why string, width int) []string {
	var lines []string
	for i, term := range strings.Split(why, "; ") {
		last := len(lines) - 1
		switch {
		case i == 0:
			lines = append(lines, term)
		case len(lines[last])+len(term) < width:
			lines[last] += "; " + term
		default:
			lines[last] += ";"
			lines = append(lines, term)
		}
	}
	return lines
}

// unknownOr formats the product of a number and a factor, such as 1000 for ms. If the number is
// nil, the result is "?".
func unknownOr(format string, v *float64, times float64) string {
	if v == nil {
		return "?"
	}
	return fmt.Sprintf(format, *v*times)
}

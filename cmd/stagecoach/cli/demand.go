package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Demand is `stagecoach demand`.
func Demand(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || args[0] != "describe" {
		return fmt.Errorf("demand: got %q, want describe NAME", args)
	}
	fs := flag.NewFlagSet("demand describe", flag.ContinueOnError)
	flags := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	name, err := console.OneName(fs, args[1:])
	if err != nil {
		return err
	}
	api, err := flags.open("")
	if err != nil {
		return err
	}
	var d schema.Demand
	if err := api.Get(ctx, "/system/demand/"+url.PathEscape(name)+flags.query(), &d); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(d)
	}
	return showDemand(d, out)
}

func showDemand(d schema.Demand, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintf(t, "Application:\t%s\n", d.App)
	if !d.Last.IsZero() {
		fmt.Fprintf(t, "Requests:\t%s, each halved per hour of age; the latest ended %s\n", figure(d.Requests), d.Last.UTC().Format(time.DateTime))
		fmt.Fprintf(t, "Memory:\t%.1f KiB\n", float64(d.Bytes)/1024)
	}
	for _, n := range d.Notes {
		fmt.Fprintf(t, "Note:\t%s\n", n)
	}
	if err := t.Flush(); err != nil || len(d.Stages) == 0 {
		return err
	}
	fmt.Fprintln(out)
	t = console.NewTable(out)
	fmt.Fprintln(t, "STAGE\tPER REQUEST\tFUNCTION\tBATCH\tCALLS\tITEMS IN\tITEMS OUT\tPER ITEM\tCV\tP50\tP95\tP99")
	for _, s := range d.Stages {
		for _, l := range s.Lanes {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, figure(s.PerRequest), l.Function, figure(l.Batch), figure(l.Work.Calls), figure(l.Given), figure(l.Returned),
				work(l.Work.Mean), figure(l.Work.CV), work(l.Work.P50), work(l.Work.P95), work(l.Work.P99))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	showNext(d, out)
	return showLengths(d, out)
}

func showNext(d schema.Demand, out io.Writer) {
	if !slices.ContainsFunc(d.Stages, func(s schema.DemandStage) bool { return len(s.Next) > 0 }) {
		return
	}
	fmt.Fprintln(out)
	t := console.NewTable(out)
	fmt.Fprintln(t, "FROM\tTO\tPROBABILITY\tITEMS PER ITEM\tCALLS\tLATEST")
	for _, s := range d.Stages {
		for _, n := range s.Next {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t\t\n", s.Name, n.Stage, figure(n.Probability), figure(n.Factor))
			for _, v := range n.Variants {
				fmt.Fprintf(t, "  %s\t\t\t%s\t%s\t%s\n", v.Function, figure(v.Factor), figure(v.Calls), v.Last.UTC().Format(time.DateTime))
			}
		}
	}
	_ = t.Flush() // a later write to the same output reports the fault
}

func showLengths(d schema.Demand, out io.Writer) error {
	if !slices.ContainsFunc(d.Stages, func(s schema.DemandStage) bool { return s.Length.Calls > 0 }) {
		return nil
	}
	fmt.Fprintln(out)
	t := console.NewTable(out)
	fmt.Fprintln(t, "STAGE\tMEAN LENGTH\tP50\tP95\tP99")
	for _, s := range d.Stages {
		if l := s.Length; l.Calls > 0 {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Name, figure(l.Mean), figure(l.P50), figure(l.P95), figure(l.P99))
		}
	}
	return t.Flush()
}

// figure shows a number with three digits.
func figure(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// work shows seconds as a duration with three digits.
func work(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	unit := time.Duration(1)
	for unit*1000 <= d {
		unit *= 10
	}
	return d.Round(unit).String()
}

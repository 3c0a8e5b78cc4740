package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// Pipeline lists and describes pipelines.
func Pipeline(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || args[0] != "list" && args[0] != "describe" {
		return fmt.Errorf("pipeline: got %q, want list or describe NAME", args)
	}
	fs := flag.NewFlagSet("pipeline "+args[0], flag.ContinueOnError)
	flags := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	rest, err := console.ParseMixed(fs, args[1:])
	if err != nil {
		return err
	}
	api, err := flags.open("")
	if err != nil {
		return err
	}
	if args[0] == "list" {
		var all []provider.PipelineStatus
		if err := api.Get(ctx, "/system/pipelines"+flags.query(), &all); err != nil {
			return err
		}
		if *asJSON {
			// The copy makes it [], not null, if there is none.
			return json.NewEncoder(out).Encode(append([]provider.PipelineStatus{}, all...))
		}
		t := console.NewTable(out)
		fmt.Fprintln(t, "PIPELINE\tNAMESPACE\tREADY\tSTAGES\tENTRY\tSLO")
		for _, p := range all {
			fmt.Fprintf(t, "%s\t%s\t%t\t%d\t%s\t%s\n", p.Name, p.Namespace, p.Ready, len(p.Stages), p.Entry, p.SLO)
		}
		return t.Flush()
	}
	if len(rest) != 1 {
		return fmt.Errorf("pipeline describe: got %q, want one name", rest)
	}
	var p provider.PipelineStatus
	if err := api.Get(ctx, "/system/pipelines/"+url.PathEscape(rest[0])+flags.query(), &p); err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(out).Encode(p)
	}
	return describePipeline(p, out)
}

func describePipeline(p provider.PipelineStatus, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintf(t, "Pipeline:\t%s.%s\nReady:\t%t\nEntry:\t%s\nSLO:\t%s\n\nSTAGE\tREPLICAS\tEACH\tNEXT\tSTATUS\n", p.Name, p.Namespace, p.Ready, p.Entry, p.SLO)
	for _, s := range p.Stages {
		var next []string
		for _, e := range s.Next {
			next = append(next, e.To)
		}
		status := s.Status
		if s.Retained {
			status = "its own function was removed"
		}
		fmt.Fprintf(t, "%s\t%d/%d\t%t\t%s\t%s\n", s.Name, s.AvailableReplicas, s.Replicas, s.Each, strings.Join(next, ", "), status)
		for _, v := range s.Variants {
			fmt.Fprintf(t, "  %s\t%d/%d\t\t\t%s\n", v.Title(), v.AvailableReplicas, v.Replicas, v.Status)
		}
	}
	describeChains(p, t)
	for _, f := range p.Faults {
		fmt.Fprintf(t, "\nFault:\tfunction %q, %s: got %s, want %s\n", f.Function, f.Annotation, f.Got, f.Want)
	}
	for _, f := range p.Warnings {
		fmt.Fprintf(t, "\nWarning:\tfunction %q, %s: got %s, want %s\n", f.Function, f.Annotation, f.Got, f.Want)
	}
	return t.Flush()
}

// shownChains is the largest number of chains that describe lists; --json has all.
const shownChains = 32

// describeChains lists the chains of functions through a pipeline, with their accuracy.
func describeChains(p provider.PipelineStatus, out io.Writer) {
	if len(p.Chains) == 0 {
		return
	}
	fmt.Fprintf(out, "\nCHAIN\tACCURACY\tFROM\n")
	for i := range p.Chains[:min(len(p.Chains), shownChains)] {
		c := &p.Chains[i]
		fmt.Fprintf(out, "%s\t%.4g\t%s\n", strings.Join(c.Functions, " → "), c.Accuracy, c.Source())
	}
	if more := len(p.Chains) - shownChains; more > 0 {
		fmt.Fprintf(out, "and %d more (--json)\n", more)
	}
}

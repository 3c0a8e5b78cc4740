// Package decide is `stagecoach decide`: it makes one decision about a problem in a file.
package decide

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/problem"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// badProblem is the exit status for a problem with wrong fields.
const badProblem = 2

// Result is the output of --json.
type Result struct {
	Version   int                `json:"version"` // of this form
	Problem   string             `json:"problem,omitempty"`
	Policies  policy.Names       `json:"policies"` // including the defaults
	Decisions []problem.Decision `json:"decisions"`
}

// resultVersion is the version of the JSON form.
const resultVersion = 1

// Run is `stagecoach decide`. It writes the decision to out. A problem with wrong fields has the
// exit status 2, see [console.StatusOf].
func Run(_ context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("decide", flag.ContinueOnError)
	asJSON := console.JSONFlag(fs)
	steps := fs.Int("steps", 1, "decisions in a row, each with the memory of the one before")
	var over policy.Names
	overrides(fs, &over)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return fmt.Errorf("decide: got %q, want one problem: `stagecoach decide PROBLEM.yml`", rest)
	}
	if _, err := over.Choose(); err != nil {
		return fmt.Errorf("decide: %w", err)
	}
	if *steps < 1 || *steps > problem.MaxSteps {
		return fmt.Errorf("decide: --steps: got %d, want 1 to %d", *steps, problem.MaxSteps)
	}
	p, err := read(rest[0])
	if err != nil {
		return err
	}
	names := chosen(fs, p.Policies, over)
	began := time.Now()
	decisions, err := p.Decide(names, *steps, func() time.Duration { return time.Since(began) })
	if err != nil {
		return fmt.Errorf("decide %s: %w", rest[0], err)
	}
	set, err := names.Choose() // for the defaults
	if err != nil {
		return err
	}
	r := Result{Version: resultVersion, Problem: p.Name, Policies: set.Names(), Decisions: decisions}
	if *asJSON {
		return console.WriteJSON(out, r)
	}
	return r.write(out)
}

// overrides adds the flags that replace the problem's policies.
func overrides(fs *flag.FlagSet, n *policy.Names) {
	for _, f := range policyFlags(n) {
		fs.StringVar(f.name, f.level, "", f.usage)
	}
	fs.Float64Var(&n.Price, "price", 0, "replica-seconds that a second of a request's latency is worth; 0: nothing")
}

// policyFlag is a flag for the policy of one level.
type policyFlag struct {
	level string
	name  *string
	usage string
}

func policyFlags(n *policy.Names) []policyFlag {
	return []policyFlag{
		{"allocator", &n.Allocator, "policy that sizes functions, in place of the problem's; see docs/config.md"},
		{"corrector", &n.Corrector, "policy that corrects sizes by what was measured; none leaves it out"},
		{"sharer", &n.Sharer, "policy that trims sizes to what there is; none leaves it out"},
		{"placer", &n.Placer, "policy that chooses nodes: dispersed, spread or first-fit"},
		{"warmer", &n.Warmer, "policy that keeps parameters in memory; none leaves it out"},
		{"rank", &n.Rank, "order of waiting lines: fifo, fair or least-slack"},
		{"route", &n.Route, "policy that routes tasks to the variants of a stage: best or even"},
	}
}

// chosen returns the problem's policies with those of the given flags in their place.
func chosen(fs *flag.FlagSet, of, over policy.Names) policy.Names {
	to, from := policyFlags(&of), policyFlags(&over)
	fs.Visit(func(f *flag.Flag) {
		for i := range to {
			if to[i].level == f.Name {
				*to[i].name = *from[i].name
			}
		}
		if f.Name == "price" {
			of.Price = over.Price
		}
	})
	return of
}

// read reads and checks a problem.
func read(name string) (*problem.Problem, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("decide: %w", err)
	}
	defer f.Close()
	p, err := problem.Read(f)
	if err != nil {
		return nil, console.ExitError{Status: badProblem, Err: fmt.Errorf("decide: %s: %w", name, err)}
	}
	return p, nil
}

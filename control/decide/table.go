package decide

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/problem"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// write writes the last decision as tables, after a line for each decision if there are several.
func (r Result) write(out io.Writer) error {
	t := console.NewTable(out)
	n := r.Policies
	fmt.Fprintf(t, "allocator %s, corrector %s, sharer %s, placer %s, warmer %s, rank %s, route %s", n.Allocator, n.Corrector, n.Sharer, n.Placer, n.Warmer, n.Rank, n.Route)
	if n.Price > 0 {
		fmt.Fprintf(t, ", price %g", n.Price)
	}
	fmt.Fprintln(t)
	if len(r.Decisions) > 1 {
		fmt.Fprintln(t, "\nSTEP\tAT\tREPLICAS\tCOUNTS")
		for _, d := range r.Decisions {
			var counts []string
			for _, l := range d.Functions {
				counts = append(counts, fmt.Sprintf("%s %d", l.Function, l.Count))
			}
			fmt.Fprintf(t, "%d\t%s\t%d\t%s\n", d.Step, seconds(d.At), d.Used.Replicas, strings.Join(counts, ", "))
		}
	}
	last := &r.Decisions[len(r.Decisions)-1]
	writeFunctions(t, last)
	writeTables(t, last)
	writePipelines(t, last)
	writeRest(t, last)
	return t.Flush()
}

func writeFunctions(w io.Writer, d *problem.Decision) {
	fmt.Fprintln(w, "\nFUNCTION\tREPLICAS\tCPU\tBATCH\tSHARE\tCALLS/S\tBUSY\tWAIT\tSOJOURN\tNODES")
	for _, l := range d.Functions {
		cpu := "-"
		if l.CPUMilli > 0 {
			cpu = fmt.Sprintf("%dm", l.CPUMilli)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%.3g\t%.4g\t%.3g\t%s\t%s\t%s\n", l.Function, l.Count, cpu, l.Batch, l.Share, l.Rate, l.Busy, seconds(l.Wait), seconds(l.Sojourn), nodes(l.Nodes))
	}
	fmt.Fprintln(w, "\nFUNCTION\tWHY")
	for _, l := range d.Functions {
		fmt.Fprintf(w, "%s\t%s\n", l.Function, l.Why)
		if l.Short != "" {
			fmt.Fprintf(w, "%s\tshort: %s\n", l.Function, l.Short)
		}
	}
}

// nodes returns the places of replicas, sorted, with how many are at each.
func nodes(all []string) string {
	all = slices.Sorted(slices.Values(all))
	var out []string
	for i := 0; i < len(all); {
		n := 1
		for i+n < len(all) && all[i+n] == all[i] {
			n++
		}
		text := all[i]
		if n > 1 {
			text += fmt.Sprintf(" ×%d", n)
		}
		out, i = append(out, text), i+n
	}
	return cmp.Or(strings.Join(out, ", "), "-")
}

func writeTables(w io.Writer, d *problem.Decision) {
	if len(d.Tables) > 0 {
		fmt.Fprintln(w, "\nSTAGE\tFROM\tLENGTH\tPARTS\tBACKUPS\tOVERFLOW")
	}
	for _, t := range d.Tables {
		for _, r := range t.Rows {
			length, parts := "any", []string{}
			if r.MaxLength > 0 {
				length = fmt.Sprintf("≤ %d", r.MaxLength)
			}
			for _, s := range r.Shares {
				parts = append(parts, fmt.Sprintf("%s %.3g", s.Function, s.Part))
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", t.Stage, r.From, length, strings.Join(parts, ", "), cmp.Or(strings.Join(r.Backups, ", "), "-"), cmp.Or(r.Overflow, "-"))
		}
	}
	for _, c := range d.Excluded {
		fmt.Fprintf(w, "excluded: %s\n", strings.Join(c, " > "))
	}
}

func writePipelines(w io.Writer, d *problem.Decision) {
	fmt.Fprintln(w, "\nPIPELINE\tREQUESTS/S\tOBJECTIVE\tSERVICE\tWAIT\tSOJOURN\tMET\tACCURACY")
	for _, p := range d.Pipelines {
		slo, met := "-", "-"
		if p.SLO > 0 {
			slo = seconds(p.SLO)
		}
		if p.Met != nil {
			met = map[bool]string{true: "yes", false: "no"}[*p.Met]
		}
		if len(p.Unknown) > 0 {
			met = "? (unknown: " + strings.Join(p.Unknown, ", ") + ")"
		}
		fmt.Fprintf(w, "%s\t%.4g\t%s\t%s\t%s\t%s\t%s\t%.4g\n", p.Pipeline, p.Rate, slo, seconds(p.Service), seconds(p.Wait), seconds(p.Sojourn), met, p.Accuracy)
	}
}

func writeRest(w io.Writer, d *problem.Decision) {
	budget := "no bound"
	if d.Used.Budget > 0 {
		budget = "of " + strconv.Itoa(d.Used.Budget)
	}
	fmt.Fprintf(w, "\nused: %d replicas (%s), %dm of CPU, %s of memory, %d devices, on %d nodes\n",
		d.Used.Replicas, budget, d.Used.CPUMilli, plan.Size(d.Used.Memory), d.Used.Devices, d.Used.Nodes)
	for _, x := range d.Warm {
		fmt.Fprintf(w, "parameters: %s on %s, %s\n", x.Function, x.Node, x.Warmth)
	}
	for _, r := range d.Ruled {
		fmt.Fprintf(w, "entry stages of %s's domain chose: allocator %s, rank %s, route %s\n", r.Domain, r.Chosen.Allocator, r.Chosen.Rank, r.Chosen.Route)
		for _, c := range r.Conflicts {
			fmt.Fprintf(w, "they ask for different policies (%s): %s; kept %s\n", c.Level, strings.Join(c.Asked, ", "), c.Kept)
		}
	}
	for _, h := range d.Held {
		fmt.Fprintf(w, "held: %s: %s\n", strings.Join(h.Functions, ", "), h.Error)
	}
	fmt.Fprintf(w, "decided in %s\n", seconds(d.Took))
}

// seconds formats a time with about three digits.
func seconds(s float64) string {
	d := time.Duration(math.Round(s * float64(time.Second)))
	for unit := time.Second; unit > time.Nanosecond; unit /= 10 {
		if d >= unit {
			return d.Round(max(unit/100, 1)).String()
		}
	}
	return d.String()
}

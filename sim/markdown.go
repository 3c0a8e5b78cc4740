package sim

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// WriteMarkdown writes the result as Markdown: a table of all policies, a table of their
// differences from the first policy, and one table of stages per policy.
func (r Result) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n", text(r.Scenario))
	fmt.Fprintf(&b, "Simulated: %v of arrivals", seconds(r.Duration))
	if r.Warmup > 0 {
		fmt.Fprintf(&b, ", the first %v not counted", seconds(r.Warmup))
	}
	if r.Seeds > 1 {
		fmt.Fprintf(&b, "; seeds %d to %d, ± is half of the 95 %% confidence interval over them", r.Seed, r.Seed+uint64(r.Seeds)-1)
	} else {
		fmt.Fprintf(&b, "; seed %d", r.Seed)
	}
	b.WriteString(".\n\n")
	for _, p := range r.Pipelines {
		fmt.Fprintf(&b, "- %s: %s", text(p.Name), p.Arrivals)
		if p.SLO > 0 {
			fmt.Fprintf(&b, "; objective %v", seconds(p.SLO))
		}
		b.WriteString("\n")
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "- Note: %s\n", text(note))
	}
	r.policies(&b)
	r.versus(&b)
	for _, p := range r.Policies {
		p.stages(&b, r.Seeds)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r Result) policies(b *strings.Builder) {
	columns := []string{"policy", "pipeline", "requests", "in time", "mean", "p50", "p95", "p99", "failed", "replicas", "replica-seconds"}
	accuracy := r.declaresAccuracy()
	if accuracy {
		columns = append(columns, "accuracy")
	}
	header(b, columns...)
	for _, p := range r.Policies {
		for _, x := range p.Pipelines {
			cells := []string{
				text(p.Name), text(x.Name), x.Offered.plain(), x.Attainment.percent(), x.Mean.time(), x.P50.time(), x.P95.time(), x.P99.time(),
				x.Failed.percent(), p.Replicas.plain(), p.ReplicaSeconds.plain(),
			}
			if accuracy {
				cells = append(cells, x.Accuracy.plain())
			}
			row(b, cells...)
		}
	}
	for _, p := range r.Policies {
		for _, x := range p.Pipelines {
			if len(x.Failures) > 0 {
				fmt.Fprintf(b, "\n%s, %s: failed with %s, in all.\n", text(p.Name), text(x.Name), counts(x.Failures))
			}
			if len(x.Drops) > 0 {
				fmt.Fprintf(b, "\n%s, %s: dropped as %s, in all.\n", text(p.Name), text(x.Name), counts(x.Drops))
			}
		}
		if p.Held.Mean > 0 || p.Refused.Mean > 0 {
			fmt.Fprintf(b, "\n%s: of %s ticks a run %s had no plan, and %s domains were held; the first time: %s\n",
				text(p.Name), p.Ticks.plain(), p.Refused.plain(), p.Held.plain(), text(p.Complaint))
		}
	}
}

// declaresAccuracy reports whether answers have an accuracy.
func (r Result) declaresAccuracy() bool {
	return slices.ContainsFunc(r.Policies, func(p PolicyResult) bool {
		return slices.ContainsFunc(p.Pipelines, func(x PipelineResult) bool { return x.Accuracy.Mean > 0 })
	})
}

func (r Result) versus(b *strings.Builder) {
	if len(r.Policies) < 2 {
		return
	}
	fmt.Fprintf(b, "\n## Against %s, seed by seed\n", text(r.Policies[0].Name))
	header(b, "policy", "pipeline", "mean", "p99", "in time", "replica-seconds")
	for _, p := range r.Policies[1:] {
		for _, v := range p.Versus {
			row(b, text(p.Name), text(v.Pipeline), v.Mean.change(), v.P99.change(), strings.TrimSuffix(v.Attainment.change(), " %")+" points", v.ReplicaSeconds.change())
		}
	}
}

func (p PolicyResult) stages(b *strings.Builder, seeds int) {
	fmt.Fprintf(b, "\n## Stages under %s\n", text(p.Name))
	n := p.Policies
	fmt.Fprintf(b, "\nAllocator %s, corrector %s, sharer %s, placer %s, warmer %s, rank %s, route %s",
		n.Allocator, n.Corrector, n.Sharer, n.Placer, n.Warmer, n.Rank, n.Route)
	if n.Price > 0 {
		fmt.Fprintf(b, ", price %g", n.Price)
	}
	b.WriteString(".\n")
	header(b, "stage", "calls/s", "CV of arrivals", "by QNA", "wait", "wait p99", "service", "CV", "busy", "replicas", "most", "starts a run")
	for _, s := range p.Stages {
		starts := []string{}
		for _, path := range slices.Sorted(maps.Keys(s.Starts)) {
			starts = append(starts, fmt.Sprintf("%s %.4g", path, float64(s.Starts[path])/float64(seeds)))
		}
		if s.Evictions > 0 {
			starts = append(starts, fmt.Sprintf("evicted %.4g", float64(s.Evictions)/float64(seeds)))
		}
		if s.Deaths > 0 {
			starts = append(starts, fmt.Sprintf("died %.4g", float64(s.Deaths)/float64(seeds)))
		}
		row(b, text(s.Name), s.Rate.plain(), s.CV.plain(), s.Predicted.plain(), s.Wait.time(), s.WaitP99.time(), s.Service.time(), s.ServiceCV.plain(),
			s.Utilisation.percent(), s.Replicas.plain(), strconv.Itoa(s.Most), strings.Join(starts, ", "))
	}
	p.lanes(b)
	for _, s := range p.Stages {
		if s.Short.Mean > 0 {
			fmt.Fprintf(b, "\n%s had not a place for all of its replicas in %s plans of %s a run; the first time: %s\n", text(s.Name), s.Short.plain(), p.Ticks.plain(), text(s.ShortWhy))
		}
	}
	if p.QNAError.Mean > 0 {
		fmt.Fprintf(b, "\nQNA misses the CV of arrivals behind the entries by %s on average; the entry's own by %s.\n", p.QNAError.percent(), p.SameError.percent())
	}
}

// lanes writes a table of the functions that share a stage with others.
func (p PolicyResult) lanes(b *strings.Builder) {
	begun := false
	for _, s := range p.Stages {
		if s.Lane == nil {
			continue
		}
		if !begun {
			begun = true
			header(b, "stage", "function", "accuracy", "max length", "answered", "share", "service", "replicas")
		}
		longest := "any"
		if s.Lane.MaxLength > 0 {
			longest = strconv.Itoa(s.Lane.MaxLength)
		}
		row(b, text(s.Lane.Stage), text(s.Name), Trim(s.Lane.Accuracy, 4), longest, s.Lane.Tasks.plain(), s.Lane.Share.percent(), s.Service.time(), s.Replicas.plain())
	}
}

func header(b *strings.Builder, columns ...string) {
	b.WriteString("\n")
	row(b, columns...)
	for i := range columns {
		columns[i] = "---"
	}
	row(b, columns...)
}

func row(b *strings.Builder, columns ...string) {
	fmt.Fprintf(b, "| %s |\n", strings.Join(columns, " | "))
}

// text keeps names from breaking tables.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '|' || r < ' ' {
			return ' '
		}
		return r
	}, s)
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * float64(time.Second))) }

func counts(m map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s %d times", k, m[k]))
	}
	return strings.Join(out, ", ")
}

// with formats the mean and its interval, with as many digits as the interval justifies.
func (e Estimate) with(scale float64, unit string) string {
	mean, ci := e.Mean*scale, e.CI*scale
	if ci == 0 {
		return Trim(mean, 4) + unit
	}
	digits := max(1-int(math.Floor(math.Log10(ci))), 0)
	return fmt.Sprintf("%.*f ± %.*f%s", digits, mean, digits, ci, unit)
}

// Trim formats v with this many significant digits and no exponent, for tables.
func Trim(v float64, digits int) string {
	if v == 0 {
		return "0"
	}
	after := max(digits-1-int(math.Floor(math.Log10(math.Abs(v)))), 0)
	s := strconv.FormatFloat(v, 'f', after, 64)
	if after > 0 {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}

func (e Estimate) plain() string   { return e.with(1, "") }
func (e Estimate) percent() string { return e.with(100, " %") }

func (e Estimate) time() string {
	if math.Abs(e.Mean) < 1 {
		return e.with(1000, " ms")
	}
	return e.with(1, " s")
}

func (e Estimate) change() string {
	sign := ""
	if e.Mean > 0 {
		sign = "+"
	}
	return sign + e.with(100, " %")
}

package load

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"
)

// WriteTable prints a result as text.
func (r Result) WriteTable(w io.Writer) error {
	p := &printer{w: w}
	all := r.Targets
	if len(all) > 1 {
		all = append([]Figures{r.Total}, all...)
	}
	for _, f := range r.Targets {
		p.line("%s: %s", f.Name, f.Process)
	}
	p.line("\n%.1f s of arrivals, seed %d, %s\n", r.Duration, r.Seed, r.Gateway)
	p.table("target\toffered\tnot sent\tsent\tanswered\tfailed\tgood\tof offered\toffered/s\tanswered/s\tgood/s\t", func(t io.Writer) {
		for _, f := range all {
			fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%.2f\t%.2f\t%.2f\t\n", f.Name, f.Offered, f.NotSent, f.Sent, f.Answered, f.Failed, f.Good,
				percent(f.Attainment), f.OfferedRate, f.AnsweredRate, f.Goodput)
		}
	})
	p.table("latency\tp50\tp75\tp90\tp95\tp99\tp99.9\tmax\tobjective\t", func(t io.Writer) {
		for _, f := range all {
			writeLatency(t, f.Name, f.Latency, objective(f.SLO))
			writeLatency(t, "  from its sending", f.Service, "")
		}
		writeLatency(t, "lag of the generator", r.Generator.Lag, "")
	})
	for _, f := range all {
		if c := f.Callbacks; c != nil {
			p.line("%s: %d accepted, %d called back, %d duplicates, %d lost\n", f.Name, c.Accepted, c.Called, c.Duplicates, c.Lost)
		}
	}
	for _, f := range r.Targets {
		if len(f.Stages) > 0 {
			p.table("stages of "+f.Name+"\trequests\tcalls\twait, mean\tp50\tp99\tservice, mean\tp50\tp99\t", func(t io.Writer) {
				for _, s := range f.Stages {
					fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", s.Stage, s.Requests, s.Calls, duration(s.Wait.Mean), maybe(s.Wait.P50), maybe(s.Wait.P99),
						duration(s.Service.Mean), maybe(s.Service.P50), maybe(s.Service.P99))
				}
			})
		}
	}
	if len(r.Functions) > 0 {
		p.table("function\treplicas, first\tlargest\tlast\tlongest line\t", func(t io.Writer) {
			for _, f := range r.Functions {
				most, line := 0, 0
				for _, s := range f.Samples {
					most, line = max(most, s.Replicas), max(line, s.Waiting)
				}
				fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t\n", f.Function, f.Samples[0].Replicas, most, f.Samples[len(f.Samples)-1].Replicas, line)
			}
		})
	}
	for _, f := range r.Targets {
		for _, k := range f.Errors {
			p.line("%s: %d × %s: %s", f.Name, k.Count, k.Kind, k.Example)
		}
	}
	for _, warning := range r.Warnings {
		p.line("warning: %s", warning)
	}
	return p.err
}

// WriteComparison prints runs side by side, under the given names.
func WriteComparison(w io.Writer, names []string, runs []Result) error {
	p := &printer{w: w}
	header := "total\t"
	for _, n := range names {
		header += n + "\t"
	}
	p.table(header, func(t io.Writer) {
		row := func(name string, value func(Result) string) {
			fmt.Fprintf(t, "%s\t", name)
			for _, r := range runs {
				fmt.Fprintf(t, "%s\t", value(r))
			}
			fmt.Fprintln(t)
		}
		row("seconds", func(r Result) string { return fmt.Sprintf("%.1f", r.Duration) })
		row("offered/s", func(r Result) string { return fmt.Sprintf("%.2f", r.Total.OfferedRate) })
		row("good/s", func(r Result) string { return fmt.Sprintf("%.2f", r.Total.Goodput) })
		row("good of offered", func(r Result) string { return percent(r.Total.Attainment) })
		row("failed", func(r Result) string { return fmt.Sprint(r.Total.Failed) })
		row("not sent", func(r Result) string { return fmt.Sprint(r.Total.NotSent) })
		for _, q := range []struct {
			name string
			of   func(Latency) *float64
		}{
			{"p50", func(l Latency) *float64 { return l.P50 }},
			{"p90", func(l Latency) *float64 { return l.P90 }},
			{"p95", func(l Latency) *float64 { return l.P95 }},
			{"p99", func(l Latency) *float64 { return l.P99 }},
			{"p99.9", func(l Latency) *float64 { return l.P999 }},
		} {
			row("latency "+q.name, func(r Result) string { return maybe(q.of(r.Total.Latency)) })
		}
		row("latency max", func(r Result) string { return duration(r.Total.Latency.Max) })
		row("lag p99", func(r Result) string { return maybe(r.Generator.Lag.P99) })
		row("replicas, mean", func(r Result) string { return fmt.Sprintf("%.2f", r.MeanReplicas()) })
	})
	return p.err
}

// MeanReplicas returns the mean total number of replicas over all samples.
func (r Result) MeanReplicas() float64 {
	sum := 0.0
	for _, f := range r.Functions {
		for _, s := range f.Samples {
			sum += float64(s.Replicas) / float64(len(f.Samples))
		}
	}
	return sum
}

// String returns the line that is printed each second.
func (p Progress) String() string {
	return fmt.Sprintf("%4d s  offered %d  in flight %d  answered %d  good %s  failed %d  not sent %d  p50 %s", int(p.At.Round(time.Second)/time.Second),
		p.Offered, p.InFlight, p.Answered, percent(float64(p.Good)/float64(max(p.Answered+p.Failed+p.NotSent, 1))), p.Failed, p.NotSent, duration(p.P50.Seconds()))
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	_, err := fmt.Fprintf(p.w, format+"\n", args...)
	p.err = cmp.Or(p.err, err)
}

func (p *printer) table(header string, rows func(io.Writer)) {
	t := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, header)
	rows(t)
	p.err = cmp.Or(p.err, t.Flush())
	p.line("")
}

func writeLatency(w io.Writer, name string, l Latency, slo string) {
	highest := "-"
	if l.Count > 0 {
		highest = duration(l.Max)
	}
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", name, maybe(l.P50), maybe(l.P75), maybe(l.P90), maybe(l.P95), maybe(l.P99), maybe(l.P999), highest, slo)
}

func maybe(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return duration(*seconds)
}

func objective(slo float64) string {
	if slo == 0 {
		return "-"
	}
	return duration(slo)
}

// duration formats with three digits.
func duration(seconds float64) string {
	switch {
	case seconds == 0:
		return "0"
	case seconds < 1e-3:
		return fmt.Sprintf("%.*f µs", digits(seconds*1e6), seconds*1e6)
	case seconds < 1:
		return fmt.Sprintf("%.*f ms", digits(seconds*1e3), seconds*1e3)
	default:
		return fmt.Sprintf("%.*f s", digits(seconds), seconds)
	}
}

func digits(v float64) int {
	return max(0, 2-max(0, int(math.Floor(math.Log10(max(v, 1e-9))))))
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

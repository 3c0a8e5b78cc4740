package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// topSection is one table. Each row has as many columns as the header, and the last column takes
// the rest of the line.
type topSection struct {
	header []string
	rows   [][]string
	left   []bool // which columns begin at the left
	show   int    // rows that are shown
}

// renderTop draws v in at most height lines of at most width columns. The result depends only on
// the arguments.
func renderTop(v schema.Top, width, height int) []string {
	sections := []*topSection{topPipelines(v.Pipelines), topFunctions(v.Functions), topNodes(v.Nodes), topEventRows(v.Events)}
	share(sections, height-1-2*len(sections))
	title := fmt.Sprintf("stagecoach  %s  %s, %s, %s", v.At.Format(time.TimeOnly),
		plural(len(v.Pipelines), "pipeline"), plural(len(v.Functions), "function"), plural(len(v.Nodes), "node"))
	lines := []string{fit(title, width)}
	for _, s := range sections {
		lines = append(append(lines, ""), s.draw(width)...)
	}
	return lines[:min(len(lines), max(height, 1))]
}

// share divides lines among the sections: two for each, then as many as functions, pipelines, nodes
// and events need, in this order.
func share(sections []*topSection, lines int) {
	for _, s := range sections {
		s.show = max(min(len(s.rows), 2, lines), 0)
		lines -= s.show
	}
	events := sections[3]
	spare := max(min(len(events.rows)-events.show, 2, lines), 0) // some events are always of interest
	lines -= spare
	for _, i := range []int{1, 0, 2} {
		more := max(min(len(sections[i].rows)-sections[i].show, lines), 0)
		sections[i].show += more
		lines -= more
	}
	events.show += spare
	events.show += max(min(len(events.rows)-events.show, lines), 0)
}

// draw returns the header and the rows that are shown; what is left out is counted.
func (s *topSection) draw(width int) []string {
	rows := s.rows[:s.show]
	rest := ""
	if left := len(s.rows) - s.show; left > 0 && s.header[0] != "EVENT" && s.show > 0 {
		rows, rest = rows[:s.show-1], fmt.Sprintf("… %d more", left+1)
	}
	widths := make([]int, len(s.header))
	for _, r := range append([][]string{s.header}, rows...) {
		for i, cell := range r {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	// The first column gets narrower if the numbers need the room. The last column takes the rest.
	others := 0
	for _, w := range widths[1 : len(widths)-1] {
		others += w + 2
	}
	widths[0] = min(widths[0], max(width-others-16, 12))
	var lines []string
	for _, r := range append([][]string{s.header}, rows...) {
		var b strings.Builder
		for i, cell := range r {
			if i == len(r)-1 {
				b.WriteString(cell)
				break
			}
			cell = fit(cell, widths[i])
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if s.left[i] {
				b.WriteString(cell + pad)
			} else {
				b.WriteString(pad + cell)
			}
			b.WriteString("  ")
		}
		lines = append(lines, strings.TrimRight(fit(b.String(), width), " "))
	}
	if rest != "" {
		lines = append(lines, fit(rest, width))
	}
	return lines
}

func topPipelines(all []schema.TopPipeline) *topSection {
	s := &topSection{header: []string{"PIPELINE", "RATE/s", "P50", "P99", "SLO", "WITHIN", "FAILED", "IN FLIGHT", ""}, left: make([]bool, 9)}
	s.left[0] = true
	for _, p := range all {
		slo, within := "-", "-"
		if p.SLO > 0 {
			slo, within = span(p.SLO), percent(p.Within)
		}
		if p.Rate == 0 {
			within = "-"
		}
		s.rows = append(s.rows, []string{
			short(p.Name), decimal(p.Rate), span(p.P50), span(p.P99), slo, within, percent(p.Failed), strconv.Itoa(p.InFlight), printable(p.Fault),
		})
	}
	return s
}

// topFunctions shows busy functions first. Variants follow their stage's function, with indented
// names; a stage with a busy variant is busy.
func topFunctions(all []schema.TopFunction) *topSection {
	s := &topSection{
		header: []string{"FUNCTION", "ARR/s", "CV", "QUEUE", "RUN", "WAIT", "SERVICE", "UTIL", "REPLICAS", "WHY"}, left: make([]bool, 10),
	}
	s.left[0] = true
	variantOf, busy := map[string]string{}, map[string]bool{}
	for i := range all {
		variantOf[all[i].Name] = all[i].VariantOf
	}
	below := func(f *schema.TopFunction) string { return parent(variantOf, f.Name) }
	for i := range all {
		f := &all[i]
		if f.Rate > 0 || f.Waiting+f.Running+f.Ready+f.Starting+f.Draining+f.Wanted > 0 {
			busy[cmp.Or(below(f), f.Name)] = true
		}
	}
	idle := func(f *schema.TopFunction) int {
		if busy[cmp.Or(below(f), f.Name)] {
			return 0
		}
		return 1
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b schema.TopFunction) int { return cmp.Compare(idle(&a), idle(&b)) })
	for _, f := range all {
		replicas := strconv.Itoa(f.Ready)
		if f.Starting > 0 {
			replicas += "+" + strconv.Itoa(f.Starting)
		}
		s.rows = append(s.rows, []string{
			indented(short(f.Name), below(&f)), decimal(f.Rate), decimal(f.CV), strconv.Itoa(f.Waiting), strconv.Itoa(f.Running), span(f.Wait), span(f.Service),
			percent(f.Utilisation), replicas + "/" + strconv.Itoa(f.Wanted), printable(f.Why),
		})
	}
	return s
}

func topNodes(all []schema.TopNode) *topSection {
	s := &topSection{header: []string{"NODE", "ZYGOTES", "REPLICAS", "MEMORY"}, left: []bool{true, false, false, true}}
	for _, n := range all {
		s.rows = append(s.rows, []string{
			printable(n.Name), strconv.Itoa(n.Zygotes), strconv.Itoa(n.Replicas), size(n.MemoryUsed) + " of " + size(n.Memory),
		})
	}
	return s
}

// topEventRows has the latest event first.
func topEventRows(all []schema.TopEvent) *topSection {
	s := &topSection{header: []string{"EVENT", "KIND", "OF", "WHY"}, left: []bool{true, true, true, true}}
	for _, e := range slices.Backward(all) {
		of := cmp.Or(e.Replica, short(e.Function.String()), e.Node)
		why := e.Why
		if e.From != nil && e.To != nil {
			why = fmt.Sprintf("%d to %d: %s", *e.From, *e.To, why)
		}
		if e.Path != "" {
			why = strings.TrimSpace(e.Path + " " + why)
		}
		s.rows = append(s.rows, []string{e.At.Format(time.TimeOnly), printable(e.Kind), printable(of), printable(why)})
	}
	return s
}

// short returns the text of a key without the default namespace.
func short(key string) string { return printable(pipeline.ParseKey(key).Short()) }

// printable returns s as one line without control characters, because causes may hold what a
// function has printed.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}

// fit cuts s at width columns.
func fit(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	if width < 1 {
		return ""
	}
	return string([]rune(s)[:width-1]) + "…"
}

func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}

func percent(x float64) string { return strconv.Itoa(int(x*100+0.5)) + "%" }

// decimal formats a number with about three digits.
func decimal(x float64) string {
	if x >= 100 {
		return strconv.FormatFloat(x, 'f', 0, 64)
	}
	return strconv.FormatFloat(x, 'f', 1, 64)
}

// span formats a time in seconds with a suitable unit.
func span(seconds float64) string {
	switch {
	case seconds <= 0:
		return "-"
	case seconds < 0.001:
		return strconv.FormatFloat(seconds*1e6, 'f', 0, 64) + "µs"
	case seconds < 0.1:
		return strconv.FormatFloat(seconds*1e3, 'f', 1, 64) + "ms"
	case seconds < 1:
		return strconv.FormatFloat(seconds*1e3, 'f', 0, 64) + "ms"
	}
	return strconv.FormatFloat(seconds, 'f', 1, 64) + "s"
}

func size(bytes int64) string {
	if bytes >= 10<<30 {
		return strconv.FormatInt(bytes>>30, 10) + "Gi"
	}
	return strconv.FormatInt(bytes>>20, 10) + "Mi"
}

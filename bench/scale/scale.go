// Package scale measures decisions of policies about large clusters. The clusters are generated,
// and no replica runs.
package scale

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/chart"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// stages are the parts of a decision that are measured, in order.
var stages = []string{"allocate", "correct", "share", "place", "warm", "validate", "decide"}

// goals for a decision about 1,000 nodes.
const (
	goalNodes     = 1000
	goalEmpty     = 200.0 // ms
	goalUnchanged = 20.0  // ms
)

// Run measures decisions about clusters of some numbers of nodes, in CPU time of one thread. Each
// is made from nothing, and again after the load of one function has doubled.
func Run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench scale", flag.ContinueOnError)
	asJSON := fs.Bool("json", false, "print JSON instead of a table")
	counts := fs.String("nodes", "100,200,300,500,700,1000", "numbers of nodes, joined by commas")
	runs := fs.Int("runs", 20, "decisions per figure; the fastest counts")
	svg := fs.String("svg", "", "file for a chart; empty: none")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	report := bench.NewReport("scale", os.Stderr)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for count := range strings.SplitSeq(*counts, ",") {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 || *runs < 1 {
			return fmt.Errorf("--nodes %q, --runs %d: want numbers above 0", *counts, *runs)
		}
		console.Progress("bench scale: %d nodes", n)
		if err := measure(ctx, report, sized(n), *runs); err != nil {
			return fmt.Errorf("%d nodes: %w", n, err)
		}
	}
	if *svg != "" {
		if err := draw(report, *svg); err != nil {
			return err
		}
	}
	return bench.Print(report, *asJSON, out)
}

// measure adds the figures of one size.
func measure(ctx context.Context, report *bench.Report, z size, runs int) error {
	m, err := newMeter()
	if err != nil {
		return err
	}
	s := z.cluster()
	p, memory, err := m.repeat(ctx, s, nil, runs)
	if err != nil {
		return err
	}
	m.report(report, fmt.Sprintf("%d_nodes_from_nothing", z.nodes), z.nodes, runs)
	for range 2 { // until nothing is left to do
		s = apply(s, p)
		if p, memory, err = m.decide(s, memory); err != nil {
			return err
		}
	}
	s = apply(s, p)
	s.Functions[len(s.Functions)/2].Demand.Rate *= 2
	if _, _, err = m.repeat(ctx, s, memory, runs); err != nil {
		return err
	}
	m.report(report, fmt.Sprintf("%d_nodes_one_changed", z.nodes), z.nodes, runs)
	return nil
}

// meter measures the stages of decisions.
type meter struct {
	set   policy.Set
	now   map[string]*cost // of the decision under way
	least map[string]cost  // of all, by stage
}

// cost is what a stage has taken.
type cost struct {
	time  time.Duration // of the thread on its core, so that other processes do not count
	bytes uint64
}

// repeat makes a decision several times, and keeps the least cost of each stage.
func (m *meter) repeat(ctx context.Context, s plan.Snapshot, memory policy.Memory, runs int) (p plan.Plan, next policy.Memory, err error) {
	m.least = map[string]cost{}
	for range runs {
		if err := ctx.Err(); err != nil {
			return p, next, err
		}
		if p, next, err = m.decide(s, memory); err != nil {
			return p, next, err
		}
		for _, stage := range stages {
			is, was := *m.now[stage], m.least[stage]
			if was.time == 0 || is.time < was.time {
				was.time = is.time
			}
			if was.bytes == 0 || is.bytes < was.bytes {
				was.bytes = is.bytes
			}
			m.least[stage] = was
		}
	}
	return p, next, nil
}

// decide makes one decision.
func (m *meter) decide(s plan.Snapshot, memory policy.Memory) (p plan.Plan, next policy.Memory, err error) {
	for _, stage := range stages {
		m.now[stage] = &cost{}
	}
	runtime.GC() // of earlier decisions
	var held []policy.Held
	m.stage("decide", func() { p, next, held, err = m.set.Decide(s, memory) })
	if err == nil && len(held) > 0 {
		err = fmt.Errorf("domain of %q: %w", held[0].Domain.Functions[0], held[0].Err)
	}
	if err == nil { // a part of Decide, measured alone
		m.stage("validate", func() { err = p.Validate(s) })
	}
	return p, next, err
}

// stage adds what f takes. The caller has locked its thread.
func (m *meter) stage(name string, f func()) {
	before, start := allocated(), threadTime()
	f()
	c := m.now[name]
	c.time += threadTime() - start
	c.bytes += allocated() - before
}

func (m *meter) report(report *bench.Report, name string, nodes, runs int) {
	for _, stage := range stages {
		report.Add(name, stage+"_ms", m.least[stage].time.Seconds()*1e3, runs)
	}
	for _, stage := range stages {
		report.Add(name, stage+"_kb_per_node", float64(m.least[stage].bytes)/1e3/float64(nodes), runs)
	}
	if nodes == goalNodes {
		most := goalEmpty
		if strings.HasSuffix(name, "changed") {
			most = goalUnchanged
		}
		took := m.least["decide"].time.Seconds() * 1e3
		report.Goals = append(report.Goals, bench.Goal{Goal: fmt.Sprintf("%s: ms of a decision: at most %g", name, most), Figure: took, Met: took <= most})
	}
}

// draw writes a chart of a report.
func draw(report *bench.Report, file string) error {
	panel := func(title, state, metric, unit string) chart.Scatter {
		panel := chart.Scatter{Title: title, XTitle: "nodes, as many functions, five replicas each", YTitle: unit}
		for i, stage := range stages {
			p := chart.Points{Name: stage, Style: i, Join: chart.Joined}
			for _, r := range report.Results {
				var nodes float64
				if _, err := fmt.Sscanf(r.Case, "%g_nodes", &nodes); err == nil && strings.HasSuffix(r.Case, state) && r.Metric == stage+metric {
					p.X, p.Y = append(p.X, nodes), append(p.Y, r.Value)
				}
			}
			panel.Series = append(panel.Series, p)
		}
		return panel
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	fig := chart.Figure{
		Title: "What a decision about a large cluster takes", Columns: 2,
		Notes: []string{fmt.Sprintf("CPU time of one thread on %s, %s, %s. The stages are parts of decide. make bench-scale", report.Host.CPU, report.Host.Go, report.Host.Date)},
		Panels: []chart.Panel{
			panel("from nothing: time", "from_nothing", "_ms", "ms"), panel("one function changed: time", "one_changed", "_ms", "ms"),
			panel("from nothing: memory", "from_nothing", "_kb_per_node", "kB allocated per node"), panel("one function changed: memory", "one_changed", "_kb_per_node", "kB allocated per node"),
		},
	}
	if err := fig.WriteSVG(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

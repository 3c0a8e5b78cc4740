package gpu

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// gpuCell is one measurement. It has a row in the report even if it fails or is not run.
type gpuCell struct {
	name         string        // its case in the report, such as 5.4GB_fork
	takes        time.Duration // an estimate
	device, host int64         // bytes of memory that have to be free
	measure      func(ctx context.Context) error
}

// Cells that every run measures, because others need them: a name, and the end of a name.
const (
	deviceCell  = "device"
	weightsCell = "_weights"
)

// Statuses of a cell.
const (
	Measured = "measured"
	Failed   = "failed"
	NotRun   = "not run"
)

// Line is a line of the file that --json-lines names. Each line has some of these fields.
type Line struct {
	Cell    string         `json:"cell,omitempty"`
	Status  string         `json:"status,omitempty"` // measured, failed or not run
	Cause   string         `json:"cause,omitempty"`  // why it failed or was not run
	Seconds float64        `json:"seconds,omitempty"`
	Results []bench.Result `json:"results,omitempty"`
	Notes   []bench.Note   `json:"notes,omitempty"`
	Goals   []bench.Goal   `json:"goals,omitempty"`
	// Run is in the first line of each run: the machine and what was found on it.
	Run *bench.Report `json:"run,omitempty"`
}

// gpuCells runs cells, one after the other, and reports each as soon as it has ended.
type gpuCells struct {
	report *bench.Report
	look   func(ctx context.Context) (free int64, err error) // bytes of the device that are free
	// host returns how many bytes of the machine's memory are free.
	host func() (free int64, err error)
	// lines takes lines as JSON; nil: none are written.
	lines  io.Writer
	end    time.Time                           // of the budget; zero: no budget
	told   struct{ results, notes, goals int } // rows of the report that were written
	before map[string]bool                     // cells that an earlier run has measured
	// By kind of cell, it is how long the latest one took, as a share of its estimate.
	pace   map[string]float64
	failed []string // names of failed cells
	broken error    // set when lines cannot be written
}

// resume reads the lines of earlier runs from file, so that this run continues them. Cells with
// figures in the file are not measured again, and the report includes their figures. Two kinds of
// cells are measured again by every run, because other cells need them: the device's own figures,
// and the weights.
func (c *gpuCells) resume(file *os.File) error {
	b, err := io.ReadAll(file)
	whole := b[:bytes.LastIndexByte(b, '\n')+1]
	if err == nil && len(whole) < len(b) { // a run was cut off in the middle of a line
		err = file.Truncate(int64(len(whole)))
	}
	if err != nil {
		return fmt.Errorf("--json-lines: %w", err)
	}
	c.lines, c.before = file, map[string]bool{}
	for line := range bytes.Lines(whole) {
		var l Line
		if err := json.Unmarshal(line, &l); err != nil {
			return fmt.Errorf("--json-lines: %s: %w: got %.100q, want lines of an earlier run", file.Name(), err, line)
		}
		if l.Run != nil && (l.Run.Host.CPU != c.report.Host.CPU || l.Run.Versions["device"] != c.report.Versions["device"]) {
			return fmt.Errorf("--json-lines: %s has lines of a machine with %s and %q, this one has %s and %q: name another file",
				file.Name(), l.Run.Host.CPU, l.Run.Versions["device"], c.report.Host.CPU, c.report.Versions["device"])
		}
		if l.Status != Measured || c.before[l.Cell] || l.Cell == deviceCell || strings.HasSuffix(l.Cell, weightsCell) {
			continue
		}
		c.before[l.Cell] = true
		c.report.Results, c.report.Notes = append(c.report.Results, l.Results...), append(c.report.Notes, l.Notes...)
	}
	c.told.results, c.told.notes = len(c.report.Results), len(c.report.Notes)
	if len(c.before) > 0 {
		console.Progress("bench gpu: %d cells were measured by earlier runs", len(c.before))
	}
	return nil
}

// estimate returns how long a cell takes, judged by the latest one of its kind, of another size.
func (c *gpuCells) estimate(cell gpuCell) time.Duration {
	if pace, ok := c.pace[kindOf(cell.name)]; ok {
		return time.Duration(float64(cell.takes) * min(1.5, 1.25*pace))
	}
	return cell.takes
}

// kindOf returns a cell's name without the size, such as fork_x4.
func kindOf(name string) string {
	_, kind, _ := strings.Cut(name, "_")
	return kind
}

// begin reports the machine and the planned measurements.
func (c *gpuCells) begin() {
	run := *c.report
	run.Results = []bench.Result{} // there are none yet
	c.tell(Line{Run: &run})
}

// tell writes a line.
func (c *gpuCells) tell(line Line) {
	if c.lines == nil || c.broken != nil {
		return
	}
	if err := json.NewEncoder(c.lines).Encode(line); err != nil {
		c.broken = fmt.Errorf("--json-lines: %w", err)
		console.Progress("bench gpu: %v: no more lines are written", c.broken)
	}
}

// left returns why there is not enough time left, or an empty string if there is.
func (c *gpuCells) left(ctx context.Context, takes time.Duration) string {
	if ctx.Err() != nil {
		return "interrupted"
	}
	if left := time.Until(c.end); !c.end.IsZero() && left < takes {
		return fmt.Sprintf("budget: it takes about %v, and %v are left", takes.Round(time.Second), max(0, left).Round(time.Second))
	}
	return ""
}

// fits returns why a cell cannot be run, or an empty string if it can.
func (c *gpuCells) fits(ctx context.Context, cell gpuCell) (why string, err error) {
	if why := c.left(ctx, c.estimate(cell)); why != "" {
		return why, nil
	}
	free, err := c.look(ctx)
	if err != nil {
		return "", fmt.Errorf("free memory of the device: %w", err)
	}
	if free < cell.device {
		return fmt.Sprintf("memory of the device: want %.1f GB free, got %.1f GB", float64(cell.device)/1e9, float64(free)/1e9), nil
	}
	free, err = c.host()
	if err != nil {
		return "", fmt.Errorf("free memory of the machine: %w", err)
	}
	if free < cell.host {
		return fmt.Sprintf("memory of the machine: want %.1f GB free, got %.1f GB", float64(cell.host)/1e9, float64(free)/1e9), nil
	}
	return "", nil
}

// deadline returns a context that ends a cell that takes too long. The limit is five times the
// estimate plus a minute, but not later than the end of the budget. Without a budget, the limit is
// ten minutes longer than five estimates, because the machine may be busy with other work.
func (c *gpuCells) deadline(ctx context.Context, takes time.Duration) (context.Context, context.CancelFunc) {
	end := time.Now().Add(10*time.Minute + 5*takes)
	if !c.end.IsZero() {
		end = time.Now().Add(time.Minute + 5*takes)
		if c.end.Before(end) {
			end = c.end
		}
	}
	return context.WithDeadlineCause(ctx, end, fmt.Errorf("not done at its deadline, after %v", time.Until(end).Round(time.Second)))
}

// run runs a cell, or reports why it does not. It returns whether the cell was begun.
func (c *gpuCells) run(ctx context.Context, cell gpuCell) bool {
	if c.before[cell.name] {
		return false
	}
	why, err := c.fits(ctx, cell)
	if err == nil && why != "" {
		c.skip(cell.name, why)
		return false
	}
	console.Progress("bench gpu: %s: takes about %v", cell.name, c.estimate(cell).Round(time.Second))
	began := time.Now()
	if err == nil {
		limited, cancel := c.deadline(ctx, cell.takes)
		if err = cell.measure(limited); err != nil && limited.Err() != nil {
			err = fmt.Errorf("%w (%w)", context.Cause(limited), err)
		}
		cancel()
	}
	took := time.Since(began)
	if err == nil && cell.takes > 0 {
		if c.pace == nil {
			c.pace = map[string]float64{}
		}
		c.pace[kindOf(cell.name)] = took.Seconds() / cell.takes.Seconds()
	}
	c.ended(cell.name, took, err)
	return true
}

// skip reports that a cell is not run, unless an earlier run has measured it.
func (c *gpuCells) skip(name, why string) {
	if c.before[name] {
		return
	}
	c.report.Note(name, NotRun+": "+why)
	c.news(Line{Cell: name, Status: NotRun, Cause: why})
}

// ended reports how a cell has ended. A failed cell keeps the figures that it had measured before.
func (c *gpuCells) ended(name string, took time.Duration, err error) {
	line := Line{Cell: name, Status: Measured, Seconds: took.Seconds()}
	if err != nil {
		line.Status, line.Cause = Failed, strings.Join(strings.Fields(err.Error()), " ")
		c.failed = append(c.failed, name)
		c.report.Note(name, line.Status+": "+line.Cause)
	}
	c.news(line)
}

// goals adds goals to the report, and writes a line with them.
func (c *gpuCells) goals(all []bench.Goal) {
	c.report.Goals = append(c.report.Goals, all...)
	c.news(Line{})
}

// news writes all rows of the report that are new since the last call, as a line and as progress.
func (c *gpuCells) news(line Line) {
	line.Results, line.Notes, line.Goals = c.report.Results[c.told.results:], c.report.Notes[c.told.notes:], c.report.Goals[c.told.goals:]
	c.told.results, c.told.notes, c.told.goals = len(c.report.Results), len(c.report.Notes), len(c.report.Goals)
	words := []string{}
	for _, r := range line.Results {
		words = append(words, fmt.Sprintf("%s %.4g", r.Metric, r.Value))
	}
	if line.Cell != "" && (line.Cause == "" || len(words) > 0) { // otherwise its note says more
		console.Progress("bench gpu: %s: %s", line.Cell, cmp.Or(strings.Join(words, ", "), line.Status))
	}
	for _, n := range line.Notes {
		console.Progress("bench gpu: %s: %s", n.Case, n.Text)
	}
	for _, g := range line.Goals {
		console.Progress("bench gpu: %s", g)
	}
	if line.Cell != "" || len(line.Goals) > 0 || len(line.Notes) > 0 {
		c.tell(line)
	}
}

// err returns an error that names the failed cells.
func (c *gpuCells) err() error {
	var failed error
	if len(c.failed) > 0 {
		failed = fmt.Errorf("%d cells failed: %s", len(c.failed), strings.Join(c.failed, ", "))
	}
	return errors.Join(failed, c.broken)
}

// gpuTimes estimates how long cells take, so that a run ends within its budget. Estimates are
// rather too high: a high estimate may leave out the last cells, but a low estimate would end a
// cell early and lose its figures.
type gpuTimes struct {
	start time.Duration // of a process, until it has imported PyTorch and made a context
}

// guessed is the estimate of a start until it was measured.
const guessed = 10 * time.Second

// of returns the estimate for a cell that starts n processes, takes m fast steps of half a second,
// and reads bytes of parameters at perGB seconds per GB.
func (t gpuTimes) of(n, m int, perGB float64, bytes int64) time.Duration {
	return time.Duration(n)*t.start + time.Duration(m)*500*time.Millisecond + time.Duration(perGB*float64(bytes))
}

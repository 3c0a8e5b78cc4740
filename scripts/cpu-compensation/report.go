package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// line is a decision about the stage.
type line struct {
	record.Line
	f *plan.Function
	w *plan.Want
}

// settled is the time after a raise of CPU in which the measured service time follows it. The
// measurement has a time constant of 30 s.
const settled = 45 * time.Second

// read returns the decisions of a record that are about a function.
func read(file, function string) ([]line, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	key := pipeline.Named(function, "").String()
	var out []line
	err = record.Scan(f, func(n int, text []byte) error {
		l, err := record.Decode(text)
		if err != nil {
			return fmt.Errorf("line %d of %s: %w", n, file, err)
		}
		x := line{Line: l}
		for i := range l.Snapshot.Functions {
			if f := &l.Snapshot.Functions[i]; f.Name == key {
				x.f = f
			}
		}
		for i := range l.Plan.Wants {
			if w := &l.Plan.Wants[i]; w.Function == key {
				x.w = w
			}
		}
		if x.f != nil && x.w != nil {
			out = append(out, x)
		}
		return nil
	})
	return out, err
}

// compensation is how the stage got CPU.
type compensation struct {
	declared, quota int           // thousandths of a core; quota is the largest that was in force
	before, after   time.Duration // measured service times
	why             string        // of the first raise
}

// compensated returns the compensation of a run. It returns an error if no plan raised the CPU, if
// the raise was not in force, or if the stage did not become faster.
func compensated(lines []line) (c compensation, err error) {
	first, last, planned := -1, -1, 0
	for i, l := range lines {
		if l.w.CPUMilli > max(planned, l.f.CPULimit) {
			planned, last = l.w.CPUMilli, i
			if first < 0 {
				first = i
			}
		}
	}
	if first < 0 {
		return c, errors.New("no plan raised the CPU")
	}
	at := &lines[first]
	c = compensation{declared: at.f.CPULimit, before: at.f.Service.Mean, why: at.w.Why}
	for _, l := range lines[last:] {
		if c.quota = max(c.quota, l.f.CPUNow); l.Snapshot.At.Sub(lines[last].Snapshot.At) >= settled {
			c.after = l.f.Service.Mean
			break
		}
	}
	switch {
	case c.quota <= c.declared:
		return c, fmt.Errorf("replicas kept %dm, though a plan gave them %dm", c.declared, planned)
	case c.after == 0:
		return c, fmt.Errorf("the run ended less than %v after the last raise", settled)
	case c.after >= c.before:
		return c, fmt.Errorf("service took %v with %dm and %v with %dm, want less", c.before, c.declared, c.after, c.quota)
	}
	return c, nil
}

// show prints the run, in steps of ten seconds and with each change of CPU.
func show(out io.Writer, lines []line) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nSECOND\tRATE\tWAITING\tREADY\tQUOTA\tPLANNED\tSERVICE\tANSWERED\tIN TIME")
	var begin, next time.Time
	answered, inTime, was := 0, 0, 0
	for _, l := range lines {
		if l.Traffic != nil {
			for _, a := range l.Traffic.Apps {
				answered, inTime = answered+a.Answered, inTime+a.InTime
			}
		}
		if !l.f.Demand.Known || !l.f.Service.Known {
			continue
		}
		at := l.Snapshot.At
		if begin.IsZero() {
			begin, next = at, at
		}
		if at.Before(next) && l.w.CPUMilli == was {
			continue
		}
		ready, _ := l.f.Current()
		planned := "as declared"
		if l.w.CPUMilli > 0 {
			planned = fmt.Sprintf("%dm", l.w.CPUMilli)
		}
		quota := l.f.CPULimit
		if l.f.CPUNow > 0 {
			quota = l.f.CPUNow
		}
		fmt.Fprintf(t, "%.0f\t%.1f/s\t%d\t%d\t%dm\t%s\t%v\t%d\t%d\n", at.Sub(begin).Seconds(), l.f.Demand.Rate, l.f.Waiting, ready, quota, planned,
			l.f.Service.Mean.Round(time.Millisecond), answered, inTime)
		if answered, inTime, was = 0, 0, l.w.CPUMilli; !at.Before(next) {
			next = next.Add(10 * time.Second)
		}
	}
	t.Flush()
}

// most bounds the kept record, in bytes.
const most = 200 << 10

// keep writes one decision per second, and each one that changes CPU, gzipped.
func keep(lines []line, file string) error {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	e := json.NewEncoder(z)
	was, last := 0, time.Time{}
	for i := range lines {
		l := &lines[i]
		if l.w.CPUMilli == was && l.Snapshot.At.Sub(last) < time.Second {
			continue
		}
		was, last = l.w.CPUMilli, l.Snapshot.At
		l.Traffic = nil // its times would not follow each other
		if err := e.Encode(&l.Line); err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return err
	}
	if b.Len() > most {
		return fmt.Errorf("the record has %d bytes, want at most %d: make a shorter run", b.Len(), most)
	}
	return os.WriteFile(file, b.Bytes(), 0o644) //nolint:gosec // it is committed
}

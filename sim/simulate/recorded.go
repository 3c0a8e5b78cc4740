package simulate

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/sim/recorded"
)

// recordedFlags are the flags of `stagecoach sim --recorded`.
type recordedFlags struct {
	record   *string
	pipeline *string
	write    *string
	policies console.Repeated
}

// outputs says where a result goes.
type outputs struct {
	json, svg string
	seeds     int
	quiet     bool
}

// runRecorded simulates a recorded run under several policies.
func runRecorded(ctx context.Context, f *recordedFlags, to outputs, out io.Writer) error {
	run, err := readRecord(f)
	if err != nil {
		return fmt.Errorf("sim: %s: %w", *f.record, err)
	}
	if *f.write != "" {
		if err := writeScenario(run, *f.write, *f.record); err != nil {
			return fmt.Errorf("sim: %w", err)
		}
	}
	var trace bytes.Buffer
	if err := run.WriteArrivals(&trace); err != nil {
		return fmt.Errorf("sim: %w", err)
	}
	s := run.Scenario
	s.Seeds = cmp.Or(to.seeds, s.Seeds)
	model, err := s.Model(func(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(trace.Bytes())), nil })
	if err != nil {
		return fmt.Errorf("sim: %s: the scenario of the record: %w; --write it, correct it, and simulate that", *f.record, err)
	}
	defer debug.SetGCPercent(debug.SetGCPercent(GC))
	result, err := model.Run(ctx, simProgress(to.quiet))
	if err != nil {
		return fmt.Errorf("sim: %w", err)
	}
	report := run.Report(result)
	return to.write(out, report, report.WriteText, report.WriteSVG)
}

// write writes a result as text or JSON to out, and to files.
func (to outputs) write(out io.Writer, result any, text, svg func(io.Writer) error) error {
	var errs []error
	if to.json == "-" {
		errs = append(errs, console.WriteJSON(out, result))
	} else {
		errs = append(errs, text(out))
	}
	if to.json != "" && to.json != "-" {
		errs = append(errs, console.WriteFile(to.json, func(w io.Writer) error { return console.WriteJSON(w, result) }))
	}
	if to.svg != "" {
		errs = append(errs, console.WriteFile(to.svg, svg))
	}
	return errors.Join(errs...)
}

func readRecord(f *recordedFlags) (*recorded.Run, error) {
	file, err := os.Open(*f.record)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return recorded.Read(file, recorded.Options{Pipeline: *f.pipeline, Policies: f.policies, Trace: filepath.Base(arrivalsOf(cmp.Or(*f.write, *f.record)))})
}

// arrivalsOf returns the name of the file of arrivals beside a scenario.
func arrivalsOf(scenario string) string {
	return strings.TrimSuffix(scenario, filepath.Ext(scenario)) + ".arrivals.csv"
}

// writeScenario writes the scenario, and its arrivals beside it.
func writeScenario(run *recorded.Run, name, from string) error {
	if err := console.WriteFile(arrivalsOf(name), run.WriteArrivals); err != nil {
		return err
	}
	return console.WriteFile(name, func(w io.Writer) error { return run.WriteScenario(w, from) })
}

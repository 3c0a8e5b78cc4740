// Package record is the format of the autoscaler's record, which `stagecoach up --record` writes:
// one decision per line, in JSON, with all its inputs. Package control writes and replays records.
// The simulator takes a record as its load.
package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// Version is the version of a record's lines. It changes when the form of the lines changes, or
// when a plan.Snapshot or plan.Plan in an older line would now mean something else.
const Version = 1

// Line is a line of a record: a decision with all its inputs.
type Line struct {
	Version  int             `json:"version"`
	Policies policy.Names    `json:"policies"`
	Snapshot plan.Snapshot   `json:"snapshot"`
	Memory   json.RawMessage `json:"memory"` // encoded by policy.Memory
	Plan     plan.Plan       `json:"plan"`
	Error    string          `json:"error,omitempty"` // first line of the error
	// Traffic is absent in lines of earlier versions of Stagecoach. No policy knows it.
	Traffic *Traffic `json:"traffic,omitempty"`
}

// Traffic is the requests of the time from the previous line to this one.
type Traffic struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	Apps []App     `json:"apps"` // those with requests, sorted by Name
}

// App is the requests for a pipeline, or for a function under its own name.
type App struct {
	Name    string `json:"name"` // pipeline.Key in text
	Arrived int    `json:"arrived"`
	// Gaps are the times in µs from Traffic.From to the first arrival, and from each arrival to the
	// next one. Empty: more than MostGaps have arrived.
	Gaps []int64 `json:"gaps_us,omitempty"`
	// CV is the coefficient of variation of the gaps. It is set only if Gaps is empty.
	CV float64 `json:"cv,omitempty"`

	Answered int `json:"answered"`
	InTime   int `json:"in_time"` // of Answered; all, if the pipeline has no objective
	Failed   int `json:"failed"`
	// Sum is the sum of the latencies of answered requests.
	Sum time.Duration `json:"sum_ns"`
	// Latencies are those of answered requests: pairs of µs, rounded to 1/64 of their value, and the
	// number of requests.
	Latencies [][2]int64 `json:"latencies_us,omitempty"`
}

// MostGaps is the largest number of arrivals per line and App that have their own times.
const MostGaps = 4096

// VersionError means that another version has written a line.
type VersionError struct{ Got int }

// Error returns both versions and what to do.
func (e VersionError) Error() string {
	return fmt.Sprintf("version %d, want %d: use the stagecoach that recorded it", e.Got, Version)
}

// Decode reads a line of a record. A line of another version is a [VersionError]. A field that this
// program does not know is an error, because the decision may depend on it.
func Decode(line []byte) (Line, error) {
	var version struct{ Version int }
	if err := json.Unmarshal(line, &version); err != nil {
		return Line{}, fmt.Errorf("no line of a record, or one cut short: %w", err)
	}
	if version.Version != Version {
		return Line{}, VersionError{version.Version}
	}
	var l Line
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return Line{}, err
	}
	return l, nil
}

// check checks what a reader of the traffic relies on.
func (t *Traffic) check() error {
	if t.To.Before(t.From) {
		return fmt.Errorf("traffic from %v to %v, want a time that passes", t.From, t.To)
	}
	for i := range t.Apps {
		a := &t.Apps[i]
		switch {
		case a.Name == "":
			return errors.New("traffic without a name, want a pipeline's")
		case slices.ContainsFunc(a.Latencies, func(l [2]int64) bool { return l[0] < 0 || l[1] < 0 }) || slices.ContainsFunc(a.Gaps, func(g int64) bool { return g < 0 }):
			return fmt.Errorf("traffic of %q: a negative time or number", a.Name)
		case a.Arrived < 0 || a.Answered < 0 || a.InTime < 0 || a.Failed < 0:
			return fmt.Errorf("traffic of %q: a negative number of requests", a.Name)
		case len(a.Gaps) > 0 && len(a.Gaps) != a.Arrived:
			return fmt.Errorf("traffic of %q: %d gaps, want one per arrival, which are %d", a.Name, len(a.Gaps), a.Arrived)
		}
	}
	return nil
}

// Check returns an error if the line's traffic contradicts itself.
func (l *Line) Check() error {
	if l.Traffic == nil {
		return nil
	}
	return l.Traffic.check()
}

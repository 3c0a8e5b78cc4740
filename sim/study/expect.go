package study

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Expectation is what was expected of a comparison before the study was run.
type Expectation struct {
	Group   string     `json:"group"`
	Against string     `json:"against"` // a contender, or [Strongest]
	Latency [2]float64 `json:"latency"` // change of our mean latency, from and to: −0.1 is 10 % less
	Why     string     `json:"why"`
}

// Expected is an expectation with the result.
type Expected struct {
	Expectation
	Got  Interval `json:"got"`  // a ratio of latencies, as Comparison.Mean
	Came string   `json:"came"` // as expected, better or worse
}

// ReadExpectations reads a JSON list of expectations.
func ReadExpectations(text []byte) ([]Expectation, error) {
	var out []Expectation
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		return nil, fmt.Errorf("expectations: %w", err)
	}
	for i, e := range out {
		if e.Group == "" || e.Against == "" || e.Why == "" || !(e.Latency[0] < e.Latency[1]) || e.Latency[0] <= -1 {
			return nil, fmt.Errorf("expectations: number %d, %+v: want a group, an opponent, a reason, and a change from less to more", i+1, e)
		}
	}
	return out, nil
}

// expected returns the expectations that the result has a comparison for.
func expected(r *Result, all []Expectation) []Expected {
	var out []Expected
	for _, e := range all {
		settings := settingsOf(r, e.Group)
		if len(settings) == 0 || e.Against == Strongest && strongest(r, e.Group) == "" {
			continue
		}
		c, ok := r.Compare(r.Ours, e.Against, settings...)
		if !ok {
			continue
		}
		x := Expected{Expectation: e, Got: c.Mean, Came: "as expected"}
		switch {
		case c.Mean.High < 1+e.Latency[0]:
			x.Came = "better"
		case c.Mean.Low > 1+e.Latency[1]:
			x.Came = "worse"
		}
		out = append(out, x)
	}
	return out
}

// expectations writes what was expected beside what came.
func expectations(r *Result, b *strings.Builder) {
	t := table{{"group", "against", "mean latency expected", "result", "came", "why this was expected"}}
	for _, x := range r.Expected {
		against := r.title(x.Against)
		if x.Against == Strongest {
			against = "strongest: " + r.title(strongest(r, x.Group))
		}
		change := func(v float64) string { return sign(v) + sim.Trim(100*v, 3) }
		t.row(x.Group, against, fmt.Sprintf("%s to %s %%", change(x.Latency[0]), change(x.Latency[1])), x.Got.Change(), x.Came, x.Why)
	}
	if len(t) < 2 {
		return
	}
	b.WriteString("\n## Expectations\n\nThey were written down before any run. \"As expected\": the 95 % interval meets the expected range.\n")
	t.write(b)
}

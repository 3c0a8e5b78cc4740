package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// nothing is an Opener for scenarios without traces.
func nothing(name string) (io.ReadCloser, error) { return nil, errors.New("no file " + name) }

func model(t testing.TB, scenario string) *Model {
	t.Helper()
	s, err := Parse(strings.NewReader(scenario))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.Model(nothing)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func simulate(t testing.TB, scenario string) Result {
	t.Helper()
	r, err := model(t, scenario).Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.Policies {
		if p.Refused.Mean > 0 || p.Held.Mean > 0 {
			t.Errorf("%s: %g plans refused, %g domains held: %s", p.Name, p.Refused.Mean, p.Held.Mean, p.Complaint)
		}
	}
	return r
}

// fill replaces placeholders in a scenario's text. The other arguments are placeholders and their
// values, in turn.
func fill(scenario string, with ...string) string {
	return strings.NewReplacer(with...).Replace(scenario)
}

// want checks that a figure is close to a value. They may differ by at most the figure's interval
// plus the given part of the value.
func (e Estimate) want(t *testing.T, what string, value, part float64) {
	t.Helper()
	line := fmt.Sprintf("%s: %.5g ± %.2g, theory %.5g, %+.2f %%", what, e.Mean, e.CI, value, 100*(e.Mean/value-1))
	if t.Log(line); math.Abs(e.Mean-value) > e.CI+part*value {
		t.Errorf("%s, want it within the interval and %g %%", line, 100*part)
	}
}

func toJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

package decide

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// text is a problem in which the allocators disagree.
const text = `
name: two stages
policies: {allocator: sizer, corrector: none}
budget: 8
nodes: [{name: n, memory: 16Gi, cpu: 16}]
pipelines: [{name: p, slo: 1s, rate: 20}]
stages:
  - {name: a, next: b, service: {mean: 100ms}, replicas: [{node: n, count: 3}]}
  - {name: b, service: {mean: 10ms}, accuracy: 0.9, replicas: [{node: n}], variants: [{name: c, accuracy: 0.8, min: 0, zero: true, service: {mean: 5ms}}]}
`

func file(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "problem.yml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func decided(t *testing.T, args ...string) Result {
	t.Helper()
	var out bytes.Buffer
	if err := Run(t.Context(), append(args, "--json"), &out); err != nil {
		t.Fatal(err)
	}
	var r Result
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestFlagsReplaceThePolicies: a flag replaces the problem's policy of its level alone.
func TestFlagsReplaceThePolicies(t *testing.T) {
	name := file(t, text)
	own, other := decided(t, name), decided(t, name, "--allocator", "uniform", "--route=even", "--steps", "2")
	if n := own.Policies; n.Allocator != "sizer" || n.Corrector != "none" || n.Route != "best" || own.Version != 1 || own.Problem != "two stages" {
		t.Errorf("got %+v, want the problem's policies and the defaults", own)
	}
	if n := other.Policies; n.Allocator != "uniform" || n.Corrector != "none" || n.Route != "even" || len(other.Decisions) != 2 {
		t.Errorf("got %+v, want uniform, none and even, twice", other)
	}
	if a, b := own.Decisions[0].Functions[1].Count, other.Decisions[0].Functions[1].Count; a >= b {
		t.Errorf("%d replicas of b by the sizer, %d by uniform, want fewer", a, b)
	}
}

// TestPriceAddsReplicas decides with a price: in a flag, in the problem, and with a flag that takes
// the problem's price away.
func TestPriceAddsReplicas(t *testing.T) {
	dear := strings.Replace(text, "policies: {", "policies: {price: 50, ", 1)
	if dear == text {
		t.Fatal("no policies in the problem")
	}
	own, flag, given, none := decided(t, file(t, text)), decided(t, file(t, text), "--price", "50"), decided(t, file(t, dear)), decided(t, file(t, dear), "--price=0")
	count := func(r Result) int { return r.Decisions[0].Functions[0].Count }
	if count(flag) <= count(own) || count(given) != count(flag) || count(none) != count(own) || flag.Policies.Price != 50 {
		t.Errorf("%d replicas without a price, %d with a flag, %d with the problem's, %d with a flag of 0", count(own), count(flag), count(given), count(none))
	}
	if why := flag.Decisions[0].Functions[0].Why; !strings.Contains(why, " for the price") {
		t.Errorf("%q, want the price", why)
	}
	if all := decided(t, file(t, text), "--price", "1e6").Decisions[0].Used; all.Replicas != 8 || all.Budget != 8 {
		t.Errorf("%d replicas at the highest price, want the budget of 8", all.Replicas)
	}
	var out bytes.Buffer
	if err := Run(t.Context(), []string{file(t, dear)}, &out); err != nil || !strings.Contains(out.String(), "route best, price 50\n") {
		t.Errorf("%v, want the price in\n%s", err, out.String())
	}
	for _, bad := range []string{"NaN", "-1", "+Inf"} {
		if err := Run(t.Context(), []string{file(t, text), "--price", bad}, &out); err == nil || !strings.Contains(err.Error(), "decide: policy: price "+bad+", want 0 to 1000000") {
			t.Errorf("price %s: got %v", bad, err)
		}
	}
}

// TestTableShowsTheDecision checks the parts of the table.
func TestTableShowsTheDecision(t *testing.T) {
	var out bytes.Buffer
	if err := Run(t.Context(), []string{file(t, text), "--steps", "2"}, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"allocator sizer, corrector none, sharer gain, placer dispersed", "STEP  AT  REPLICAS  COUNTS\n", "2     1s  ",
		"FUNCTION  REPLICAS  CPU  BATCH  SHARE  CALLS/S  BUSY", "n ×3", "\na         λ=20.0/s μ=10.0/s", "STAGE  FROM    LENGTH  PARTS",
		"b      client  any     b 1    c", "PIPELINE  REQUESTS/S  OBJECTIVE", "p         20          1s", "of CPU", "(of 8)", "decided in ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// TestBadProblemsHaveTheirOwnStatus: a wrong field ends with 2 and its path, anything else with 1.
func TestBadProblemsHaveTheirOwnStatus(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"a field":   {[]string{file(t, strings.Replace(text, "rate: 20", "rate: -1", 1))}, 2, "problem.yml: pipelines[0].rate: got -1, want 0 to 1e+09"},
		"a policy":  {[]string{file(t, strings.Replace(text, "sizer", "magic", 1))}, 2, `policies.allocator: got "magic", want one of`},
		"no YAML":   {[]string{file(t, "nodes: [")}, 2, "problem: yaml"},
		"a flag":    {[]string{file(t, text), "--route", "magic"}, 1, `route "magic", want one of best, even`},
		"steps":     {[]string{file(t, text), "--steps", "0"}, 1, "--steps: got 0, want 1 to 1000"},
		"no file":   {[]string{"gone.yml"}, 1, "no such file"},
		"two files": {[]string{"a", "b"}, 1, `got ["a" "b"], want one problem`},
	} {
		err := Run(t.Context(), tc.args, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), tc.want) || console.StatusOf(err) != tc.status {
			t.Errorf("%s: got %v and status %d, want %q and %d", name, err, console.StatusOf(err), tc.want, tc.status)
		}
	}
	if err := Run(t.Context(), []string{"--help"}, &bytes.Buffer{}); !errors.As(err, &console.HelpAsked{}) {
		t.Errorf("--help: %v", err)
	}
}

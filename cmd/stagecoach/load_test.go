package main

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
)

// loadWith runs `stagecoach load` with args and returns its result, whose counts have to add up.
func loadWith(t *testing.T, args ...string) openloop.Result {
	t.Helper()
	file := filepath.Join(t.TempDir(), "result.json")
	var out bytes.Buffer
	if err := run(t.Context(), append(append([]string{"load"}, args...), "--quiet", "--json", file), &out); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := openloop.ReadResult(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range append(r.Targets, r.Total) {
		if x.Offered == 0 || x.Offered != x.Sent+x.NotSent || x.Sent != x.Answered+x.Failed || x.Latency.Count != x.Answered {
			t.Errorf("the counts do not add up: %+v", x)
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}
	return r
}

// TestLoadFollowsAStep sends a load with a step in its rate to a pipeline with a stage that forks.
// The result has its line and its stages, and replicas are added.
func TestLoadFollowsAStep(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("slow", "200ms", map[string]string{"min": "1", "max": "8"}, map[string]string{"pipeline": "two", "next": "quick"}),
		fn{"quick", "wait", nil, map[string]string{"pipeline": "two"}, map[string]string{"wait_mean": "1ms"}})
	r.until(late, "both stages to be up", func() bool { return r.line("slow").Ready == 1 && r.line("quick").Ready >= 1 })
	page := filepath.Join(t.TempDir(), "report.html")
	got := loadWith(t, "two", "--gateway", r.Base, "--rate", "2:2s,20:6s", "--cv", "0", "--slo", "1s", "--body", "hello", "--html", page)
	if got.Total.Offered != 124 || got.Total.Failed != 0 {
		t.Errorf("%d offered, %d failed (%+v), want 124 and none", got.Total.Offered, got.Total.Failed, got.Total.Errors)
	}
	stages := map[string]int64{}
	for _, s := range got.Total.Stages {
		stages[s.Stage] = s.Requests
	}
	if stages["slow"] != got.Total.Answered || stages["quick"] != got.Total.Answered {
		t.Errorf("stages %v, want both in each of %d answers", stages, got.Total.Answered)
	}
	if len(got.Functions) != 2 || !strings.HasPrefix(got.Functions[0].Function, "slow.") {
		t.Fatalf("functions %+v", got.Functions)
	}
	most, waits := 0, 0
	for _, s := range got.Functions[0].Samples {
		most = max(most, s.Replicas)
		if s.Wait != nil {
			waits++
		}
	}
	if first := got.Functions[0].Samples[0].Replicas; first != 1 || most < 3 || waits == 0 {
		t.Errorf("%d replicas at first, %d at most, %d waits: want 1, at least 3 for four requests' worth of work at a time, and some", first, most, waits)
	}
	b, err := os.ReadFile(page)
	if err != nil || !bytes.Contains(b, []byte("Replicas that are ready")) {
		t.Errorf("the report of %d bytes: %v", len(b), err)
	}
}

// TestLoadOfSeveralFunctions runs a scenario with three functions: one answers, one is called
// asynchronously, and one does not exist.
func TestLoadOfSeveralFunctions(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(fn{"quick", "wait", nil, nil, map[string]string{"wait_mean": "1ms"}})
	scenario := filepath.Join(t.TempDir(), "scenario.yml")
	text := `
rate: "60"
duration: 2s
targets:
  - {function: quick, weight: 2, cv: 2, body: {template: '{"n": {{counter}}}'}}
  - {function: quick, name: later, async: true, mmpp: "20:200ms,60:100ms"}
  - {function: nobody}
`
	if err := os.WriteFile(scenario, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got := loadWith(t, "--scenario", scenario, "--gateway", r.Base, "--seed", "3", "--allow-errors")
	now, later, nobody := got.Targets[0], got.Targets[1], got.Targets[2]
	if now.Failed > 0 || now.Callbacks != nil {
		t.Errorf("%+v", now)
	}
	if c := later.Callbacks; c == nil || c.Accepted != later.Sent || c.Called != later.Sent || c.Lost != 0 || later.Failed != 0 {
		t.Errorf("async: %+v, %+v", later, later.Callbacks)
	}
	if nobody.Answered != 0 || len(nobody.Errors) != 1 || nobody.Errors[0].Kind != "status 404" || !strings.Contains(nobody.Errors[0].Example, "nobody") {
		t.Errorf("a function that is not there: %+v", nobody)
	}
	if again := loadWith(t, "--scenario", scenario, "--gateway", r.Base, "--seed", "3", "--allow-errors"); again.Total.Offered != got.Total.Offered {
		t.Errorf("the same seed offered %d and %d", got.Total.Offered, again.Total.Offered)
	}
}

// TestLoadExitStatus runs `stagecoach load` as a script does. Failed requests are an error, which
// follows the result, unless --allow-errors is set. Refused requests (429) are no error.
func TestLoadExitStatus(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("full", "10s", map[string]string{"min": "1", "max": "1"}, map[string]string{"queue-limit": "1"}),
		fn{"quick", "wait", nil, nil, map[string]string{"wait_mean": "1ms"}})
	r.until(late, "both functions to be up", func() bool { return r.line("full").Ready == 1 && r.line("quick").Ready >= 1 })
	c := &operator{t, t.TempDir(), r.Base}
	c.run(`nobody +\d+ +0 +\d+ +0 +(?s:.*)`, "", "load", "nobody", "--rate", "10", "--duration", "1s", "--quiet", "--allow-errors")
	c.refuse(`(?s)target +offered.*stagecoach: load: (\d+) of (\d+) requests failed, \d+ of them with "status 404" \(.*nobody.*\); want no failures except refusals \(429\), or --allow-errors`,
		"", "load", "nobody", "--rate", "10", "--duration", "1s", "--quiet")
	c.run(`quick +\d+ +0 +`, "", "load", "quick", "--rate", "10", "--duration", "1s", "--quiet")

	held := make(chan struct{})
	for range 2 { // one runs, one fills the line
		go func() { r.send(http.MethodPost, "/function/full", "x"); held <- struct{}{} }()
	}
	r.until(late, "the line to be full", func() bool { l := r.line("full"); return l.Running == 1 && l.Waiting == 1 })
	c.run(`× status 429: `, "", "load", "full", "--rate", "20", "--duration", "500ms", "--timeout", "5s", "--quiet")
	<-held
	<-held
}

func TestLoadSaysWhatIsWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"nothing":           {nil, "got no function"},
		"two functions":     {[]string{"a", "b"}, `got ["a" "b"]`},
		"no rate":           {[]string{"a"}, "targets[0].rate: got none"},
		"rate of what":      {[]string{"a", "--rate", "x"}, `rate "x"`},
		"no such file":      {[]string{"a", "--rate", "1", "--body", "@/none"}, "--body: stat /none"},
		"no such trace":     {[]string{"a", "--trace", "/none"}, "targets[0].trace: open /none"},
		"no such scenario":  {[]string{"--scenario", "/none"}, "/none"},
		"both":              {[]string{"a", "--scenario", "/none"}, "no function"},
		"flags of a target": {[]string{"--scenario", "/none", "--rate", "1"}, "no --rate"},
		"compare one":       {[]string{"compare", "a"}, "want two or more"},
		"compare nothing":   {[]string{"compare", "/a", "/b"}, "open /a"},
	} {
		if err := run(t.Context(), append([]string{"load"}, tc.args...), &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

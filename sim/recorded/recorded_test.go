package recorded

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// realRecord returns the record of a real `stagecoach up` under a burst.
func realRecord(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "autoscaler", "testdata", "record.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustRead(t *testing.T, record []byte, o Options) *Run {
	t.Helper()
	run, err := Read(bytes.NewReader(record), o)
	if err != nil {
		t.Fatal(err)
	}
	return run
}

// simulate runs a scenario with the run's arrivals as its only file.
func simulate(t *testing.T, run *Run, s sim.Scenario) sim.Result {
	t.Helper()
	var trace bytes.Buffer
	if err := run.WriteArrivals(&trace); err != nil {
		t.Fatal(err)
	}
	s.Seeds = cmp.Or(s.Seeds, 1)
	m, err := s.Model(func(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(trace.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// near reports whether two numbers differ by at most a part of the second one.
func near(got, want, part float64) bool { return got >= want*(1-part) && got <= want*(1+part) }

// TestARealRunIsSimulatedAsItWas compares what happened with a simulation under the same policies.
// docs/howto-simulate.md says why it is not nearer.
func TestARealRunIsSimulatedAsItWas(t *testing.T) {
	t.Parallel()
	run := mustRead(t, realRecord(t), Options{Trace: "x"})
	run.Scenario.Seeds = 5
	if len(run.Notes) > 0 || len(run.Outcome.Pipelines) != 1 {
		t.Fatalf("notes %q, pipelines %+v, want film, and nothing assumed", run.Notes, run.Outcome.Pipelines)
	}
	r := simulate(t, run, run.Scenario)
	was, is := run.Outcome.Pipelines[0], r.Policies[0].Pipelines[0]
	cost := r.Policies[0].ReplicaSeconds.Mean
	t.Logf("mean %.3f s and %.3f s, p50 %.3f and %.3f, p95 %.3f and %.3f, in time %.3f and %.3f, replica-seconds %.0f and %.0f",
		was.Mean, is.Mean.Mean, was.P50, is.P50.Mean, was.P95, is.P95.Mean, was.InTime, is.Attainment.Mean, was.ReplicaSeconds, cost)
	if was.Requests < 500 || is.Offered.Mean != float64(was.Requests) {
		t.Errorf("%d requests, simulated %v", was.Requests, is.Offered.Mean)
	}
	if !near(is.Mean.Mean, was.Mean, 0.15) || !near(is.P50.Mean, was.P50, 0.15) || !near(is.P95.Mean, was.P95, 0.2) || !near(cost, was.ReplicaSeconds, 0.1) ||
		math.Abs(is.Attainment.Mean-was.InTime) > 0.1 {
		t.Errorf("simulated mean %v, p50 %v, replica-seconds %v; was %+v", is.Mean.Mean, is.P50.Mean, cost, was)
	}
	if static := r.Policies[1]; static.Name != "static" || !near(static.ReplicaSeconds.Mean, was.ReplicaSeconds, 0.1) {
		t.Errorf("%s with %v replica-seconds, want static near %v", static.Name, static.ReplicaSeconds.Mean, was.ReplicaSeconds)
	}
}

// withoutTraffic turns a record into one of an earlier version, which counted no requests.
func withoutTraffic(t *testing.T, record []byte) []byte {
	t.Helper()
	var out []byte
	for line := range bytes.Lines(record) {
		at := bytes.Index(line, []byte(`,"traffic":`))
		if at < 0 {
			t.Fatal("no traffic in the record")
		}
		out = append(append(out, line[:at]...), "}\n"...)
	}
	return out
}

// TestOldRecordsGiveArrivalsOfMeasuredRates checks a record without counts.
func TestOldRecordsGiveArrivalsOfMeasuredRates(t *testing.T) {
	t.Parallel()
	counted := mustRead(t, realRecord(t), Options{Trace: "x"})
	run := mustRead(t, withoutTraffic(t, realRecord(t)), Options{Trace: "x"})
	if len(run.Notes) != 1 || !strings.Contains(run.Notes[0], "made from measured rates") {
		t.Errorf("notes %q", run.Notes)
	}
	if p := run.Outcome.Pipelines[0]; p.Counted || !near(float64(p.Requests), float64(counted.Outcome.Pipelines[0].Requests), 0.2) {
		t.Errorf("%+v, want about %d requests", p, counted.Outcome.Pipelines[0].Requests)
	}
	if a := run.Arrivals; !slices.IsSortedFunc(a, func(a, b Arrival) int { return int(a.At - b.At) }) || a[len(a)-1].At > run.Scenario.Duration {
		t.Error("arrivals are not in order, or come after the end")
	}
	var text bytes.Buffer
	if err := run.Report(simulate(t, run, run.Scenario)).WriteText(&text); err != nil || !strings.Contains(text.String(), "what happened       film") || strings.Count(text.String(), "      -") < 6 {
		t.Errorf("%v:\n%s", err, text.String())
	}
}

// TestTheScenarioOfARecordIsAnOrdinaryOne checks that a written scenario reads as it was.
func TestTheScenarioOfARecordIsAnOrdinaryOne(t *testing.T) {
	t.Parallel()
	for name, record := range map[string][]byte{"real": realRecord(t), "made up": madeUp()} {
		run := mustRead(t, record, Options{Trace: "x.csv", Policies: []string{"recorded", "static", "quart", "uniform", "rank=fair,corrector=none", "price=0.5"}})
		var text bytes.Buffer
		if err := run.WriteScenario(&text, "a\nb"); err != nil {
			t.Fatal(err)
		}
		again, err := sim.Parse(&text)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text.String())
		}
		if !reflect.DeepEqual(again, run.Scenario) {
			t.Errorf("%s: got %+v\nwant %+v", name, again, run.Scenario)
		}
		first, second := simulate(t, run, run.Scenario), simulate(t, run, again)
		if !reflect.DeepEqual(first, second) {
			t.Errorf("%s: the written scenario has another result", name)
		}
	}
}

// TestBadRecordsAreRefused checks that errors name the line and say what to do.
func TestBadRecordsAreRefused(t *testing.T) {
	t.Parallel()
	record := realRecord(t)
	lines := slices.Collect(bytes.Lines(record))
	join := func(all ...[]byte) []byte { return bytes.Join(all, nil) }
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := z.Write(record); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	change := func(from, to string) []byte { return bytes.Replace(lines[1], []byte(from), []byte(to), 1) }
	for name, tc := range map[string]struct {
		record  []byte
		options Options
		want    string
	}{
		"empty":            {nil, Options{}, "0 decisions, want at least 2"},
		"one line":         {lines[3], Options{}, "1 decisions, want at least 2"},
		"cut off":          {join(lines[0], lines[1], lines[2][:900]), Options{}, "line 3: no line of a record, or one cut short: unexpected end of JSON input; delete the line"},
		"cut in a line":    {join(lines[0], lines[1][:900], []byte("\n"), lines[2]), Options{}, "line 2: no line of a record"},
		"zipped, cut off":  {zipped.Bytes()[:zipped.Len()/2], Options{}, "the gzipped file ends in the middle: copy it again"},
		"another version":  {join(lines[0], change(`{"version":1,`, `{"version":7,`)), Options{}, "line 2: version 7, want 1: use the stagecoach that recorded it"},
		"an unknown field": {join(lines[0], change(`{"version":1,`, `{"version":1,"mood":2,`)), Options{}, `line 2: json: unknown field "mood"`},
		"wrong order":      {join(lines[4], lines[3]), Options{}, "line 2: of 20"},
		"no such pipeline": {record, Options{Pipeline: "flim"}, `no pipeline "flim" in the record, want one of: `},
		"no request":       {join(lines[0], bytes.ReplaceAll(lines[0], []byte(`"Rev":1`), []byte(`"Rev":2`))), Options{}, "no request in 2 lines"},
		"no policy":        {record, Options{Policies: []string{"guess"}}, `policy "guess", want recorded, static, quart, LEVEL=NAME,…, or an allocator: `},
		"no level":         {record, Options{Policies: []string{"alocator=sizer"}}, `no level "alocator"`},
		"no price":         {record, Options{Policies: []string{"price=much"}}, `price "much", want a number`},
		"a negative price": {record, Options{Policies: []string{"rank=fair,price=-1"}}, "policy: price -1, want 0 to 1000000"},
		"gaps":             {join(lines[0], change(`"arrived":`, `"arrived":9`)), Options{}, "line 2: traffic of \"film.openfaas-fn\": "},
		"a negative count": {join(lines[0], change(`"failed":`, `"failed":-1`)), Options{}, "a negative number of requests; delete the line"},
		"an edge to none":  {join(lines[0], change(`"Edges":[{"From":0,"To":1}`, `"Edges":[{"From":0,"To":9}`)), Options{}, "line 2: pipeline \"film.openfaas-fn\" has no stages, or an edge"},
	} {
		if _, err := Read(bytes.NewReader(tc.record), tc.options); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
	whole := mustRead(t, record, Options{Trace: "x"})
	if got := mustRead(t, zipped.Bytes(), Options{Trace: "x"}); !reflect.DeepEqual(got, whole) {
		t.Error("a gzipped record reads as another one")
	}
}

// TestTheChartShowsBoth checks the panels of the chart.
func TestTheChartShowsBoth(t *testing.T) {
	t.Parallel()
	run := mustRead(t, realRecord(t), Options{Trace: "x"})
	var svg bytes.Buffer
	if err := run.Report(simulate(t, run, run.Scenario)).WriteSVG(&svg); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"requests/s, recorded and simulated", "latency, mean in s", "recorded film", "replicas of cut", "replicas of print", "what happened", ">static<"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("no %q in the chart", want)
		}
	}
	for d := xml.NewDecoder(&svg); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := (Report{}).WriteSVG(io.Discard); err == nil {
		t.Error("a chart of nothing")
	}
}

// FuzzRead checks that no record causes a panic.
func FuzzRead(f *testing.F) {
	f.Add(madeUp())
	f.Add([]byte("{}\n{\"version\":7}\nx"))
	f.Fuzz(func(t *testing.T, record []byte) {
		run, err := Read(bytes.NewReader(record), Options{Trace: "x"})
		if (run == nil) == (err == nil) {
			t.Errorf("%v with %v", run, err)
		}
		if run != nil {
			if err := errors.Join(run.WriteScenario(io.Discard, ""), run.WriteArrivals(io.Discard)); err != nil {
				t.Error(err)
			}
		}
	})
}

func ExampleReport_WriteText() {
	r := Report{
		Notes: []string{"Something is assumed."},
		Recorded: Outcome{Pipelines: []PipelineOutcome{
			{Name: "film", Requests: 1100, Counted: true, InTime: 0.9664, Mean: 0.219, P50: 0.2031, P95: 0.289, P99: 0.679, ReplicaSeconds: 678.4},
			{Name: "mail", Requests: 9, ReplicaSeconds: 60},
		}},
	}
	_ = r.WriteText(os.Stdout)
	fmt.Println("end")
	// Output:
	// Note: Something is assumed.
	//
	// RUN            PIPELINE  REQUESTS  IN TIME  MEAN   P50    P95    P99    FAILED  REPLICA-SECONDS
	// what happened  film      1100      96.6 %   219ms  203ms  289ms  679ms  0.0 %   678
	// what happened  mail      9         -        -      -      -      -      -       60
	// end
}

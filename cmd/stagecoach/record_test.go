package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/sim/recorded"
)

// envRecord names the file that `make record` writes: autoscaler/testdata/record.jsonl.
const envRecord = "STAGECOACH_RECORD"

// recordSize bounds that file, in bytes.
const recordSize = 300 << 10

// TestDecisionsOfARealRunAreMadeAgain makes up record its decisions for a pipeline under a burst,
// calls explain, and replays the record.
func TestDecisionsOfARealRunAreMadeAgain(t *testing.T) {
	dir := t.TempDir()
	config, file := filepath.Join(dir, "up.yml"), filepath.Join(dir, "record.jsonl")
	if err := os.WriteFile(config, []byte("node: {name: one}\ncontrol: {record: "+file+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--config", config)
	wait := func(name, mean string, annotations map[string]string) fn {
		return fn{name, "wait", map[string]string{"max": "6"}, annotations, map[string]string{"wait_mean": mean, "wait_cv": "0"}}
	}
	r.deployAll(
		wait("cut", "20ms", map[string]string{"pipeline": "film", "next": "grade, mix", "slo": "300ms"}),
		wait("grade", "100ms", map[string]string{"pipeline": "film", "next": "print"}),
		wait("mix", "30ms", map[string]string{"pipeline": "film", "next": "print"}),
		wait("print", "40ms", map[string]string{"pipeline": "film"}),
		wait("broken", "9h", nil), // which it refuses
	)
	why := func(name string) (x schema.Explanation) {
		a := r.must(http.StatusOK, http.MethodGet, "/system/pipelines/"+name+"/explain", "")
		if err := json.Unmarshal(a.Body, &x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	stage := func(name string) schema.ExplainedStage {
		all := why("film").Stages
		i := slices.IndexFunc(all, func(s schema.ExplainedStage) bool { return s.Name == name })
		if i < 0 {
			t.Fatalf("no stage %q in %+v", name, all)
		}
		return all[i]
	}
	// for so long, where a record is made; a test has no time for it
	lasting := func(d time.Duration) {
		if end := time.Now().Add(d); os.Getenv(envRecord) != "" {
			r.until(d+soon, d.String(), func() bool { return time.Now().After(end) })
		}
	}
	ok := func(_ string, a client.Answer) error { return nil } // under a burst some are refused

	r.until(late, "every stage to have a replica", func() bool {
		return !slices.ContainsFunc(why("film").Stages, func(s schema.ExplainedStage) bool { return s.Ready == 0 })
	})
	calm := r.load(1, "/function/film", ok)
	calm.turn()
	lasting(5 * time.Second)
	burst := func() func() {
		l := r.load(12, "/function/film", ok)
		return func() { l.end() }
	}
	if os.Getenv(envRecord) != "" {
		burst = func() func() { return openBurst(t, r.Base) }
	}
	endBurst := burst()
	var grade schema.ExplainedStage
	r.until(late, "the slowest stage to be the key stage, to have more replicas, and to be known", func() bool {
		grade = stage("grade")
		return grade.Ready > 1 && grade.Wanted > 1 && grade.Key && grade.Service != "" && grade.Rate != nil
	})
	lasting(15 * time.Second)
	if !strings.Contains(grade.Why, "max 6") {
		t.Errorf("%+v, want why", grade)
	}
	var table bytes.Buffer
	r.until(late, "the model's terms of the slowest stage", func() bool {
		table.Reset()
		if err := run(t.Context(), []string{"explain", "--gateway", r.Base, "film"}, &table); err != nil {
			t.Fatal(err)
		}
		grade = stage("grade")
		return grade.Load != nil && grade.Stayed != "" && grade.Batch == 1 && (grade.Predicted != "" && grade.Error != nil || grade.NoPrediction != "")
	})
	if !strings.Contains(table.String(), "STAGE  RATE") || !strings.Contains(table.String(), "PREDICTED") {
		t.Errorf("no terms in\n%s", table.String())
	}
	endBurst()
	lasting(40 * time.Second)
	calm.end()

	r.until(late, "broken's starts to have failed", func() bool { return why("broken").Stages[0].Failing != nil })
	var out bytes.Buffer
	if err := run(t.Context(), []string{"explain", "--gateway", r.Base, "broken"}, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Pipeline:  broken.openfaas-fn", "Note:", " failed, the next is tried ", `wait_mean="9h"`, "WHY"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if err := run(t.Context(), []string{"explain", "--gateway", r.Base, "nobody"}, &out); err == nil || !strings.Contains(err.Error(), `no pipeline or function "nobody"`) {
		t.Errorf("a pipeline that is not there: %v", err)
	}
	for _, sample := range []string{`stagecoach_control_wanted_replicas{function="grade.openfaas-fn"}`, `stagecoach_control_key_stage{function="grade.openfaas-fn"}`} {
		if r.value(sample) < 1 {
			t.Errorf("%s: %v, want one at least", sample, r.value(sample))
		}
	}
	if kl := r.value("stagecoach_control_key_stage_kl"); kl != 0 {
		t.Errorf("key stages on one node diverge by %v, want 0", kl)
	}
	r.stop()

	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := run(t.Context(), []string{"replay", file}, &out); err != nil || !strings.Contains(out.String(), " decisions made again: each as it was") {
		t.Errorf("%v\n%s", err, out.String())
	}
	simulateRecord(t, file)
	changed := bytes.Replace(b, []byte("max 6"), []byte("max 7"), 1)
	if err := os.WriteFile(file, append(changed, `{"version":9}`...), 0o600); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	err = run(t.Context(), []string{"replay", file, "--json"}, &out)
	if err == nil || console.StatusOf(err) != 1 {
		t.Errorf("%v, status %d, want 1", err, console.StatusOf(err))
	}
	var got control.Replay
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got.Diffs) != 1 || got.Diffs[0].Field != "why" || len(got.Unread) != 1 {
		t.Errorf("%v: %s, want one difference and one line unread", err, out.Bytes())
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), []string{"replay", file}, &out); err == nil || !strings.Contains(err.Error(), "no decision in it") {
		t.Errorf("a record of nothing: %v", err)
	}
	if to := os.Getenv(envRecord); to != "" {
		keep(t, b, to)
	}
}

// openBurst begins a burst for a record. Its requests do not wait for answers, so that they come at
// the same times whatever a policy does. The result waits for its end.
func openBurst(t *testing.T, gateway string) func() {
	done := make(chan error, 1)
	go func() {
		done <- run(t.Context(), []string{"load", "film", "--gateway", gateway, "--rate", "40:18s", "--cv", "1.5", "--quiet", "--allow-errors"}, io.Discard)
	}()
	return func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// simulateRecord takes the record of film as load, and compares what was counted with a simulation.
func simulateRecord(t *testing.T, file string) {
	t.Helper()
	var out bytes.Buffer
	if err := run(t.Context(), []string{"sim", "--recorded", file, "--pipeline", "film", "--seeds", "1", "--quiet", "--json", "-"}, &out); err != nil {
		t.Fatal(err)
	}
	var got recorded.Report
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Recorded.Pipelines) != 1 || len(got.Notes) > 0 {
		t.Fatalf("pipelines %+v, notes %q, want film alone, and nothing assumed", got.Recorded.Pipelines, got.Notes)
	}
	was := got.Recorded.Pipelines[0]
	if is := got.Simulated.Policies[0].Pipelines[0]; !was.Counted || was.Requests < 10 || is.Offered.Mean != float64(was.Requests) || was.Mean < 0.1 || was.P99 < was.P50 {
		t.Errorf("recorded %+v, simulated %+v, want the same requests, of 160 ms or more", was, is)
	}
}

// keep writes a part of a record that has room, its lines at even distances. The traffic of the
// lines in between is added to that of the next line.
func keep(t *testing.T, text []byte, file string) {
	t.Helper()
	lines := bytes.SplitAfter(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	every := 1 + len(text)/(recordSize*9/10)
	var out []byte
	var traffic *record.Traffic
	kept := 0
	for i := range lines {
		l, err := record.Decode(lines[i])
		if err != nil {
			t.Fatal(err)
		}
		traffic = join(traffic, l.Traffic)
		if i%every != 0 && i != len(lines)-1 {
			continue
		}
		l.Traffic, traffic = traffic, nil
		line, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		out, kept = append(append(out, line...), '\n'), kept+1
	}
	if err := os.WriteFile(file, out, 0o644); err != nil { //nolint:gosec // it is committed
		t.Fatal(err)
	}
	t.Logf("%d of %d decisions, %d of %d bytes, in %s", kept, len(lines), len(out), len(text), file)
}

// join returns the traffic of two consecutive times.
func join(a, b *record.Traffic) *record.Traffic {
	if a == nil {
		return b
	}
	for i := range b.Apps {
		x := &b.Apps[i]
		k := slices.IndexFunc(a.Apps, func(y record.App) bool { return y.Name == x.Name })
		if k < 0 {
			k = len(a.Apps)
			a.Apps = append(a.Apps, record.App{Name: x.Name})
		}
		y := &a.Apps[k]
		if len(x.Gaps) > 0 {
			x.Gaps[0] += b.From.Sub(a.From).Microseconds()
			for _, gap := range y.Gaps {
				x.Gaps[0] -= gap
			}
			y.Gaps = append(y.Gaps, x.Gaps...)
		}
		y.Arrived, y.Answered, y.InTime, y.Failed, y.Sum = y.Arrived+x.Arrived, y.Answered+x.Answered, y.InTime+x.InTime, y.Failed+x.Failed, y.Sum+x.Sum
		y.Latencies = append(y.Latencies, x.Latencies...)
	}
	a.To = b.To
	return a
}

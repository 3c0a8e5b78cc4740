package quart

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// each returns a sample of n seeds with nearly equal values. One seed's is slightly off.
func each(n int, v float64) study.Sample {
	s := study.Sample{Seeds: slices.Repeat([]float64{v}, n), Mean: v, CI: v / 100}
	s.Seeds[0] *= 1.01
	return s
}

// made returns an invented result of the whole study, with settings of two more traces.
func made(t *testing.T) *study.Result {
	t.Helper()
	s, err := Full(none)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range Models() {
		for _, group := range []string{"azure-code", "azure-conv"} {
			if group == "azure-code" || tunedOn(m) { // the second trace has few models
				s.Settings = append(s.Settings, study.Setting{Name: m.Name + " " + group, Model: m.Name, Group: group, Service: m.Time, Train: tunedOn(m)})
			}
		}
	}
	r := invented(&s)
	r.Tuned.Choices = []study.Choice{{Group: "cv=4", Contender: oursName, Knobs: []string{"drain_s"}, Chosen: 1, Points: []study.Point{{Knobs: []float64{1}, GPUs: 20, Score: 1}, {Knobs: []float64{2}, GPUs: 22, Score: math.Log(1.5)}}}}
	return r
}

// invented returns a result of a study. The k-th contender takes 1 + k/10 times T on average, and
// has 10 + k GPUs.
func invented(s *study.Study) *study.Result {
	r := &study.Result{Ours: s.Ours, Budget: s.Budget, Seeds: s.Test, Multiples: s.Multiples, Objective: s.Objective}
	r.Tuned = study.Tuned{Budget: s.Budget, Candidates: 2, Seeds: s.Train}
	for _, c := range s.Contenders {
		r.Contenders = append(r.Contenders, study.ContendInfo{Name: c.Name, Title: c.Title, Like: c.Like, Oracle: c.Oracle, Ours: c.Ours})
	}
	for _, x := range s.Settings {
		service := x.Service.Seconds()
		r.Settings = append(r.Settings, study.SettingInfo{Name: x.Name, Model: x.Model, Group: x.Group, Service: service, Seconds: 180})
		for k, c := range s.Contenders {
			if c.In != nil && !c.In(x) {
				continue
			}
			n, f := s.Test.N, 1+float64(k)/10
			o := study.Outcome{
				Setting: x.Name, Contender: c.Name, Mean: each(n, service*f), P50: each(n, service*f/2), P75: each(n, service*f*2), P99: each(n, service*f*4),
				Goodput: each(n, 12/f), GPUs: each(n, 10+float64(k)), GPUSeconds: each(n, 180*(10+float64(k))), Requests: each(n, 1000), Failed: each(n, 0),
			}
			for _, m := range s.Multiples {
				o.InTime = append(o.InTime, each(n, 1-math.Exp(-m/f)))
			}
			parts := []string{"s1", "s2"}
			if strings.Contains(c.Title, "INFless") {
				parts = []string{"whole"}
			}
			for i, p := range parts {
				o.Stages = append(o.Stages, study.StageOutcome{Name: p, Queue: each(n, f*float64(i+1)), CV: each(n, float64(i+1)/2)})
			}
			r.Outcomes = append(r.Outcomes, o)
		}
	}
	return r
}

// drawn returns the figures of a result, by name.
func drawn(t *testing.T, r *study.Result, draw func(*study.Result) ([]study.Figure, error)) map[string]string {
	t.Helper()
	figures, err := draw(r)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range figures {
		if out[f.Name] != "" || f.Title == "" {
			t.Errorf("figure %q: twice, or without a title", f.Name)
		}
		out[f.Name] = string(f.SVG)
		for d := xml.NewDecoder(strings.NewReader(string(f.SVG))); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("figure %q: %v", f.Name, err)
			}
		}
	}
	return out
}

func has(t *testing.T, figures map[string]string, name string, texts ...string) {
	t.Helper()
	for _, s := range texts {
		if !strings.Contains(figures["quart-"+name], s) {
			t.Errorf("figure %s has no %q", name, s)
		}
	}
}

func TestFigures(t *testing.T) {
	r := made(t)
	set := func(setting, contender string, change func(o *study.Outcome)) {
		o := r.Outcome(setting, contender)
		if o == nil {
			t.Fatalf("%s was not on %s", contender, setting)
		}
		change(o)
	}
	n := r.Seeds.N
	for i, m := range Models() { // 1, 4, 16, 64, 256: 16 on average of logarithms
		set(m.Name+" cv=4", oursName, func(o *study.Outcome) { o.Mean = each(n, m.Time.Seconds()*math.Pow(4, float64(i))) })
	}
	set(bert+" cv=8", "kpa", func(o *study.Outcome) { o.Mean, o.Failed = each(n, 30), each(n, 1) })
	set(bert+" cv=2", "kpa", func(o *study.Outcome) { o.Failed = each(n, 0.002) })
	set(bert+" cv=2", "hpa", func(o *study.Outcome) { o.Untuned = true })
	for _, x := range r.Settings {
		if x.Group == dissected[0] && r.Outcome(x.Name, "no-pid") != nil {
			whole := r.Outcome(x.Name, oursName).Mean.Mean
			set(x.Name, "no-pid", func(o *study.Outcome) { o.Mean = each(n, 3*whole) })
		}
	}
	got := drawn(t, r, draw)
	for _, name := range []string{"azure-code-latency", "azure-code-in-time", "traces-latency", "traces-in-time", "cv", "cv-latency", "cv-goodput", "cv-quantiles", "cv-queues", "observed", "versus", "sweep", "ablations"} {
		if got["quart-"+name] == "" {
			t.Errorf("no figure %s", name)
		}
	}
	if len(got) != 13 {
		t.Errorf("%d figures, want 13", len(got))
	}
	has(t, got, "cv", "Stagecoach, CV 4: 16 (16 to 16.1)", "Knative KPA, CV 2: 1.3†", "Kubernetes HPA, CV 2: 1.2‡", "budget", "Models: BERT-21B, ", "Simulated")
	has(t, got, "cv-latency", "seconds")
	has(t, got, "cv-latency", ">Knative KPA, CV 8: 30†")
	has(t, got, "cv-quantiles", "Knative KPA, p99: 5.2")
	has(t, got, "cv-queues", "Knative KPA, CV 1: 3.9", "Knative KPA, s2: 2.6")
	has(t, got, "observed", ">"+fiveStages+"0.1, s2: 1 (")
	has(t, got, "ablations", "no PID, "+axisLabel(dissected[0])+": 3 ", "whole")
	has(t, got, "sweep", "Stagecoach, drain_s 2", "budget: 24 GPUs")
	has(t, got, "versus", "azure-conv", "OPT-66B", "n/a")
	has(t, got, "azure-code-latency", "Stagecoach, BERT-21B: ", "Scaled to the same mean load; each seed")
	has(t, got, "traces-in-time", "BERT-21B azure-conv", "objective, multiples of T = 137 ms")
}

// TestFigureOfTheSweeps checks that each point of each sweep has its place in the figure.
func TestFigureOfTheSweeps(t *testing.T) {
	s := sweeps()
	r := invented(s)
	for k, x := range s.Settings {
		r.Outcome(x.Name, oursName).Mean = each(r.Seeds.N, x.Service.Seconds()*float64(2+k))
	}
	got := drawn(t, r, drawSweeps)
	if len(got) != 1 {
		t.Errorf("%d figures, want one", len(got))
	}
	for k, x := range s.Settings {
		label := strings.TrimPrefix(x.Group, sweepGaps)
		for _, begin := range []string{sweepStarts, sweepCores, sweepLoad, sweepShape, sweepMemory} {
			label = strings.TrimPrefix(label, begin)
		}
		has(t, got, "conditions", fmt.Sprintf("Stagecoach, %s: %d", label, 2+k))
	}
	has(t, got, "conditions", "Mean latency by memory per server", "GPUs by CV of the gaps", "budget")
	if got, err := drawSweeps(&study.Result{}); len(got) != 0 || err != nil {
		t.Errorf("%d figures of nothing, %v", len(got), err)
	}
}

func TestFiguresOfALittle(t *testing.T) {
	r := made(t)
	r.Settings = slices.DeleteFunc(r.Settings, func(s study.SettingInfo) bool { return s.Group != observed })
	r.Outcomes, r.Tuned = nil, study.Tuned{}
	if got := drawn(t, r, draw); len(got) != 0 {
		t.Errorf("%d figures of settings without outcomes, want none", len(got))
	}
	if _, err := draw(&study.Result{}); err != nil {
		t.Errorf("of nothing: %v", err)
	}
}

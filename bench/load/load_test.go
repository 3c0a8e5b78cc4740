package load

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestQuantilesThatASampleCannotCarryAreLeftOut(t *testing.T) {
	for n, want := range map[int]string{
		0: "", 4: "", 5: "p50", 29: "p50 p75 p90", 58: "p50 p75 p90", 59: "p50 p75 p90 p95", 299: "p50 p75 p90 p95 p99", 2994: "p50 p75 p90 p95 p99", 2995: "p50 p75 p90 p95 p99 p999",
	} {
		h := newHistogram()
		for i := range n {
			record(h, time.Duration(i+1)*time.Millisecond)
		}
		l := latencyOf(h)
		var got []string
		v := reflect.ValueOf(l)
		for i := range v.NumField() {
			if f := v.Field(i); f.Kind() == reflect.Pointer && !f.IsNil() {
				got = append(got, strings.ToLower(v.Type().Field(i).Name))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%d observations: %v, want %s", n, got, want)
		}
		if n == 299 && (*l.P50 < 0.1495 || *l.P50 > 0.1506 || *l.P99 < 0.296 || *l.P99 > 0.2975 || l.Max < 0.2985) {
			t.Errorf("of 1 to 299 ms: %g %g %g", *l.P50, *l.P99, l.Max)
		}
	}
}

func TestServerTiming(t *testing.T) {
	got := ServerTiming(`cache;dur=3, a.b.wait;dur=1, a.b.service;dur=2.5, r.wait;dur=7;desc="18 calls", r.service;dur=900;desc="18 calls", x.wait;dur=1e`)
	want := []StageTime{{"a.b", 1, time.Millisecond, 2500 * time.Microsecond}, {"r", 18, 7 * time.Millisecond, 900 * time.Millisecond}, {"x", 1, time.Millisecond, 0}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestBodies(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.png": "\x89PNG", "b.json": "{}", ".hidden": "no"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		b     Body
		want  []string // first bodies
		types string
	}{
		"nothing":    {Body{}, []string{"", ""}, "application/octet-stream"},
		"text":       {Body{Text: "hi"}, []string{"hi", "hi"}, "text/plain; charset=utf-8"},
		"JSON":       {Body{Text: ` {"a": 1}`}, []string{` {"a": 1}`}, "application/json"},
		"not JSON":   {Body{Text: `{a`}, []string{`{a`}, "text/plain; charset=utf-8"},
		"given":      {Body{Text: "hi", ContentType: "x/y"}, []string{"hi"}, "x/y"},
		"file":       {Body{File: filepath.Join(dir, "a.png")}, []string{"\x89PNG", "\x89PNG"}, "image/png"},
		"folder":     {Body{Folder: dir}, []string{"\x89PNG", "{}", "\x89PNG"}, "image/png"},
		"template":   {Body{Template: `{"n": {{counter}}, "w": "{{words 2}}", "i": {{int 3 3}}}`}, []string{"", ""}, "application/json"},
		"template 2": {Body{Template: `{{counter}}`}, []string{"0", "1", "2"}, "text/plain; charset=utf-8"},
		"random":     {Body{Random: 64}, []string{"", ""}, "application/octet-stream"},
		"any file":   {Body{Folder: dir, Order: "random"}, []string{"", "", "", ""}, ""},
	} {
		p, err := tc.b.payload(5)
		q, err2 := tc.b.payload(5)
		if err != nil || err2 != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var all []string
		for i, want := range tc.want {
			body, ct, err := p()
			again, _, _ := q()
			if err != nil || want != "" && string(body) != want || !bytes.Equal(body, again) || i == 0 && tc.types != "" && ct != tc.types {
				t.Errorf("%s, body %d: %q (%s), again %q, %v", name, i, body, ct, again, err)
			}
			if ct == "application/json" && !json.Valid(body) {
				t.Errorf("%s: %s", name, body)
			}
			all = append(all, string(body))
		}
		if name == "random" && (len(all[0]) != 64 || all[0] == all[1]) || name == "template" && all[0] == all[1] {
			t.Errorf("%s: %q", name, all)
		}
	}
	for want, b := range map[string]Body{
		"want one of":                            {Text: "a", Random: 1},
		"order":                                  {Text: "a", Order: "turn"},
		"-1 bytes":                               {Random: -1},
		"no such file":                           {File: filepath.Join(dir, "c")},
		"no files":                               {Folder: t.TempDir()},
		"not defined":                            {Template: "{{nothing}}"},
		"/dev/zero: want at most 67108864 bytes": {File: "/dev/zero"},
		"ascending":                              {Template: "{{int 4 3}}"},
		"want 0 to 10000":                        {Template: "{{words -1}}"},
	} {
		if _, err := b.payload(1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", b, err, want)
		}
	}
}

const scenarioText = `
gateway: http://127.0.0.1:8080
rate: 2:10s,30:20s
seed: 4
slo: 2s
targets:
  - {function: ocr, weight: 2, cv: 4, body: {text: hi}}
  - {function: small, body: {random: 100}, timeout: 5s}
  - {function: small, name: bursts, mmpp: "5:10s,50:2s", async: true, headers: {x-a: b}}
  - {function: other, trace: {file: trace.csv, from: 1s, to: 3s, speed: 2, scale: 0.5}, slo: 1s}
`

func TestScenario(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "trace.csv"), []byte("5\n6\n7\n8\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := ReadScenario(strings.NewReader(scenarioText))
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.Config(dir)
	if err != nil {
		t.Fatal(err)
	}
	if c.Duration != 30*time.Second || c.MaxInFlight != 1000 || c.Seed != 4 || len(c.Targets) != 4 {
		t.Fatalf("%+v", c)
	}
	want := []string{
		"1.3333333333333333:10s,20:20s per second, cv 4", "0.6666666666666666:10s,10:20s per second, cv 1", "MMPP 5:10s,50:2s, 12.5/s on average",
		"trace trace.csv from 1s for 2s, speed 2, scale 0.5, 6.5/s on average",
	}
	for i, x := range c.Targets {
		if x.Process != want[i] {
			t.Errorf("target %d: %s, want %s", i, x.Process, want[i])
		}
	}
	if x := c.Targets[1]; x.SLO != 2*time.Second || x.Timeout != 5*time.Second || x.Name != "small" || c.Targets[0].Timeout != 30*time.Second {
		t.Errorf("%+v", x)
	}
	if x := c.Targets[2]; x.Name != "bursts" || !x.Async || x.Header.Get("X-A") != "b" {
		t.Errorf("%+v", x)
	}
}

func TestScenarioSaysWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"targets: [{function: f, rat: 3}]":                     "rat",
		"targets: []":                                          "targets: got none",
		"targets: [{function: f}]":                             "targets[0].rate: got none",
		"targets: [{rate: 1}]":                                 "targets[0].function",
		"targets: [{function: f, rate: x}]":                    "targets[0].rate: rate \"x\"",
		"targets: [{function: f, rate: 1, cv: 99}]":            "targets[0].cv: cv 99",
		"targets: [{function: f, rate: 1, mmpp: '1:1s'}]":      "want one of rate, mmpp and trace",
		"targets: [{function: f, mmpp: '1:1s'}]":               "targets[0].mmpp",
		"targets: [{function: f, mmpp: '1:1s,2:1s', cv: 1}]":   "targets[0].cv",
		"targets: [{function: f, trace: {file: /none}}]":       "targets[0].trace: open /none",
		"targets: [{function: f, rate: 1, weight: -1}]":        "targets[0].weight",
		"targets: [{function: f, rate: 1, timeout: -1s}]":      "targets[0].timeout",
		"targets: [{function: f, rate: 1, body: {file: /no}}]": "targets[0].body",
		"rate: 1\ntargets: [{function: f}, {function: f}]":     `targets[1].name: "f" twice`,
		"maxInFlight: -1\ntargets: [{function: f, rate: 1}]":   "maxInFlight",
		"gateway: nowhere\ntargets: [{function: f, rate: 1}]":  "gateway",
		"duration: -1s\ntargets: [{function: f, rate: 1}]":     "duration",
		"duration: soon\ntargets: [{function: f, rate: 1}]":    "soon",
	} {
		if !strings.Contains(text, "gateway") {
			text = "gateway: http://h\n" + text
		}
		s, err := ReadScenario(strings.NewReader(text))
		if err == nil {
			_, err = s.Config("")
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v, want %q", text, err, want)
		}
	}
}

func FuzzServerTiming(f *testing.F) {
	f.Add(`a.wait;dur=1.5, a.service;dur=2;desc="3 calls"`)
	f.Add("")
	f.Fuzz(func(t *testing.T, header string) {
		for _, s := range ServerTiming(header) {
			if s.Stage == "" || s.Wait < 0 || s.Service < 0 {
				t.Fatalf("%q: %+v", header, s)
			}
		}
	})
}

func FuzzReadMetrics(f *testing.F) {
	f.Add("gateway_service_count{function_name=\"a.b\"} 2\n")
	f.Fuzz(func(t *testing.T, text string) { readMetrics(text) })
}

func FuzzReadScenario(f *testing.F) {
	f.Add(scenarioText)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ReadScenario(strings.NewReader(text))
		if err != nil {
			return
		}
		for i := range s.Targets { // uses nothing of this machine
			s.Targets[i].Trace.File, s.Targets[i].Body = "", Body{}
		}
		_, _ = s.Config("")
	})
}

func TestReadResult(t *testing.T) {
	if _, err := ReadResult(strings.NewReader(`{"schema": "other/2"}`)); err == nil || !strings.Contains(err.Error(), `schema "other/2"`) {
		t.Error(err)
	}
	if r, err := ReadResult(strings.NewReader(`{"schema": "stagecoach.load/1", "duration_s": 3, "new": 1}`)); err != nil || r.Duration != 3 {
		t.Error(err)
	}
}

func TestKindsBeyondTheBoundAreOthers(t *testing.T) {
	a, total := newRecorder("a", 0), newRecorder("total", 0)
	for i := range 2 * maxKinds {
		a.ended(outcome{kind: fmt.Sprintf("callback with status %d", i)})
	}
	b := newRecorder("b", 0)
	b.ended(outcome{kind: "status 599"})
	total.merge(a)
	total.merge(b)
	sum := int64(0)
	for _, k := range total.kinds() {
		sum += k.Count
	}
	if n := len(total.errors); n > maxKinds+1 || sum != 2*maxKinds+1 {
		t.Errorf("%d kinds of %d failures, want at most %d of %d", n, sum, maxKinds+1, 2*maxKinds+1)
	}
}

func TestATargetsContentTypeIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := Target{Name: "a", Function: "f", Source: even(t, "1"), Timeout: time.Second, Header: http.Header{"Content-Type": {"x/y"}}}
		cfg := config(t, "http://bubble", a)
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			if ct := r.Header.Get("Content-Type"); r.Method == http.MethodPost && ct != "x/y" {
				t.Errorf("content type %q, want that of the target", ct)
			}
			return says(200, ""), nil
		})
		if r := must(t, cfg); r.Total.Answered == 0 {
			t.Errorf("%+v", r.Total)
		}
	})
}

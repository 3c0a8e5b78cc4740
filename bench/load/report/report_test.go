package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load"
)

func ptr(v float64) *float64 { return &v }

func result() load.Result {
	f := load.Figures{
		Name: "ocr <b>", Function: "ocr", Process: "2:10s,20:10s/s, cv 1", SLO: 0.5, Offered: 220, Sent: 218, NotSent: 2, Answered: 210, Failed: 8, Good: 180,
		OfferedRate: 11, AnsweredRate: 10.5, Goodput: 9, Attainment: 180.0 / 220,
		Latency: load.Latency{Count: 210, Mean: 0.2, P50: ptr(0.1), P95: ptr(0.9), Max: 1.4}, Service: load.Latency{Count: 210, Max: 1.4},
		Distribution: []load.Share{{Latency: 0.05, Share: 0}, {Latency: 0.1, Share: 0.5}, {Latency: 0.9, Share: 0.95}, {Latency: 1.4, Share: 1}},
		Errors:       []load.Kind{{Kind: "status 429", Count: 8, Example: "<script>alert(1)</script>"}},
		Stages:       []load.Stage{{Stage: "detect", Requests: 210, Calls: 210, Wait: load.Latency{Count: 210, Mean: 0.1}, Service: load.Latency{Count: 210, Mean: 0.08}}},
	}
	fn := load.Function{Function: "detect.openfaas-fn"}
	for i := range 20 {
		f.Seconds = append(f.Seconds, load.Second{T: i, Offered: 2 + int64(i/10*18), Answered: 2 + int64(i/10*15), Good: 2, Failed: int64(i / 15), P50: 0.1, P99: 0.2 * float64(i%7)})
		fn.Samples = append(fn.Samples, load.Sample{T: float64(i), Replicas: 1 + i/8, Waiting: i})
	}
	return load.Result{
		Schema: load.Schema, Started: time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC), Duration: 20, Gateway: "http://127.0.0.1:8080", Seed: 1,
		Warnings: []string{"2 of 220 requests were not sent"}, Total: f, Targets: []load.Figures{f}, Functions: []load.Function{fn},
	}
}

func TestPageIsCompleteAndNeedsNoNetwork(t *testing.T) {
	var b bytes.Buffer
	if err := Write(&b, result()); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	if strings.Contains(page, "<script") || strings.Contains(page, "ocr <b>") {
		t.Error("texts of others are not escaped")
	}
	for _, bad := range []string{"src=", "href=", "@import", "url("} {
		if strings.Contains(page, bad) {
			t.Errorf("the page fetches: %s", bad)
		}
	}
	for _, want := range []string{"status 429", "81.8 %", "900 ms", "2 of 220 requests", "detect", "prefers-color-scheme:dark"} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in the page", want)
		}
	}
	if n := strings.Count(page, "<svg"); n != 5 {
		t.Errorf("%d charts, want 5", n)
	}
	for rest := page; ; {
		_, after, ok := strings.Cut(rest, "<svg")
		if !ok {
			break
		}
		svg, tail, _ := strings.Cut("<svg"+after, "</svg>")
		if strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
			t.Error("a chart has places that are none")
		}
		for d := xml.NewDecoder(strings.NewReader(svg + "</svg>")); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%v in %.200s", err, svg)
			}
		}
		rest = tail
	}
	if file := os.Getenv("REPORT_OUT"); file != "" {
		if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNothingToShow writes a page for a run without any answer.
func TestNothingToShow(t *testing.T) {
	r := load.Result{Schema: load.Schema, Targets: []load.Figures{{Name: "f"}}}
	var b bytes.Buffer
	if err := Write(&b, r); err != nil || strings.Contains(b.String(), "NaN") {
		t.Errorf("%v: %d bytes", err, b.Len())
	}
}

func TestFigures(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.0000123: "12.3 µs", 0.0999999: "100 ms", 0.25: "250 ms", 1: "1 s", 12.345: "12.3 s", 1234: "1234 s", 1.64: "1.64 s", 0.0102: "10.2 ms", 26.9: "26.9 s", 999.9: "1000 s"} {
		if got := duration(v); got != want {
			t.Errorf("duration(%g) = %s, want %s", v, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0 %", 1: "100 %", 0.2: "20 %", 0.9984: "99.8 %", 0.999: "99.9 %"} {
		if got := percent(v); got != want {
			t.Errorf("percent(%g) = %s, want %s", v, got, want)
		}
	}
}

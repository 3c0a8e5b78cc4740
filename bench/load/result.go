package load

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
)

// Schema is the version of a result's JSON form. Fields may be added but never changed.
const Schema = "stagecoach.load/1"

// Result is the result of a run. Times are in seconds. The fields t_s count from the first instant
// of the run.
type Result struct {
	Schema    string    `json:"schema"`
	Started   time.Time `json:"started"`
	Duration  float64   `json:"duration_s"` // of the arrivals; rates are relative to it
	Gateway   string    `json:"gateway"`    // without credentials
	Seed      uint64    `json:"seed"`
	Warnings  []string  `json:"warnings"`
	Generator Generator `json:"generator"`
	Total     Figures   `json:"total"`   // all targets together
	Targets   []Figures `json:"targets"` // in the scenario's order
	// The server's state per second; empty if the server does not report it.
	Functions []Function `json:"functions"`
}

// Generator says whether the generator produced the intended load.
type Generator struct {
	Lag         Latency `json:"lag"` // from a request's instant until it was sent
	MaxInFlight int     `json:"max_in_flight"`
	Peak        int     `json:"peak_in_flight"`
	Connections int64   `json:"connections"` // number of connections opened
}

// Figures are the results of a target. Offered = Sent + NotSent; Sent = Answered + Failed.
type Figures struct {
	Name     string `json:"name"`
	Function string `json:"function,omitempty"`
	Process  string `json:"process,omitempty"`
	// 0: none, so every successful answer is in time.
	SLO      float64 `json:"slo_s,omitempty"`
	Offered  int64   `json:"offered"`
	Sent     int64   `json:"sent"`
	NotSent  int64   `json:"not_sent"`
	Answered int64   `json:"answered"` // with 2xx
	Failed   int64   `json:"failed"`
	// answered within the objective, from the request's instant.
	Good         int64      `json:"good"`
	OfferedRate  float64    `json:"offered_per_s"`
	AnsweredRate float64    `json:"answered_per_s"`
	Goodput      float64    `json:"goodput_per_s"`
	Attainment   float64    `json:"slo_attainment"` // Good / Offered
	Latency      Latency    `json:"latency"`        // of answers, from the request's instant
	Service      Latency    `json:"service"`        // of answers, from the sending
	Distribution []Share    `json:"latency_distribution"`
	Errors       []Kind     `json:"errors"`
	Stages       []Stage    `json:"stages"`
	Callbacks    *Callbacks `json:"callbacks,omitempty"` // for an async target
	Seconds      []Second   `json:"seconds"`
}

// KindRefused and KindInterrupted are kinds of failure that are not the server's fault: it was
// overloaded, or the run was ended early.
const (
	KindRefused     = "status 429"
	KindInterrupted = "interrupted"
)

// Faults returns the failures that are neither refusals nor caused by the end of the run, and the
// number of their requests.
func (f Figures) Faults() (kinds []Kind, requests int64) {
	for _, k := range f.Errors {
		if k.Kind != KindRefused && k.Kind != KindInterrupted && k.Kind != kindNotSent {
			kinds = append(kinds, k)
			requests += k.Count
		}
	}
	return kinds, requests
}

// kindNotSent is the kind of requests that were due but not sent.
const kindNotSent = "not sent"

// Latency is a distribution of times in seconds. It leaves out quantiles for which the sample is
// too small. Quantile q needs n answers with 1-qⁿ >= 0.95: then at least one answer is above the
// true quantile with a probability of 95 % (Wilks 1941). So p95 needs 59 answers, p99 299, and
// p99.9 2995.
type Latency struct {
	Count int64    `json:"count"`
	Mean  float64  `json:"mean_s"`
	P50   *float64 `json:"p50_s,omitempty"`
	P75   *float64 `json:"p75_s,omitempty"`
	P90   *float64 `json:"p90_s,omitempty"`
	P95   *float64 `json:"p95_s,omitempty"`
	P99   *float64 `json:"p99_s,omitempty"`
	P999  *float64 `json:"p999_s,omitempty"`
	Max   float64  `json:"max_s"`
}

// Share says that this share of the answers took at most Latency.
type Share struct {
	Latency float64 `json:"latency_s"`
	Share   float64 `json:"share"`
}

// Kind is a kind of failure.
type Kind struct {
	Kind    string `json:"kind"` // "status 429", "timeout", "refused", "reset", "not sent", …
	Count   int64  `json:"count"`
	Example string `json:"example"` // the first message
}

// Stage summarizes the answers' Server-Timing headers for a stage. Each request counts once, with
// the sum over its calls.
type Stage struct {
	Stage    string  `json:"stage"`
	Requests int64   `json:"requests"`
	Calls    int64   `json:"calls"`
	Wait     Latency `json:"wait"`
	Service  Latency `json:"service"`
}

// Callbacks counts the outcomes of accepted async requests.
type Callbacks struct {
	Accepted   int64 `json:"accepted"` // answered with 202
	Called     int64 `json:"called_back"`
	Duplicates int64 `json:"duplicates"` // additional callbacks for one request
	Lost       int64 `json:"lost"`       // accepted, without a callback by the deadline
}

// Second is one second of the run. A request counts in the second in which it is due, and an answer
// in the second in which it arrives. Quantiles are nearest-rank, so with fewer than 100 answers P99
// is the slowest one.
type Second struct {
	T        int     `json:"t_s"`
	Offered  int64   `json:"offered"`
	NotSent  int64   `json:"not_sent"`
	Answered int64   `json:"answered"`
	Good     int64   `json:"good"`
	Failed   int64   `json:"failed"`
	P50      float64 `json:"p50_s"` // answers to this second's requests; 0: none
	P99      float64 `json:"p99_s"`
}

// Function is a function's state over time.
type Function struct {
	Function string   `json:"function"`
	Samples  []Sample `json:"samples"`
}

// Sample is the server's report at one instant.
type Sample struct {
	T        float64 `json:"t_s"`
	Replicas int     `json:"replicas"` // ready
	Waiting  int     `json:"waiting"`  // requests in the line
	Running  int     `json:"running"`
	// Of the calls that began since the previous sample.
	Wait *float64 `json:"wait_mean_s,omitempty"`
	Why  string   `json:"why,omitempty"` // last scaling decision
}

// ReadResult reads the JSON form of a result.
func ReadResult(r io.Reader) (Result, error) {
	var out Result
	if err := json.NewDecoder(r).Decode(&out); err != nil {
		return out, err
	}
	if out.Schema != Schema {
		return out, fmt.Errorf("schema %q, want %q", out.Schema, Schema)
	}
	return out, nil
}

// longest is the longest time in histograms. Longer times count as this.
const longest = 24 * time.Hour

func newHistogram() *hdr.Histogram {
	return hdr.New(1, longest.Microseconds(), 3)
}

func record(h *hdr.Histogram, d time.Duration) {
	_ = h.RecordValue(min(max(d, 0), longest).Microseconds()) // always in range
}

// carries reports whether n observations are enough for the quantile q; see [Latency].
func carries(n int64, q float64) bool { return 1-math.Pow(q, float64(n)) >= 0.95 }

func latencyOf(h *hdr.Histogram) Latency {
	l := Latency{Count: h.TotalCount()}
	if l.Count == 0 {
		return l
	}
	l.Mean, l.Max = h.Mean()/1e6, float64(h.Max())/1e6
	at := func(q float64) *float64 {
		if !carries(l.Count, q) {
			return nil
		}
		v := float64(h.ValueAtQuantile(q*100)) / 1e6
		return &v
	}
	l.P50, l.P75, l.P90, l.P95, l.P99, l.P999 = at(0.5), at(0.75), at(0.9), at(0.95), at(0.99), at(0.999)
	return l
}

// distributionOf returns at most a few hundred points.
func distributionOf(h *hdr.Histogram) []Share {
	out := []Share{}
	n := h.TotalCount()
	if n == 0 {
		return out
	}
	out = append(out, Share{float64(h.Min()) / 1e6, 0})
	for _, b := range h.CumulativeDistributionWithTicks(20) {
		s := Share{float64(b.ValueAt) / 1e6, float64(b.Count) / float64(n)}
		if last := out[len(out)-1]; s.Latency > last.Latency || s.Share > last.Share {
			out = append(out, s)
		}
	}
	return out
}

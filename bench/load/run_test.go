package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server answers within a synctest bubble, which has no network.
type server func(r *http.Request) (*http.Response, error)

func (s server) RoundTrip(r *http.Request) (*http.Response, error) { return s(r) }

func says(status int, body string, header ...string) *http.Response {
	h := http.Header{}
	for i := 0; i < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader(body))}
}

// pause waits in the bubble's time, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func even(t *testing.T, rate string) arrivals.Source {
	t.Helper()
	p, err := arrivals.ParseProfile(rate)
	if err != nil {
		t.Fatal(err)
	}
	s, err := arrivals.Renewal(p, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func config(t *testing.T, base string, targets ...Target) Config {
	t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	for i := range targets {
		if targets[i].payload == nil {
			targets[i].payload, _ = Body{Text: "x"}.payload(1)
		}
	}
	return Config{Gateway: u, Targets: targets, Duration: 10 * time.Second, MaxInFlight: 1000, Callbacks: "127.0.0.1:0"}
}

func must(t *testing.T, cfg Config) Result {
	t.Helper()
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(r.Targets, r.Total) {
		if f.Offered != f.Sent+f.NotSent || f.Sent != f.Answered+f.Failed {
			t.Errorf("%s: the counts do not add up: %+v", f.Name, f)
		}
		var s Second
		for _, x := range f.Seconds {
			s.Offered, s.NotSent, s.Answered, s.Good, s.Failed = s.Offered+x.Offered, s.NotSent+x.NotSent, s.Answered+x.Answered, s.Good+x.Good, s.Failed+x.Failed
		}
		if s != (Second{Offered: f.Offered, NotSent: f.NotSent, Answered: f.Answered, Good: f.Good, Failed: f.Failed}) {
			t.Errorf("%s: the seconds have %+v, the whole %+v", f.Name, s, f)
		}
	}
	return r
}

// TestStallDelaysEveryRequestOfItsTime checks that there is no coordinated omission. The server has
// one slot and takes 1 ms per request. It stalls once, from 5 s to 6 s. Ten requests are due per
// second, at 50 ms, 150 ms, …, so the ten requests of that second wait 950 ms, 850 ms, … for the
// end of the stall. A closed loop would measure only one slow request.
func TestStallDelaysEveryRequestOfItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		slot := make(chan struct{}, 1)
		stall := sync.OnceFunc(func() { _ = pause(t.Context(), time.Until(begin.Add(6*time.Second))) })
		cfg := config(t, "http://bubble", Target{Name: "f", Function: "f", Source: even(t, "10"), SLO: 100 * time.Millisecond, Timeout: 5 * time.Second})
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			if r.Method != http.MethodPost {
				return says(404, ""), nil
			}
			slot <- struct{}{}
			defer func() { <-slot }()
			if time.Since(begin) > 5*time.Second {
				stall()
			}
			return says(200, "ok"), pause(r.Context(), time.Millisecond)
		})
		r := must(t, cfg)
		f := r.Total
		if f.Offered != 100 || f.Answered != 100 || f.Latency.Count != 100 {
			t.Fatalf("%+v, want 100 requests, all answered", f)
		}
		slow := 0
		for _, s := range f.Seconds {
			if s.T == 5 && (s.P50 < 0.45 || s.P50 > 0.6 || s.P99 < 0.95) {
				t.Errorf("the second of the stall: %+v, want a median of half a second", s)
			}
			if s.T != 5 && s.P99 > 0.02 {
				t.Errorf("another second: %+v", s)
			}
		}
		for i := 1; i < len(f.Distribution); i++ {
			if f.Distribution[i].Latency > 0.040 {
				slow += int((f.Distribution[i].Share-f.Distribution[i-1].Share)*100 + 0.5)
			}
		}
		if slow != 10 || f.Good != 91 || f.Attainment != 0.91 {
			t.Errorf("%d slow, %d good, want 10 and all but the 9 that waited more than 100 ms", slow, f.Good)
		}
		if lag := r.Generator.Lag; lag.Max > 0.001 || len(r.Warnings) > 1 {
			t.Errorf("lag %+v, %v: the generator did not wait for answers", lag, r.Warnings)
		}
	})
}

// TestABoundOnRequestsInFlight checks that requests above the bound are counted, not delayed.
func TestABoundOnRequestsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t, "http://bubble", Target{Name: "f", Function: "f", Source: even(t, "10"), Timeout: 2500 * time.Millisecond})
		cfg.MaxInFlight = 5
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			if r.Method != http.MethodPost {
				return says(404, ""), nil
			}
			return nil, pause(r.Context(), time.Hour)
		})
		r := must(t, cfg)
		f := r.Total
		if f.Offered != 100 || f.Sent != 20 || f.NotSent != 80 || f.Failed != 20 || r.Generator.Peak != 5 {
			t.Errorf("%+v, want 5 sent every 2.5 s, and the others not sent", f)
		}
		if len(f.Errors) != 2 || f.Errors[0].Kind != "not sent" || f.Errors[1].Kind != "timeout" || f.Errors[1].Count != 20 {
			t.Errorf("%+v", f.Errors)
		}
		if len(r.Warnings) != 2 || !strings.Contains(r.Warnings[0], "80 of 100 requests were not sent because 5") {
			t.Errorf("%q", r.Warnings)
		}
		if f.Latency.P50 != nil || f.Latency.Count != 0 {
			t.Errorf("latency of no answers: %+v", f.Latency)
		}
	})
}

// TestSeveralTargets checks figures per target, errors by kind, stages from the answers' headers,
// and replicas as the server reports them.
func TestSeveralTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		a := Target{Name: "a", Function: "ocr", Source: even(t, "10"), Timeout: time.Second, SLO: time.Second, Header: http.Header{"X-Which": {"a"}}}
		b := Target{Name: "b", Function: "bad", Source: even(t, "5:5s,20:5s"), Timeout: time.Second, SLO: time.Second}
		cfg := config(t, "http://me:secret@bubble/prefix", a, b)
		n := 0
		var mu sync.Mutex
		var last Progress
		cfg.Progress = func(p Progress) { last = p }
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			if user, pass, _ := r.BasicAuth(); user != "me" || pass != "secret" {
				t.Errorf("%s without the credentials", r.URL)
			}
			replicas := "1"
			if time.Since(begin) > 5*time.Second {
				replicas = "4"
			}
			switch r.URL.Path {
			case "/prefix/system/pipelines/ocr":
				return says(200, `{"namespace":"ns","stages":[{"name":"detect"},{"name":"read"}]}`), nil
			case "/prefix/system/timeline/read.ns":
				return says(200, `{"waiting":7,"running":1,"ready":`+replicas+`,"why":"because"}`), nil
			case "/prefix/metrics":
				return says(200, "# HELP x\ngateway_service_count{function_name=\"detect.ns\"} 2\nother{a=\"b\",c=\"d\"} 1\n"), nil
			case "/prefix/function/ocr":
				if r.Header.Get("X-Which") != "a" || r.Header.Get("Content-Type") != "text/plain; charset=utf-8" {
					t.Errorf("headers %v", r.Header)
				}
				return says(200, "", "Server-Timing", `detect.wait;dur=1.5, detect.service;dur=20, read.wait;dur=8;desc="3 calls", read.service;dur=90;desc="3 calls"`), nil
			case "/prefix/function/bad":
				mu.Lock()
				defer mu.Unlock()
				switch n++; n % 5 {
				case 1:
					return says(429, "come again\n"), nil
				case 2:
					return nil, syscall.ECONNREFUSED
				case 3:
					return nil, syscall.ECONNRESET
				case 4:
					return nil, errors.New("odd")
				}
				return says(200, ""), nil
			}
			return says(404, ""), nil
		})
		r := must(t, cfg)
		if len(r.Targets) != 2 || r.Targets[0].Offered != 100 || r.Targets[1].Offered != 125 || r.Total.Offered != 225 {
			t.Fatalf("%+v", r.Targets)
		}
		got := map[string]int64{}
		for _, k := range r.Targets[1].Errors {
			got[k.Kind+": "+k.Example] = k.Count
		}
		for _, k := range []string{"status 429: come again", "refused: connection refused", "reset: connection reset by peer", "other: odd"} {
			if got[k] != 25 {
				t.Errorf("%d × %s, want 25 of %v", got[k], k, got)
			}
		}
		if s := r.Total.Stages; len(s) != 2 || s[1].Stage != "read" || s[1].Calls != 300 || s[1].Requests != 100 || s[1].Wait.Mean < 0.0079 || s[1].Service.Max < 0.089 {
			t.Errorf("stages %+v", s)
		}
		if len(r.Functions) != 2 || r.Functions[0].Function != "detect.ns" || r.Functions[0].Samples[0].Replicas != 2 {
			t.Fatalf("functions %+v", r.Functions)
		}
		read := r.Functions[1].Samples
		if read[0].Replicas != 1 || read[len(read)-1].Replicas != 4 || read[0].Waiting != 7 || read[0].Why != "because" {
			t.Errorf("samples %+v", read)
		}
		if last.Offered == 0 || !strings.Contains(last.String(), "offered") {
			t.Errorf("progress %+v", last)
		}
		if strings.Contains(r.Gateway, "secret") {
			t.Errorf("the result tells the password: %s", r.Gateway)
		}
		var table, both bytes.Buffer
		if err := r.WriteTable(&table); err != nil || !strings.Contains(table.String(), "25 × status 429: come again") {
			t.Errorf("%v:\n%s", err, table.String())
		}
		if err := WriteComparison(&both, []string{"one", "two"}, []Result{r, r}); err != nil || strings.Count(both.String(), "22.50") != 2 {
			t.Errorf("%v:\n%s", err, both.String())
		}
	})
}

// TestInterruptedRunHasAResult checks that an interrupted run has a result.
func TestInterruptedRunHasAResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t, "http://bubble", Target{Name: "f", Function: "f", Source: even(t, "10"), Timeout: time.Minute})
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			if r.Method != http.MethodPost {
				return says(404, ""), nil
			}
			return nil, pause(r.Context(), time.Hour)
		})
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Second)
		defer stop()
		r, err := Run(ctx, cfg)
		if err != nil || r.Total.Sent != 20 || r.Total.Failed != 20 || !strings.Contains(strings.Join(r.Warnings, "\n"), "interrupted after 2.0 s") {
			t.Errorf("%v, %+v, %q", err, r.Total, r.Warnings)
		}
	})
}

// TestALaggingGeneratorSaysSo uses a body that takes long to make.
func TestALaggingGeneratorSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := Target{Name: "f", Function: "f", Source: even(t, "10"), Timeout: time.Minute}
		f.payload = func() ([]byte, string, error) { return nil, "", pause(t.Context(), 150*time.Millisecond) }
		cfg := config(t, "http://bubble", f)
		cfg.Transport = server(func(*http.Request) (*http.Response, error) { return says(200, ""), nil })
		r := must(t, cfg)
		if r.Total.Offered != 100 || r.Generator.Lag.Max < 4 || r.Total.Latency.Max < 4 || r.Total.Service.Max > 0.01 || !strings.Contains(strings.Join(r.Warnings, "\n"), "the generator lagged") {
			t.Errorf("%+v, %+v, %q", r.Generator.Lag, r.Total.Latency, r.Warnings)
		}
	})
}

func TestATimeoutCountsFromTheInstant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := Target{Name: "f", Function: "f", Source: even(t, "10"), Timeout: 2 * time.Second}
		f.payload = func() ([]byte, string, error) { return nil, "", pause(t.Context(), 150*time.Millisecond) }
		cfg := config(t, "http://bubble", f)
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			return says(200, ""), pause(r.Context(), time.Millisecond)
		})
		r := must(t, cfg) // the lag grows by 50 ms per request
		if e := r.Total.Errors; len(e) != 1 || e[0].Kind != "timeout" || e[0].Count < 55 || e[0].Count > 65 {
			t.Errorf("%+v, want about 60 timeouts of 100", e)
		}
	})
}

func TestWaitsOfTheCallsSinceTheSampleBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t, "http://bubble", Target{Name: "f", Function: "f", Source: even(t, "10"), Timeout: time.Second})
		scrapes := 0
		cfg.Transport = server(func(r *http.Request) (*http.Response, error) {
			switch r.URL.Path {
			case "/metrics":
				// The calls of each second wait 250 ms; those before the run waited 10 s.
				scrapes++
				return says(200, fmt.Sprintf("gateway_service_count{function_name=\"f.openfaas-fn\"} 1\n"+
					"stagecoach_dispatch_wait_seconds_sum{function=\"f.openfaas-fn\"} %g\nstagecoach_dispatch_wait_seconds_count{function=\"f.openfaas-fn\"} %d\n",
					1000+2.5*float64(scrapes), 100+10*scrapes)), nil
			case "/function/f":
				return says(200, ""), nil
			}
			return says(404, ""), nil
		})
		r := must(t, cfg)
		if len(r.Functions) != 1 || len(r.Functions[0].Samples) < 9 {
			t.Fatalf("%+v", r.Functions)
		}
		for i, s := range r.Functions[0].Samples {
			if i == 0 && s.Wait != nil || i > 0 && (s.Wait == nil || *s.Wait != 0.25) {
				t.Errorf("sample %d: %+v", i, s)
			}
		}
	})
}

// TestCallbacksAreCountedByOutcome uses real connections. Its callbacks come once, twice, before
// the 202, with a failure, or never.
func TestCallbacksAreCountedByOutcome(t *testing.T) {
	var calls sync.WaitGroup
	var mu sync.Mutex
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			http.NotFound(w, r)
			return
		}
		if r.URL.Path != "/async-function/f" {
			t.Errorf("path %s", r.URL.Path)
		}
		mu.Lock()
		n++
		i := n
		mu.Unlock()
		call := func(status string) {
			req, _ := http.NewRequest(http.MethodPost, r.Header.Get("X-Callback-Url"), strings.NewReader("out"))
			req.Header.Set("X-Call-Id", r.Header.Get("X-Call-Id"))
			req.Header.Set("X-Function-Status", status)
			if resp, err := http.DefaultClient.Do(req); err != nil {
				t.Error(err)
			} else {
				resp.Body.Close()
			}
		}
		switch i % 5 {
		case 0:
			calls.Go(func() { call("200") })
		case 1:
			call("200")
		case 2:
			call("200")
			call("200")
		case 3:
			call("500")
		case 4: // never
		}
		w.WriteHeader(http.StatusAccepted)
	}))
	defer srv.Close()
	defer http.DefaultClient.CloseIdleConnections()
	defer calls.Wait()
	cfg := config(t, srv.URL, Target{Name: "an async one", Function: "f", Source: even(t, "100"), Timeout: 5 * time.Second, Async: true})
	cfg.Duration = 500 * time.Millisecond
	f := must(t, cfg).Total
	if c := f.Callbacks; f.Offered != 50 || c == nil || *c != (Callbacks{Accepted: 50, Called: 40, Duplicates: 10, Lost: 10}) || f.Answered != 30 {
		t.Errorf("%+v, %+v", f, f.Callbacks)
	}
	if len(f.Errors) != 2 || f.Errors[0].Kind != "callback with status 500" || f.Errors[0].Example != "out" || f.Errors[1].Kind != "no callback" {
		t.Errorf("%+v", f.Errors)
	}
}

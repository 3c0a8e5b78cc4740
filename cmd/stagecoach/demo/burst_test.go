package demo

import (
	"bytes"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

func TestArrivalsFollowSeedAndPhases(t *testing.T) {
	phases := []phase{{5, 200 * time.Second}, {50, 100 * time.Second}, {5, 200 * time.Second}}
	got := arrivals(1, phases)
	if !slices.Equal(got, arrivals(1, phases)) {
		t.Error("a seed gives two runs")
	}
	if slices.Equal(got, arrivals(2, phases)) {
		t.Error("two seeds give one run")
	}
	if !slices.IsSorted(got) || got[0] < 0 {
		t.Error("not in order")
	}
	begin := time.Duration(0)
	for i, p := range phases {
		n := 0.0
		for _, at := range got {
			if at >= begin && at < begin+p.length {
				n++
			}
		}
		begin += p.length
		mean := p.rate * p.length.Seconds()
		if math.Abs(n-mean) > 4*math.Sqrt(mean) { // Poisson: the variance is the mean
			t.Errorf("phase %d: %.0f arrivals, want about %.0f", i, n, mean)
		}
	}
	if last := got[len(got)-1]; last >= begin {
		t.Errorf("an arrival at %v, after the end at %v", last, begin)
	}
}

func TestServerTiming(t *testing.T) {
	for name, tc := range map[string]struct {
		header string
		want   []stageFigure
	}{
		"none":  {"", nil},
		"other": {"cache;dur=3", nil},
		"two stages": {
			`ocr-detect.wait;dur=1.500, ocr-detect.service;dur=20.25, ocr-recognise.wait;dur=7;desc="18 calls", ocr-recognise.service;dur=900.125;desc="18 calls"`,
			[]stageFigure{{"ocr-detect", 1, 1.5, 20.25}, {"ocr-recognise", 18, 7, 900.125}},
		},
		"a name with dots":       {"a.b.wait;dur=1, a.b.service;dur=2", []stageFigure{{"a.b", 1, 1, 2}}},
		"a stage called service": {"service.wait;dur=1, service.service;dur=2", []stageFigure{{"service", 1, 1, 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := serverTiming(tc.header); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestForkedOfABurst(t *testing.T) {
	begin := time.Date(2025, 6, 1, 12, 0, 0, 0, time.UTC)
	e := func(ms int, replica, kind string, loads bool) schema.Event {
		e := schema.Event{At: begin.Add(time.Duration(ms) * time.Millisecond), Replica: replica, Kind: kind, Path: "fork"}
		if loads {
			e.Phases = map[string]string{"load": "80ms"}
		}
		return e
	}
	events := []schema.Event{
		e(0, "loads", schema.Ordered, false), e(0, "forks", schema.Ordered, false), e(0, "silent", schema.Ordered, false),
		e(1, "loads", schema.Process, true), e(1, "forks", schema.Process, false), e(1, "silent", schema.Process, false),
		e(9, "loads", schema.Answered, false), e(9, "forks", schema.Answered, false),
	}
	want := []client.ReplicaStart{{Replica: "forks", Path: "fork", Answered: 9 * time.Millisecond}}
	if got := (burst{events: events}).forked(); !slices.Equal(got, want) {
		t.Errorf("forks that answered: %+v, want %+v", got, want)
	}
}

func TestBurstFigures(t *testing.T) {
	const s = time.Second
	b := burst{
		function: "f", length: 2500 * time.Millisecond,
		calls: []call{
			{s / 2, 10 * time.Millisecond, http.StatusOK},
			{s, 30 * time.Millisecond, http.StatusOK},
			{s + 1, 20 * time.Millisecond, http.StatusTooManyRequests},
			{2 * s, 40 * time.Millisecond, 0},
		},
		// The last sample is after the burst.
		samples: []sample{{s / 4, 3, 1}, {s / 2, 1, 2}, {2 * s, 0, 4}, {9 * s, 99, 99}},
	}
	if got := b.failed(); got != 2 {
		t.Errorf("%d failed, want 2: one refused, one without an answer", got)
	}
	want := []second{
		{1, 3, 2, []time.Duration{10 * time.Millisecond}},
		{2, 0, 0, []time.Duration{30 * time.Millisecond, 20 * time.Millisecond}},
		{1, 0, 4, []time.Duration{40 * time.Millisecond}},
	}
	if got := b.seconds(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	var table, svg bytes.Buffer
	if err := b.writeTable(&table); err != nil || len(strings.Split(strings.TrimSpace(table.String()), "\n")) != 4 {
		t.Errorf("%v:\n%s", err, table.String())
	}
	if err := b.writeChart(&svg); err != nil || !strings.HasPrefix(strings.TrimSpace(svg.String()), "<svg") && !strings.Contains(svg.String(), "<svg") {
		t.Errorf("%v: %.80s", err, svg.String())
	}
}

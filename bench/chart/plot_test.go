package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
)

// elements counts the elements of well-formed XML.
func elements(t *testing.T, svg string) map[string]int {
	t.Helper()
	out := map[string]int{}
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return out
		} else if err != nil {
			t.Fatal(err)
		}
		if s, ok := tok.(xml.StartElement); ok {
			out[s.Name.Local]++
		}
	}
}

func TestPlot(t *testing.T) {
	p := Plot{
		Title: "a < b", LogX: true, LogY: true,
		Lines: []Line{
			// two pieces
			{Name: "one", X: []float64{1, 2, 3, 4, 5}, Y: []float64{1, 10, math.NaN(), 5, 50}},
			// 0 has no logarithm: a gap, and a dot before it
			{Name: "two", X: []float64{0, 2, 3}, Y: []float64{1, 0, 7}, Area: true, Steps: true},
		},
		Marks: []Mark{{Name: "objective", At: 2}, {Name: "limit", At: 4, Vertical: true}},
		Tips:  []Tip{{1, 2, "tip"}},
	}
	var b strings.Builder
	if err := p.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	got := elements(t, b.String())
	if got["polyline"] != 2 || got["circle"] != 1 || got["polygon"] != 1 || got["title"] != 1 || strings.Contains(b.String(), "NaN") {
		t.Errorf("%v", got)
	}
	for _, empty := range []Plot{{}, {LogX: true, LogY: true}, {TopY: 1, Lines: []Line{{}}}} {
		b.Reset()
		if err := empty.WriteSVG(&b); err != nil || strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Errorf("a plot of nothing: %v\n%s", err, b.String())
		}
		elements(t, b.String())
	}
	p.Lines[0].Y = nil
	if err := p.WriteSVG(io.Discard); err == nil || !strings.Contains(err.Error(), `line "one" has 0 values for 5`) {
		t.Errorf("%v", err)
	}
}

func TestTicks(t *testing.T) {
	for name, tc := range map[string]struct {
		s    scale
		want []float64
	}{
		"linear":         {fit(0, 47, false, true, 0, 100), []float64{0, 20, 40, 60}},
		"from elsewhere": {fit(3, 9, false, false, 0, 100), []float64{4, 6, 8}},
		"one value":      {fit(5, 5, false, false, 0, 100), []float64{5, 5.2, 5.4, 5.6, 5.8, 6}},
		"decades":        {fit(0.01, 200, true, true, 0, 100), []float64{0.01, 0.1, 1, 10, 100, 1000}},
		"a decade":       {fit(0.2, 0.9, true, true, 0, 100), []float64{0.1, 0.2, 0.5, 1}},
	} {
		got := tc.s.ticks(5)
		if !slices.EqualFunc(got, tc.want, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		if len(got) > 0 && math.Signbit(got[0]) {
			t.Errorf("%s: -0", name)
		}
	}
	if s := fit(0, 47, false, true, 200, 0); s.at(0) != 200 || s.at(60) != 0 || s.at(30) != 100 {
		t.Errorf("places %g %g %g", s.at(0), s.at(60), s.at(30))
	}
}

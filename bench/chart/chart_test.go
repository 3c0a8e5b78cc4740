package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestSVGIsWellFormedAndHasEachRow(t *testing.T) {
	c := Chart{Title: "a < b", X: []float64{0, 1, 2}, Steps: true, Rows: []Series{{"queue", []float64{0, 7, 3}}, {"replicas", []float64{1, 1, 4}}}}
	var b strings.Builder
	if err := c.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	lines := 0
	for d := xml.NewDecoder(strings.NewReader(b.String())); ; {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if s, ok := tok.(xml.StartElement); ok && s.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 2 {
		t.Errorf("%d polylines, want one a row: 2", lines)
	}
	c.Rows[0].Values = c.Rows[0].Values[:2]
	if err := c.WriteSVG(io.Discard); err == nil || !strings.Contains(err.Error(), `"queue" has 2 values`) {
		t.Errorf("a row that is too short: %v", err)
	}
}

func TestNiceCeil(t *testing.T) {
	for v, want := range map[float64]float64{0: 1, 1: 1, 1.2: 2, 7: 10, 23: 50, 0.3: 0.5} {
		if got := niceCeil(v); got != want {
			t.Errorf("niceCeil(%g) = %g, want %g", v, got, want)
		}
	}
}

package chart

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

var contenders = []string{"ours", "Knative KPA", "Kubernetes HPA", "INFless", "InferLine", "Cocktail", "uniform", "static", "oracle"}

var models = []string{"BERT-21B", "LLAMA-7B", "Whisper-9B", "OPT-66B", "WideResNet-3B"}

// value returns a made-up figure of contender k on i. It is equal in all runs.
func value(k, i int) float64 { return math.Exp(math.Sin(float64(7*k+3*i))) * (1 + float64(k)/4) }

func barsOf(title string, log bool, groups []string) Bars {
	p := Bars{Title: title, Unit: "mean latency, s", Groups: groups, Log: log, Guides: []Mark{{Name: "2 T", At: 2}}}
	for k, name := range contenders {
		s := BarSeries{Name: name, Style: k}
		for i := range groups {
			v, ci := value(k, i), value(i, k)/8
			s.Values, s.Ends, s.Notes = append(s.Values, v), append(s.Ends, Ends{v - ci, v + ci}), append(s.Notes, "")
		}
		p.Series = append(p.Series, s)
	}
	p.Series[3].Values[1], p.Series[4].Values[0], p.Series[5].Notes[0] = math.NaN(), 0, "†"
	p.Series[4].Ends[0] = Ends{}
	return p
}

func scatterOf(title string) Scatter {
	p := Scatter{
		Title: title, XTitle: "GPUs on average", YTitle: "mean latency / T", LogX: true, LogY: true,
		Guides: []Mark{{Name: "budget: 24 GPUs", At: 24, Vertical: true}, {Name: "work: 12", At: 12, Vertical: true}, {Name: "objective", At: 2}, {Name: "T", At: 1}},
	}
	for k, name := range contenders {
		s := Points{Name: name, Style: k, Join: Front, Strong: []int{3}}
		for i := range 24 {
			s.X, s.Y = append(s.X, 8+6*value(k, i)), append(s.Y, 1+value(i, k+2))
		}
		p.Series = append(p.Series, s)
	}
	p.Series[1].Y[0] = math.NaN()
	return p
}

func linesOf(title string) Scatter {
	p := Scatter{Title: title, XTitle: "objective, multiples of T", YTitle: "requests answered in time, %", XMarks: []float64{1, 1.5, 2, 2.5, 3}, TopY: 100}
	for k, name := range contenders {
		s := Points{Name: name, Style: k, Join: Joined}
		for i := range p.XMarks {
			v := 100 - 100/(1+float64(i))/(1+value(k, 0))
			s.X, s.Y, s.Ends = append(s.X, p.XMarks[i]), append(s.Y, v), append(s.Ends, Ends{v - float64(k), v})
		}
		p.Series = append(p.Series, s)
	}
	return p
}

func heatOf(title string, rows, columns int) Heat {
	p := Heat{Title: title, XTitle: "CV of the time between requests", YTitle: "mean work, GPUs", Below: "stages are faster", Above: "whole models are faster"}
	for i := range rows {
		p.Rows = append(p.Rows, fmt.Sprint(2<<i))
		var row []float64
		for k := range columns {
			row = append(row, math.Exp(1.2*math.Sin(float64(i+2*k))))
		}
		p.Values, p.Notes = append(p.Values, row), append(p.Notes, make([]string, columns))
	}
	for k := range columns {
		p.Columns = append(p.Columns, fmt.Sprintf("CV %g", .25*float64(k)))
	}
	if rows > 1 && columns > 1 {
		p.Values[1][1], p.Notes[0][0] = math.NaN(), " ~"
	}
	return p
}

// drawings returns the figures of the golden files. Look at the files after a change.
func drawings() map[string]Figure {
	notes := []string{"Seeds 1 to 10; whiskers are 95 % confidence intervals (Student's t). † more than 0.1 % of the requests failed. n/a: not measured, because the load of this trace needs more than what the cluster of this study has."}
	narrow := Bars{Title: "Three", Unit: "ratio", Groups: []string{"no corrector", "no PID controller", "none"}, Series: []BarSeries{{Name: "BERT-21B", Values: []float64{1.25, .5, 1}}}}
	return map[string]Figure{
		"bars":    {Title: "Mean latency <under> the trace, by model & contender", Notes: notes, Panels: []Panel{barsOf("Mean", false, models), barsOf("p99", true, models)}},
		"columns": {Title: "Mean latency, by CV of the time between requests, of all contenders and of all the models that there are in the table of the paper, in seconds", Notes: notes, Columns: 2, Panels: []Panel{barsOf("BERT-21B", true, []string{"0.1", "1", "2", "4", "8"}), barsOf("Conversations", true, models), narrow}},
		"scatter": {Title: "Every configuration that was tried", Notes: notes, Columns: 2, Panels: []Panel{scatterOf("CV 1"), scatterOf("CV 8"), linesOf("In time")}},
		"heat":    {Title: "Mean latency by stages over that by whole models", Notes: notes, Columns: 2, Panels: []Panel{heatOf("Load and CV", 6, 8), heatOf("Start cost and stages", 3, 4)}},
	}
}

func TestFigures(t *testing.T) {
	for name, f := range drawings() {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			if err := f.WriteSVG(&b); err != nil {
				t.Fatal(err)
			}
			legible(t, b.String())
			golden.Compare(t, name+".svg", b.String())
		})
	}
}

var noNumber = regexp.MustCompile(`[ ",](NaN|[+-]?Inf)[ ",]`)

// legible fails if the drawing is not well-formed or has NaN or infinite numbers. It also fails if
// texts overlap or leave the drawing.
func legible(t *testing.T, svg string) {
	t.Helper()
	if noNumber.MatchString(svg) {
		t.Error("a place that is no number")
	}
	type placed struct {
		box
		text string
	}
	var texts []placed
	var w, h float64
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		start, ok := tok.(xml.StartElement)
		if !ok {
			continue
		}
		a := map[string]string{}
		for _, v := range start.Attr {
			a[v.Name.Local] = v.Value
		}
		switch start.Name.Local {
		case "svg":
			w, h = number(a["width"]), number(a["height"])
		case "text":
			next, err := d.Token()
			if err != nil {
				t.Fatal(err)
			}
			text, _ := next.(xml.CharData)
			texts = append(texts, placed{place(a, string(text)), string(text)})
		}
	}
	for i, p := range texts {
		if p.x < -.5 || p.y < -.5 || p.x+p.w > w+.5 || p.y+p.h > h+.5 {
			t.Errorf("%q is at %+v, beyond the edges of %g x %g", p.text, p.box, w, h)
		}
		for _, q := range texts[:i] {
			if p.x < q.x+q.w && q.x < p.x+p.w && p.y < q.y+q.h && q.y < p.y+p.h {
				t.Errorf("%q at %+v is on %q at %+v", p.text, p.box, q.text, q.box)
			}
		}
	}
}

func number(s string) float64 {
	v, _ := strconv.ParseFloat(s, 64)
	return v
}

// place returns the box of a text. Letters reach from a third of the size below the baseline to two
// thirds above it.
func place(a map[string]string, text string) box {
	size := 12.0
	for _, class := range strings.Fields(a["class"]) {
		size = map[string]float64{"t": 15 * 1.1, "p": 13 * 1.1, "n": 11, "s": 10, "m": size, "o": size}[class]
		if size == 0 {
			size = 11 // e0 and so on, in heat maps
		}
	}
	w, before := textWidth(text, size), map[string]float64{"start": 0, "middle": .5, "end": 1}[a["text-anchor"]]
	var x, y float64
	if _, err := fmt.Sscanf(a["transform"], "translate(%f %f) rotate(-90)", &x, &y); err == nil {
		return box{x - .7*size, y - w + before*w, .9 * size, w}
	}
	return box{number(a["x"]) - before*w, number(a["y"]) - .7*size, w, .9 * size}
}

func TestTextsKeepApartInPanelsOfAnySize(t *testing.T) {
	for _, groups := range []int{0, 1, 8, 25} {
		for _, series := range []int{0, 1, 9, 20} {
			for _, columns := range []int{1, 2, 4} {
				b, s := Bars{Title: "A title that has more words than a narrow panel has space for", Unit: "seconds"}, scatterOf("S")
				for i := range groups {
					b.Groups = append(b.Groups, strings.Repeat("Model ", 1+i%3)+strings.Repeat("x", i%20))
				}
				for k := range series {
					r := BarSeries{Name: fmt.Sprintf("contender %d", k), Style: k}
					for i := range groups {
						r.Values = append(r.Values, 1000*value(k, i))
						r.Notes = append(r.Notes, strings.Repeat("†", i%2))
					}
					b.Series = append(b.Series, r)
				}
				log := b
				log.Log = true
				f := Figure{Title: "All", Columns: columns, Panels: []Panel{b, log, s, linesOf("L"), heatOf("H", min(groups, 3), series)}}
				var out strings.Builder
				if err := f.WriteSVG(&out); err != nil {
					t.Fatal(err)
				}
				t.Run(fmt.Sprintf("%d groups of %d, %d columns", groups, series, columns), func(t *testing.T) { legible(t, out.String()) })
			}
		}
	}
}

func TestFigureRefusesLengthsThatDoNotMatch(t *testing.T) {
	one, two := []float64{1}, []float64{1, 2}
	for want, p := range map[string]Panel{
		`bars "t": series "s" has 1 values, want one for each of 2 groups`: Bars{Title: "t", Groups: []string{"a", "b"}, Series: []BarSeries{{Name: "s", Values: one}}},
		`series "s" has 1 intervals`:                                       Bars{Groups: []string{"a", "b"}, Series: []BarSeries{{Name: "s", Values: two, Ends: []Ends{{}}}}},
		`series "s" has 0 notes`:                                           Bars{Groups: []string{"a", "b"}, Series: []BarSeries{{Name: "s", Values: two, Notes: []string{}}}},
		`series "s", group "b": -1, want at least 0`:                       Bars{Groups: []string{"a", "b"}, Series: []BarSeries{{Name: "s", Values: []float64{1, -1}}}},
		`scatter "t": series "s" has 2 Y, want one for each of 1 X`:        Scatter{Title: "t", Series: []Points{{Name: "s", X: one, Y: two}}},
		`series "s" has 1 intervals, want`:                                 Scatter{Series: []Points{{Name: "s", X: two, Y: two, Ends: []Ends{{}}}}},
		`series "s" has 1 tips`:                                            Scatter{Series: []Points{{Name: "s", X: two, Y: two, Tips: []string{""}}}},
		`series "s": point 2 stands out, want one of 2`:                    Scatter{Series: []Points{{Name: "s", X: two, Y: two, Strong: []int{2}}}},
		`heat "t": 1 rows of values, want one for each of 2`:               Heat{Title: "t", Rows: []string{"a", "b"}, Columns: []string{"c"}, Values: [][]float64{one}},
		`heat "t": row "a" has 2 values, want one for each of 1 columns`:   Heat{Title: "t", Rows: []string{"a"}, Columns: []string{"c"}, Values: [][]float64{two}},
		`heat "t": 0 rows of notes, want one for each of 1`:                Heat{Title: "t", Rows: []string{"a"}, Columns: []string{"c"}, Values: [][]float64{one}, Notes: [][]string{}},
		`heat "t": row "a" has 0 notes, want one for each of 1 columns`:    Heat{Title: "t", Rows: []string{"a"}, Columns: []string{"c"}, Values: [][]float64{one}, Notes: [][]string{nil}},
		`heat "t": row "a", column "c": 0, want a ratio above 0`:           Heat{Title: "t", Rows: []string{"a"}, Columns: []string{"c"}, Values: [][]float64{{0}}},
		`figure "f": panel 1: heat "t": even at -1, want above 0`:          Heat{Title: "t", Even: -1},
	} {
		if err := (Figure{Title: "f", Panels: []Panel{p}}).WriteSVG(io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestFront(t *testing.T) {
	x, y := axis(1, 10, false, 0, 1), axis(1, 10, false, 0, 1)
	p := Points{X: []float64{3, 1, 2, 2, 4, math.NaN(), 5}, Y: []float64{3, 9, 5, 4, 3, 0, 2.5}}
	// 2 and 4 are worse than others, 5 has no place
	if got := fmt.Sprint(p.front(x, y)); got != "[1 3 0 6]" {
		t.Errorf("front %s", got)
	}
}

func TestAxis(t *testing.T) {
	for name, tc := range map[string]struct {
		lo, hi float64
		log    bool
		want   string
	}{
		"linear":             {0, 47, false, "[0 20 40 60]"},
		"nothing":            {1e300, 0, true, "[1 2 5 10]"},
		"one value":          {3, 3, true, "[2 5 10]"},
		"less than a decade": {0.3, 1.6, true, "[0.2 0.5 1 2]"},
		"three decades":      {0.3, 150, true, "[0.2 0.5 1 2 5 10 20 50 100 200]"},
		"many":               {0.3, 15000, true, "[1 10 100 1000 10000]"},
	} {
		if got := fmt.Sprintf("%.3g", axis(tc.lo, tc.hi, tc.log, 0, 1).marks(5)); strings.NewReplacer("1e+03", "1000", "1e+04", "10000").Replace(got) != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

func TestShort(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.01234: "0.0123", 1.259: "1.26", 99.96: "100", 999.4: "999", 999.6: "1k", 1260: "1.26k", 2.5e6: "2.5M", 3e9: "3G", -1500: "-1.5k", 1e-5: "1e-05"} {
		if got := short(v); got != want {
			t.Errorf("short(%g) = %q, want %q", v, got, want)
		}
	}
}

// eyes has, by kind of colour blindness, the matrix that shows how such a person sees colours: in
// linear RGB, severity 1 (Machado, Oliveira, Fernandes 2009).
var eyes = map[string][9]float64{
	"all cones": {1, 0, 0, 0, 1, 0, 0, 0, 1},
	"no long":   {.152286, 1.052583, -.204868, .114503, .786281, .099216, -.003882, -.048116, 1.051998},
	"no middle": {.367322, .860646, -.227968, .280085, .672501, .047413, -.01182, .04294, .968881},
	"no short":  {1.255528, -.076749, -.178779, -.078411, .930809, .147602, .004733, .691367, .3039},
}

// oklab converts a colour to a space in which distances are perceived differences (Ottosson 2020).
func oklab(color string, eye [9]float64) [3]float64 {
	var in [3]uint8
	_, _ = fmt.Sscanf(color, "#%02x%02x%02x", &in[0], &in[1], &in[2])
	var c [3]float64
	for i := range c {
		for k, v := range in {
			part := float64(v) / 255
			if part <= .04045 {
				part /= 12.92
			} else {
				part = math.Pow((part+.055)/1.055, 2.4)
			}
			c[i] += eye[3*i+k] * part
		}
		c[i] = min(max(c[i], 0), 1)
	}
	l, m, s := math.Cbrt(.4122214708*c[0]+.5363325363*c[1]+.0514459929*c[2]), math.Cbrt(.2119034982*c[0]+.6806995451*c[1]+.1073969566*c[2]), math.Cbrt(.0883024619*c[0]+.2817188376*c[1]+.6299787005*c[2])
	return [3]float64{.2104542553*l + .793617785*m - .0040720468*s, 1.9779984951*l - 2.428592205*m + .4505937099*s, .0259040371*l + .7827717662*m - .808675766*s}
}

func TestStylesDifferForAnyColourVision(t *testing.T) {
	seen := map[string]int{}
	for i := range 50 {
		look := fmt.Sprint(styleColor(i), hatch(i))
		if k, ok := seen[look]; ok {
			t.Errorf("styles %d and %d have the same colour and hatching", k, i)
		}
		seen[look] = i
	}
	for i := range 10 {
		for _, background := range []string{"#ffffff", "#0d1117"} {
			if c := contrast(styleColor(i), background); c < 2.6 {
				t.Errorf("style %d: a contrast of %.2f on %s", i, c, background)
			}
		}
		for k := range i {
			if shape(i) == shape(k) {
				t.Errorf("styles %d and %d have the same shape", k, i)
			}
			for name, eye := range eyes {
				a, b := oklab(styleColor(i), eye), oklab(styleColor(k), eye)
				if d := math.Hypot(math.Hypot(a[0]-b[0], a[1]-b[1]), a[2]-b[2]); hatch(i) == hatch(k) && d < .08 {
					t.Errorf("eyes with %s: styles %d and %d, of the same hatching, are %.3f apart", name, k, i, d)
				}
			}
		}
	}
}

func TestHeatTextsHaveContrast(t *testing.T) {
	for _, colors := range [][heatSteps]string{heatLight, heatDark} {
		for _, c := range colors {
			if got := max(contrast(c, "#111111"), contrast(c, "#ffffff")); got < 4.5 {
				t.Errorf("%s: a contrast of %.2f", c, got)
			}
		}
	}
	p := Heat{Values: [][]float64{{.5, .98, 1.02, 1.05, 2, math.NaN()}}}
	var got string
	for _, v := range p.Values[0] {
		got += p.step(v, p.reach())
	}
	if got != "04458n" {
		t.Errorf("steps %s", got)
	}
}

package qna

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestDeparture(t *testing.T) {
	for name, tc := range map[string]struct {
		ca2, cs2, rho float64
		c             int
		want          float64
	}{
		"M/M/c departs as it arrives (Burke)": {1, 1, 0.7, 3, 1},
		"idle passes on":                      {16, 0.25, 0, 1, 16},
		"busy serves":                         {16, 0.25, 1, 1, 0.25},
		"in between":                          {4, 0, 0.5, 1, 1 + 0.75*3 - 0.25},
		"many servers are one by one":         {1, 0, 1, 100, 0.9},
		"rho above 1":                         {4, 0.5, 7, 1, 0.5},
		"rho is no number":                    {4, 0.5, math.NaN(), 1, 4},
	} {
		if got := Departure(tc.ca2, tc.cs2, tc.rho, tc.c); math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestPredictFollowsTheNetwork(t *testing.T) {
	bursty := Station{Rate: 10, Servers: 1, Rho: 0.8, CS2: 0, CA2: 16}
	after := Station{Rate: 10, Servers: 1, Rho: 0.8, CS2: 0}
	one := Departure(16, 0, 0.8, 1)
	two := Departure(one, 0, 0.8, 1)
	with := func(s Station, change func(*Station)) Station { change(&s); return s }
	for name, tc := range map[string]struct {
		n    Network
		want []float64
	}{
		"nothing":         {Network{}, []float64{}},
		"not measured":    {Network{Stations: []Station{after}}, []float64{1}},
		"a row flattens":  {Network{[]Station{bursty, after, after}, []Link{{0, 1}, {1, 2}}}, []float64{16, one, two}},
		"in any order":    {Network{[]Station{after, after, bursty}, []Link{{1, 0}, {2, 1}}}, []float64{two, one, 16}},
		"learned":         {Network{[]Station{bursty, with(after, func(s *Station) { s.Factor = 1.5 })}, []Link{{0, 1}}}, []float64{16, 1.5 * one}},
		"a part by lot":   {Network{[]Station{bursty, with(after, func(s *Station) { s.Rate = 2 })}, []Link{{0, 1}}}, []float64{16, Split(one, 0.2)}},
		"two into one":    {Network{[]Station{bursty, with(bursty, func(s *Station) { s.CA2 = 1; s.Rate = 30 }), with(after, func(s *Station) { s.Rate = 40 })}, []Link{{0, 2}, {1, 2}}}, []float64{16, 1, (10*one + 30*Departure(1, 0, 0.8, 1)) / 40}},
		"a measured exit": {Network{[]Station{bursty, with(after, func(s *Station) { s.CA2 = 9 })}, []Link{{0, 1}}}, []float64{16, one}},
	} {
		got := Predict(tc.n)
		if len(got) != len(tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
			continue
		}
		for i := range got {
			if math.Abs(got[i]-tc.want[i]) > 1e-9 {
				t.Errorf("%s: %v, want %v", name, got, tc.want)
				break
			}
		}
	}
}

// TestPredictConvergesWithCycles checks networks with cycles, with any rates and CVs. Pipelines
// that use stages in opposite order make such networks.
func TestPredictConvergesWithCycles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	floats := []float64{0, 1, -1, math.NaN(), math.Inf(1), 1e300, 1e-300, 7, 0.01}
	any := func() float64 { return floats[rng.IntN(len(floats))] }
	for range 2000 {
		var n Network
		for range 1 + rng.IntN(6) {
			n.Stations = append(n.Stations, Station{Rate: any(), Servers: rng.IntN(4), Rho: any(), CS2: any(), CA2: any(), Factor: any()})
		}
		for range rng.IntN(12) {
			n.Links = append(n.Links, Link{rng.IntN(len(n.Stations)), rng.IntN(len(n.Stations))})
		}
		for i, v := range Predict(n) {
			if !(v >= Least && v <= Most) {
				t.Fatalf("station %d of %+v: %v, want %v to %v", i, n, v, Least, Most)
			}
		}
	}
}

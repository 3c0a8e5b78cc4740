package study

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Interval is a value between the ends of its 95 % confidence interval, from N observations. With
// one observation, both ends are the value.
type Interval struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
	N     int     `json:"n"`
}

// Mean returns the arithmetic mean of values with Student's interval.
func Mean(values []float64) Interval {
	e := sim.NewEstimate(values)
	return Interval{e.Mean, sim.Round(e.Mean - e.CI), sim.Round(e.Mean + e.CI), len(values)}
}

// GeometricMean returns the geometric mean of positive values, with the interval of their
// logarithms.
func GeometricMean(values []float64) Interval {
	logs := make([]float64, len(values))
	for i, v := range values {
		logs[i] = math.Log(v)
	}
	return Mean(logs).exp()
}

// exp returns the exponential of an interval of logarithms.
func (i Interval) exp() Interval {
	return Interval{sim.Round(math.Exp(i.Value)), sim.Round(math.Exp(i.Low)), sim.Round(math.Exp(i.High)), i.N}
}

// sample returns the rounded values of the seeds as a Sample.
func sample(values []float64) Sample {
	s := Sample{Seeds: make([]float64, len(values))}
	for i, v := range values {
		s.Seeds[i] = sim.Round(v)
	}
	e := sim.NewEstimate(s.Seeds)
	s.Mean, s.CI = e.Mean, e.CI
	return s
}

// Interval returns the sample's mean with its interval, divided by unit.
func (s Sample) Interval(unit float64) Interval {
	return Interval{sim.Round(s.Mean / unit), sim.Round((s.Mean - s.CI) / unit), sim.Round((s.Mean + s.CI) / unit), len(s.Seeds)}
}

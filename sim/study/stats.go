package study

import (
	"math"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Interval is a value between the ends of its 95 % confidence interval, from N observations; the ends are the value itself of one.
type Interval struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
	N     int     `json:"n"`
}

// Mean is the arithmetic mean of values with Student's interval.
func Mean(values []float64) Interval {
	e := sim.NewEstimate(values)
	return Interval{e.Mean, sim.Round(e.Mean - e.CI), sim.Round(e.Mean + e.CI), len(values)}
}

// GeometricMean is that of values above 0, with the interval of their logarithms.
func GeometricMean(values []float64) Interval {
	logs := make([]float64, len(values))
	for i, v := range values {
		logs[i] = math.Log(v)
	}
	m := Mean(logs)
	return Interval{sim.Round(math.Exp(m.Value)), sim.Round(math.Exp(m.Low)), sim.Round(math.Exp(m.High)), m.N}
}

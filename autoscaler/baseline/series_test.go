package baseline

import (
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

// TestClustersMatchGoldenSeries compares the decisions of the clusters' autoscalers and the oracle,
// second by second, with golden files.
func TestClustersMatchGoldenSeries(t *testing.T) {
	row := []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 100 * time.Millisecond}
	for name, x := range map[string]struct {
		about string
		load  func(int) float64
	}{
		"step":  {"6, then 24 for two minutes, then 6 requests a second; a replica is ready after 4 s.", between(20, 140, 6, 24)},
		"burst": {"4 requests a second, 40 for three seconds; a replica is ready after 4 s.", between(20, 23, 4, 40)},
	} {
		t.Run(name, func(t *testing.T) {
			const slo, start, length = 800 * time.Millisecond, 4 * time.Second, 450
			known := OracleConfig{Wait: 1}
			for i, d := range row {
				known.Stages = append(known.Stages, OracleStage{Function: string(rune('a' + i)), Service: d, Start: start})
			}
			for second := range length {
				for k := range int(x.load(second)) {
					known.Arrivals = append(known.Arrivals, time.Duration(second)*time.Second+time.Duration(k)*time.Second/time.Duration(x.load(second)))
				}
			}
			oracle, err := NewOracle(known)
			if err != nil {
				t.Fatal(err)
			}
			for policy, got := range map[string]string{
				"hpa":    fluidRow[HPAMemory]{NewHPA(HPAConfig{}), slo, row, nil, false, start, x.load, length}.run(t, x.about),
				"kpa":    fluidRow[KPAMemory]{NewKPA(KPAConfig{}), slo, row, nil, false, start, x.load, length}.run(t, x.about),
				"oracle": fluidRow[OracleMemory]{oracle, slo, row, nil, false, start, x.load, length}.run(t, x.about),
			} {
				golden.Compare(t, policy+"-"+name+".txt", got)
			}
		})
	}
}

package autoscaler

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/plan/plantest"
)

func TestQuartIsACorrector(t *testing.T) {
	for name, cfg := range map[string]QuartConfig{
		"whole": {}, "no pid": {NoPID: true}, "no smoother": {NoSmooth: true}, "no cpu": {NoCPU: true},
	} {
		t.Run(name, func(t *testing.T) { plantest.RunCorrector(t, NewQuart(cfg)) })
	}
}

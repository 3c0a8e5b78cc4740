package autoscaler

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/plan/plantest"
)

func TestGainIsASharer(t *testing.T) { plantest.RunSharer(t, Gain{}) }

func TestFixedIsAnAllocator(t *testing.T)   { plantest.Run(t, Fixed{}) }
func TestUniformIsAnAllocator(t *testing.T) { plantest.Run(t, NewUniform(Config{})) }

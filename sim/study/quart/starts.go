package quart

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// What a start costs, in parts. All contenders' start costs are made of these.
const (
	// bertFromDisk is how long BERT-21B takes "from disk", completely, on an A40's machine (section 2.2).
	bertFromDisk = 45 * time.Second
	// eighthToDevice is how long an eighth of BERT-21B takes from main memory to a GPU (section 4.2).
	eighthToDevice = 800 * time.Millisecond
	// processStart is a container, an interpreter, and PyTorch with CUDA. Nobody published it for this testbed: it is assumed. Without container
	// and CUDA docs/RESULTS.md has 0.8 s.
	processStart = 3 * time.Second
	// cudaContext is that a process makes its CUDA context, which is never forked: assumed as well.
	cudaContext = 300 * time.Millisecond
	// forked is that a zygote's child says that it is there: docs/RESULTS.md, PyTorch, 1 GB, p50.
	forked = 21 * time.Millisecond
	// cachedPerGB is safetensors from the page cache to a GPU, for each 10⁹ bytes: ServerlessLLM's benchmark on an H100 of December 2025,
	// scenario "cached", takes 12.466 s and 10.165 s for models of 32.76 billion half-precision numbers.
	cachedPerGB = (12.466 + 10.165) / 2 / 65.52
)

func fromDisk(b sim.Bytes) time.Duration { return part(bertFromDisk, float64(b)/bertBytes()) }
func toDevice(b sim.Bytes) time.Duration {
	return part(eighthToDevice, float64(b)/(bertBytes()/stages))
}

func fromCache(b sim.Bytes) time.Duration {
	return part(time.Second, float64(b)/1e9*cachedPerGB)
}

func bertBytes() float64 { return Models()[0].Size() * gib }

func part(d time.Duration, of float64) time.Duration {
	return time.Duration(float64(d) * of).Round(time.Millisecond)
}

// plainStart is that of a system that starts a process for each replica: from disk on a node that has not had the parameters, from the
// node's page cache later. What the simulator calls a zygote stands for the page cache.
func plainStart(b sim.Bytes) sim.Start {
	return sim.Start{Cold: processStart + fromDisk(b), Fork: processStart + fromCache(b)}
}

// keptStart is that of the KeysManager: a zygote has the parameters in main memory, its child makes a CUDA context and copies them, and a
// parked child has its context already.
func keptStart(b sim.Bytes) sim.Start {
	return sim.Start{Cold: processStart + fromDisk(b), Fork: forked + cudaContext + toDevice(b), Parked: forked + toDevice(b)}
}

// starts gives every stage its start costs.
func starts(s sim.Scenario, of func(sim.Bytes) sim.Start) sim.Scenario {
	for i := range s.Stages {
		s.Stages[i].Start = of(s.Stages[i].Parameters)
	}
	return s
}

package quart

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// The parts of a start's cost. The start costs of all contenders are sums of these.
const (
	// bertFromDisk is the time of a complete load of BERT-21B "from disk", on a machine with an A40
	// (section 2.2).
	bertFromDisk = 45 * time.Second
	// eighthToDevice is how long an eighth of BERT-21B takes from main memory to a GPU (section 4.2).
	eighthToDevice = 800 * time.Millisecond
	// processStart is the time to start a container, an interpreter, and PyTorch with CUDA. It is an
	// assumption, because nobody has published it for this testbed. In docs/RESULTS.md, a start
	// without container and CUDA takes 0.8 s.
	processStart = 3 * time.Second
	// cudaContext is the time that a process needs to make its CUDA context. A child cannot inherit
	// one by a fork. The value is an assumption.
	cudaContext = 300 * time.Millisecond
	// forked is the time until a zygote's child reports that it is ready: docs/RESULTS.md, PyTorch, 1
	// GB, p50.
	forked = 21 * time.Millisecond
	// cachedPerGB is the time to load safetensors from the page cache to a GPU, in seconds per 10⁹
	// bytes. It is from ServerlessLLM's benchmark of December 2025 on an H100, scenario "cached":
	// 12.466 s and 10.165 s for models of 32.76 billion half-precision numbers.
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

// plainStart returns the start costs of a system that starts a new process per replica. The first
// start on a node reads the parameters from disk, later ones from the page cache. The simulator's
// zygote stands for the page cache here, so Fork is the cost of a later start.
func plainStart(b sim.Bytes) sim.Start {
	return sim.Start{Cold: processStart + fromDisk(b), Fork: processStart + fromCache(b)}
}

// keptStart returns the start costs of the KeysManager. A zygote holds the parameters in main
// memory. Its child makes a CUDA context and copies the parameters to the GPU. A parked child
// already has its context, and only copies.
func keptStart(b sim.Bytes) sim.Start {
	return sim.Start{Cold: processStart + fromDisk(b), Fork: forked + cudaContext + toDevice(b), Parked: forked + toDevice(b)}
}

// starts sets the start costs of every stage.
func starts(s sim.Scenario, of func(sim.Bytes) sim.Start) sim.Scenario {
	for i := range s.Stages {
		s.Stages[i].Start = of(s.Stages[i].Parameters)
	}
	return s
}

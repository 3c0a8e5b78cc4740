package quart

import (
	"fmt"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Model is a model of the paper's Table 1, cut into stages.
type Model struct {
	Name string
	// Time is the time of one call on a GPU, without waits: "Exec." of Table 1. Each stage's part
	// of it is in proportion to its parameters. That agrees with the authors' data: a cut by time
	// (TIME-8) gives nearly the same stages as a cut by parameters (PARAM-8). For BERT-21B, only
	// two stages change places. For OPT-66B, the largest stage has 9 of 64 equal layers in both
	// cuts. By section 5.3, the paper's own predictions of times are in proportion to parameters,
	// too.
	Time time.Duration
	// GiB has the sizes of the stages' parameters. They are from the authors' stage_sizes_gb.csv,
	// which says GB but has GiB. One proof is a layer of OPT-66B: its 12·9216² half-precision numbers
	// are 2.038 GB or 1.898 GiB, and the file has 1.8987. Another is BERT-21B: the file has 40.78 in
	// total, and Table 1 has 43 GB.
	GiB       []float64
	Batch     int     // largest number of calls that a replica computes at a time
	BatchCost float64 // what each further call of a batch adds, as a part of the first
}

// The names of Table 1. Its Whisper-9B has the 1.54 billion parameters of Whisper large-v2.
const (
	bert    = "BERT-21B"
	llama   = "LLAMA-7B"
	whisper = "Whisper-9B"
	opt     = "OPT-66B"
	resnet  = "WideResnet"
)

// stages is the number of parts into which section 8.1 cuts each model.
const stages = 8

// bertBatch is the time that each further call adds to a batch, as a part of the first call's time,
// with 128 tokens per call. It is from FasterTransformer's BERT-6B on one A100, which takes 10.87
// ms for one call and 24.98 ms for four (docs/bert_guide.md, FP16, TP1 PP1). With 1024 tokens, a
// batch saves nothing: four calls take four times as long as one.
const (
	batched   = 4
	bertBatch = (24.98/10.87 - 1) / (batched - 1)
)

// Models returns the models of Table 1, in the order of section 8.2.
//
// The sources have different times for BERT-21B:
//
//   - Table 1 has 137 ms, on the paper's testbed. This is the time used here.
//   - Section 2.1 has about 200 ms, on a V100.
//   - The released model_config.csv has 21 ms for each of eight stages, 168 ms together. That is
//     137/8 ms of work and about 4 ms to pass data on, per stage. Its times for two to 32 stages
//     fit this as well, and so do its times of OPT-66B and Whisper.
//
// LLAMA-7B takes 35 ms in that file, and 243 ms with the 1024 tokens of Table 1.
func Models() []Model {
	return []Model{
		{
			Name: bert, Time: 137 * time.Millisecond, Batch: batched, BatchCost: bertBatch, // 128 tokens
			// PARAM-8
			GiB: []float64{4.86317637, 5.12648155, 5.00147762, 5.25153426, 5.12648155, 5.00147762, 5.25153426, 5.15774088},
		},
		// 1024 tokens; llama-7b-whole: there is no cut into eight
		{Name: llama, Time: 243 * time.Millisecond, Batch: 1, BatchCost: 1, GiB: even(12.30942272)},
		// whisper-large-v2-whole
		{Name: whisper, Time: 74 * time.Millisecond, Batch: 1, BatchCost: 1, GiB: even(2.87540643)},
		{
			Name: opt, Time: 278 * time.Millisecond, Batch: batched, BatchCost: bertBatch, // 128 tokens
			// PARAM-8
			GiB: []float64{4.69553191, 17.08803837, 17.08803837, 17.08804314, 17.08803837, 17.08804105, 17.08803837, 15.18936763},
		},
		// Table 1; nothing was released
		{Name: resnet, Time: 646 * time.Millisecond, Batch: 1, BatchCost: 1, GiB: even(16e9 / gib)},
	}
}

// bert5 returns BERT-21B in five stages, as on the five GPUs of section 3: the authors' cut ME-5.
func bert5() Model {
	m := Models()[0]
	m.GiB = []float64{8.11411885, 8.00236248, 8.25241932, 8.12736656, 8.28367897}
	m.Batch = 1
	return m
}

const gib = 1 << 30

// even returns the sizes of equal stages: "we evenly divided these models into eight pipeline
// stages" (section 8.1).
func even(whole float64) []float64 {
	out := make([]float64, stages)
	for i := range out {
		out[i] = whole / stages
	}
	return out
}

// Size returns the size of all parameters, in GiB.
func (m Model) Size() float64 {
	sum := 0.0
	for _, s := range m.GiB {
		sum += s
	}
	return sum
}

// work is the load of every setting, as the mean number of GPUs that are busy if calls are not
// batched. The cluster has four times as many GPUs.
const work = 12

// Rate returns the rate per second at which calls of m, one by one, keep work GPUs busy.
func (m Model) Rate() float64 { return work / m.Time.Seconds() }

// The cluster of section 8.1: twelve GPU servers with 108 cores, 1 TiB and four GPUs each. The
// section does not name the type of GPU. Here it is the A40, which sections 2.2 and 3 use. An A40's
// 46,068 MiB hold BERT-21B, as the paper says, and each third of OPT-66B as cut in the released
// opt-66b-whole.
const (
	servers      = 12
	perServer    = 4
	gpus         = servers * perServer
	deviceMemory = 46_068 << 20
)

func cluster() []sim.Node {
	return []sim.Node{{Name: "server", Count: servers, CPU: 108_000, Memory: 1 << 40, GPUs: perServer, GPUMemory: deviceMemory}}
}

// pipelineName is the name of the only pipeline of a scenario.
const pipelineName = "model"

const (
	objective = 2                // per time of the model: the objective that policies get
	timeout   = 30 * time.Second // of a request
	// of a stage's times, which are gamma; inputs of one length differ little
	serviceCV = 0.2
	cores     = 4 // declared cores of a stage: the larger of the two in section 3.4
	mostCores = 8 // largest number of cores with which it was measured
)

// scenario returns m under some arrivals, without what a contender adds.
func (m Model) scenario(name string, a sim.Arrivals) sim.Scenario {
	return sim.Scenario{
		Name: name, Duration: warmup + counted, Warmup: warmup, Budget: gpus, Nodes: cluster(), Stages: m.stages(),
		Pipelines: []sim.Pipeline{{Name: pipelineName, SLO: objective * m.Time, Timeout: timeout, Arrivals: a}},
	}
}

// stages returns m's stages. Each replica has a whole GPU, because two computations on one GPU
// would slow each other down.
func (m Model) stages() []sim.Stage {
	out := make([]sim.Stage, len(m.GiB))
	whole := m.Size()
	for i, size := range m.GiB {
		out[i] = m.stage(stageName(i), size, size/whole)
		if i+1 < len(m.GiB) {
			out[i].Next = []string{stageName(i + 1)}
		}
	}
	return out
}

func stageName(i int) string { return fmt.Sprintf("s%d", i+1) }

// whole replaces a scenario's stages by one function that is the whole model. A replica has as many
// GPUs as its parameters need. Each of its GPUs computes one call at a time, and a call takes as
// long as in all stages together. So each GPU does as much work per second as the GPU of a stage.
func whole(s sim.Scenario) sim.Scenario {
	w := s.Stages[0]
	w.Name, w.Next, w.Service.Profile = "whole", nil, slices.Clone(w.Service.Profile)
	for _, x := range s.Stages[1:] {
		w.Parameters += x.Parameters
		for i := range w.Service.Profile {
			w.Service.Profile[i].Mean += x.Service.Profile[i].Mean
		}
	}
	w.GPU = int((w.Parameters + deviceMemory - 1) / deviceMemory)
	w.Slots, w.Max = w.GPU, gpus/w.GPU
	w.CPU, w.CPULimit = w.CPU*sim.Milli(w.GPU), w.CPULimit*sim.Milli(w.GPU)
	for i := range w.Service.Profile {
		w.Service.Profile[i].CPU *= sim.Milli(w.GPU)
	}
	s.Stages, s.Budget = []sim.Stage{w}, gpus/w.GPU
	return s
}

// queueLimit is larger than any queue of a run, so requests fail by their timeout, never because of
// a full queue.
const queueLimit = 100_000

// stage returns a function with a part of m's parameters and of its time.
func (m Model) stage(name string, size, share float64) sim.Stage {
	cv, cost := serviceCV, m.BatchCost
	s := sim.Stage{Variant: sim.Variant{
		Name: name, GPU: 1, Min: 1, Max: gpus, Batching: sim.Batching{Batch: m.Batch}, Slots: 1, QueueLimit: queueLimit,
		Parameters: sim.Bytes(size * gib), CPU: cores * 1000, CPULimit: cores * 1000,
		Service: sim.Service{Dist: sim.Gamma, CV: &cv, BatchCost: &cost},
	}}
	for _, q := range []int{cores, 6, mostCores} {
		for _, b := range []int{1, batched} {
			if b > m.Batch {
				continue
			}
			t := float64(m.Time) * share * quota(q) * (1 + cost*float64(b-1))
			s.Service.Profile = append(s.Service.Profile, sim.Point{CPU: sim.Milli(q * 1000), Batch: b, Mean: time.Duration(t), CV: cv})
		}
	}
	return s
}

// quota returns the time of a call with q cores, divided by its time with the declared cores. The
// time is s(q) = a + b/q. In section 3.4, the median with four cores is 33 % lower than with two:
// s(4) = 0.67·s(2), so b = 3.88·a.
func quota(q int) float64 {
	const b = (1 - 0.67) / (0.67/2 - 1.0/4)
	return (1 + b/float64(q)) / (1 + b/cores)
}

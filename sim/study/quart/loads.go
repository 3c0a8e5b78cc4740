package quart

import (
	"fmt"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// A run warms up, then counts.
const (
	warmup  = time.Minute
	counted = 2 * time.Minute
	window  = warmup + counted
)

// The seeds of the comparison, and those on which contenders are tuned. Nobody has looked at seeds
// of the comparison while policies were made: the seeds below 3001 were used for that.
var (
	testSeeds  = study.Seeds{First: 3001, N: 10}
	trainSeeds = study.Seeds{First: 101, N: 2}
)

// cvs has the coefficients of variation of the gaps in section 8.3. Gaps are gamma.
var cvs = []float64{0.1, 1, 2, 4, 8}

// gammaSetting returns the setting of m under a renewal process of gamma gaps. Its training load
// has other seeds.
func gammaSetting(m Model, cv float64) study.Setting {
	group := "cv=" + strconv.FormatFloat(cv, 'g', -1, 64)
	name := m.Name + " " + group
	return study.Setting{
		Name: name, Model: m.Name, Group: group, Service: m.Time, Train: tunedOn(m),
		Scenario: func(bool) sim.Scenario { return m.scenario(name, renewal(m.Rate(), cv)) },
	}
}

func renewal(rate, cv float64) sim.Arrivals {
	return sim.Arrivals{Rate: strconv.FormatFloat(rate, 'g', -1, 64), CV: &cv}
}

// tunedOn reports whether contenders are tuned on m. They are tuned on two models: the paper's own
// example, and one that does not batch.
func tunedOn(m Model) bool { return m.Name == bert || m.Name == llama }

// trace is a public recording of requests for models.
type trace struct {
	Name   string
	Source string
	file   string
	format arrivals.Format
	// tick is the resolution of the recording's clock; 0: exact. Requests with equal timestamps did
	// not all arrive at that instant. So arrivals are counted per tick, and each is played at a random
	// time within its tick.
	tick time.Duration
	// first part, which has the windows for training; those of the comparison are in the rest
	first  time.Duration
	models []string // models to which it is played
	budget float64  // GPUs, replaces the study's; 0: the study's
}

// noFunctions says why the paper's own trace is missing.
const noFunctions = "of Microsoft's Azure Functions trace, which the paper replays without saying which functions of it and how scaled, " +
	"only samples can be had: four functions with at most five calls a minute, and 199 calls in 20 minutes. Each call would have to stand for hundreds"

// traces returns the traces that can be played. The paper describes its own trace as about as
// bursty as the first one.
func traces() []trace {
	const llm, early = "Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024), ", 4 * window
	return []trace{
		{
			Name: "azure-code", Source: llm + "code", file: "azure-llm-2023/AzureLLMInferenceTrace_code.csv.gz", format: arrivals.AzureLLM, first: early,
			models: []string{bert, llama, opt},
			budget: 3 * work, // no policy that follows its bursts keeps to twice the work
		},
		{
			Name: "azure-conv", Source: llm + "conversation", file: "azure-llm-2023/AzureLLMInferenceTrace_conv.csv.gz", format: arrivals.AzureLLM,
			first: early, models: []string{bert, llama, whisper, opt, resnet},
		},
		{
			Name: "mooncake", Source: "Mooncake conversation trace (Qin et al., FAST 2025)", file: "mooncake/conversation_trace.jsonl.gz",
			format: arrivals.Mooncake, tick: 3 * time.Second, first: early, models: []string{bert},
		},
		{
			Name: "twitter", Source: "Twitter stream, 2018-04-25, 06:30 to 07:00", file: "twitter/twitter-2018-04-25_30min_rps.csv",
			format: arrivals.Counts, first: 2 * window, models: []string{bert},
		},
	}
}

// read reads the whole trace.
func (t trace) read(open sim.Opener) (arrivals.Trace, error) {
	f, err := open(t.file)
	if err != nil {
		return arrivals.Trace{}, err
	}
	defer f.Close()
	all, err := arrivals.ReadTrace(f, t.format, "")
	if err != nil {
		return all, fmt.Errorf("%s: %w", t.file, err)
	}
	if t.tick > 0 {
		all = counts(all, t.tick)
	}
	return all, nil
}

// counts drops the position of arrivals within a tick.
func counts(t arrivals.Trace, tick time.Duration) arrivals.Trace {
	out := arrivals.Trace{Bucket: tick, Counts: make([]float64, t.Length/tick+1)}
	for _, at := range t.Times {
		out.Counts[(at+tick/2)/tick]++ // ticks are up to a millisecond early or late
	}
	out.Length = time.Duration(len(out.Counts)) * tick
	return out
}

// windows returns where the windows of a trace begin. A window is the part of the trace that one
// run plays. length is the trace's length. For tuning, windows are in the first part of the trace;
// for the comparison, they are in the rest. There are at most as many windows as seeds.
//
// Windows do not overlap. They are in equally long pieces of the trace, one per piece. For the
// comparison, a window is in the middle of its piece. For tuning, it is at the end of its piece,
// where the load is about the trace's mean.
func (t trace) windows(length time.Duration, train bool) []time.Duration {
	from, to, most := t.first, length, testSeeds.N
	if train {
		from, to, most = 0, t.first, trainSeeds.N
	}
	out := make([]time.Duration, min(int((to-from)/window), most))
	for i := range out {
		each := (to - from) / time.Duration(len(out))
		before := each - window // within its part
		if !train {
			before /= 2
		}
		out[i] = from + time.Duration(i)*each + before
	}
	return out
}

// play returns the arrivals of a seed's window, scaled so that the whole trace would have the given
// mean rate. To raise the rate, it adds arrivals, each at a random time before the next one. To
// lower the rate, it drops arrivals at random. It does not stretch time.
func (t trace) play(all arrivals.Trace, rate float64, train bool, seed uint64) (arrivals.Source, error) {
	first := testSeeds.First
	if train = train || seed == sampleSeed; train {
		first = trainSeeds.First
	}
	begin := t.windows(all.Length, train)
	if len(begin) == 0 || seed < first {
		return nil, fmt.Errorf("trace %s, seed %d: want one from %d on, and more than %v of a trace, which has %v", t.Name, seed, first, t.first+window, all.Length)
	}
	from := begin[(seed-first)%uint64(len(begin))]
	part, err := all.Cut(from, from+window)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", t.Name, err)
	}
	return part.Replay(arrivals.Replay{Scale: rate * all.Length.Seconds() / all.Arrivals()}, seed)
}

// settings returns the settings of models under a trace. Seeds have different windows, as long as
// there are enough windows.
func (t trace) settings(all arrivals.Trace, models []Model) []study.Setting {
	var out []study.Setting
	for _, m := range models {
		name := m.Name + " " + t.Name
		out = append(out, study.Setting{
			Name: name, Model: m.Name, Group: t.Name, Service: m.Time, Train: tunedOn(m), Budget: t.budget,
			Scenario: func(train bool) sim.Scenario {
				return m.scenario(name, sim.Arrivals{Make: func(seed uint64) (arrivals.Source, error) { return t.play(all, m.Rate(), train, seed) }})
			},
		})
	}
	return out
}

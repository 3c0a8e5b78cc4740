package study

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Setting is one load on one model: what contenders are compared on.
type Setting struct {
	Name    string        // unique in its study: "BERT-21B cv=4"
	Model   string        // "BERT-21B"
	Group   string        // "cv=4": the settings of a group are tuned together
	Service time.Duration // T: latency without any wait. Objectives are multiples of it
	Train   bool          // contenders are tuned on it, too: on its scenario for training
	Budget  float64       // of GPUs, in place of the study's; the settings of a group have the same; 0: the study's
	// Scenario is what is simulated, complete but for its policies, seeds and what [Contender.Apply] adds; train asks for the load that
	// contenders are tuned on, which has nothing of the other. Each call returns one of its own, and several goroutines call. It has one
	// pipeline.
	Scenario func(train bool) sim.Scenario
}

// Knob is one parameter of a contender and the range that is searched.
type Knob struct {
	Name      string
	Low, High float64   // inclusive; of Values: not used
	Log       bool      // searched evenly in the logarithm; Low is above 0
	Whole     bool      // a whole number
	Values    []float64 // in place of a range: one of these
}

// Contender is one way to size pipelines.
type Contender struct {
	Name   string // "kpa", unique in its study
	Title  string // "Knative KPA"
	Source string // where it and its defaults are from

	Space    []Knob
	Defaults []float64 // as published, a value a knob: the first candidate
	// Like names the contender whose tuned configuration this one has, as ablations do; it has the same Space. Empty: its own.
	Like string

	Oracle bool // it knows what no policy can: not a baseline
	Ours   bool // it, or a part of it, is what the study is about: not a baseline
	// In says on which settings it is evaluated; nil: on all.
	In func(Setting) bool
	// Apply puts it into a scenario: its stages and start costs, and its policy as the one entry of s.Policies. Knobs are in the order of
	// Space. It may change s, which is its own.
	Apply func(s sim.Scenario, knobs []float64) sim.Scenario
}

// Seeds are N of them, one after another.
type Seeds struct {
	First uint64 `json:"first"`
	N     int    `json:"n"`
}

// Study is a question to the simulator: who serves which load how well, for how many GPUs.
type Study struct {
	Name, Title string
	About       string // what it asks, and of what, in a few lines of Markdown
	Settings    []Setting
	Contenders  []Contender
	Ours        string    // the contender that the others are compared with
	Budget      float64   // G: GPUs that a tuned configuration may have on average
	Candidates  int       // how many configurations of each contender are tried, the defaults included
	Train, Test Seeds     // those of Train are none of Test
	Multiples   []float64 // of T: within which parts of the requests are counted; has Objective
	Objective   float64   // the multiple of T that goodput is of

	// LeftOut are settings that there would be, had their data been there.
	LeftOut []LeftOut

	Goals Goals // of ours

	// Judge holds the result against what was claimed; nil: nothing was.
	Judge func(*Result) []Claim
	// Draw makes figures of the result; nil: none.
	Draw func(*Result) ([]Figure, error)
}

// Figure is a drawing of a result.
type Figure struct {
	Name  string // of its file, without ".svg"
	Title string
	SVG   []byte
}

package study

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Setting is one load on one model, on which contenders are compared.
type Setting struct {
	Name    string        // unique in its study: "BERT-21B cv=4"
	Model   string        // "BERT-21B"
	Group   string        // "cv=4"; the settings of a group are tuned together
	Service time.Duration // T: latency without any wait. Objectives are multiples of it
	Train   bool          // contenders are tuned on its training scenario
	Budget  float64       // GPUs, replaces the study's; equal in a group; 0: the study's
	// TunedAs names the group whose configurations are used if its own group has none.
	TunedAs string
	// Scenario returns the simulated scenario, without policies, seeds and the changes of
	// [Contender.Apply]. It has one pipeline. If train is set, it has the load for tuning, which
	// shares nothing with the load of the comparison. Each call returns a new scenario. Several
	// goroutines may call Scenario at the same time.
	Scenario func(train bool) sim.Scenario
	// Then changes the scenario after [Contender.Apply], for conditions that are equal for all
	// contenders; nil: nothing changes. It may change the stages in place.
	Then func(sim.Scenario) sim.Scenario
}

// Knob is a parameter of a contender, with the range that is searched.
type Knob struct {
	Name      string
	Low, High float64   // inclusive; not used with Values
	Log       bool      // searched evenly in the logarithm; Low is above 0
	Whole     bool      // a whole number
	Values    []float64 // the possible values, instead of a range
}

// Contender is one way to size pipelines.
type Contender struct {
	Name   string // "kpa", unique in its study
	Title  string // "Knative KPA"
	Source string // source of it and of its defaults

	Space    []Knob
	Defaults []float64 // as published, one value per knob: the first candidate
	// Like names the contender whose tuned configuration this one uses, for ablations. Both have the
	// same Space. If Like is empty, this contender is tuned itself.
	Like string

	Oracle bool // knows what no policy can know; not a baseline
	Ours   bool // is the subject of the study, or a part of it; not a baseline
	// Cores is the largest number of cores that a replica may use; 0: not part of the study. A
	// contender with the study's number has means equal to ours.
	Cores int
	// In reports whether it is evaluated on a setting; nil: on all.
	In func(Setting) bool
	// Apply adds the contender to a scenario, which it may change: its stages, its start costs, and
	// its policy, as the only entry of s.Policies. knobs are in the order of Space.
	Apply func(s sim.Scenario, knobs []float64) sim.Scenario
}

// Seeds are N consecutive seeds.
type Seeds struct {
	First uint64 `json:"first"`
	N     int    `json:"n"`
}

// Study is a question to the simulator: how well does each contender serve each load, and with how
// many GPUs?
type Study struct {
	Name, Title string
	About       string // the question, in a few lines of Markdown
	Settings    []Setting
	Contenders  []Contender
	Ours        string    // the contender with which the others are compared
	Budget      float64   // G: GPUs that a tuned configuration may use on average
	Cores       int       // cores per replica, of ours and of equal means; 0: not part of the study
	Candidates  int       // number of configurations tried per contender, with the defaults
	Train, Test Seeds     // without common seeds
	Multiples   []float64 // multiples of T, within which requests are counted; includes Objective
	Objective   float64   // the multiple of T for goodput

	// More is tuned and evaluated after the study, with its own seeds and contenders; nil: nothing.
	// It has the same name, candidates, training seeds and budget, and shares the configurations.
	More *Study

	// Store, if not nil, keeps finished runs. Runs that it has are not made again.
	Store *Store

	// LeftOut has the settings whose data is missing.
	LeftOut []LeftOut

	Goals    Goals         // of ours
	Expected []Expectation // written down before the first run

	// Judge compares the result with claims; nil: there are none.
	Judge func(*Result) []Claim
	// Draw draws figures of the result; nil: none.
	Draw func(*Result) ([]Figure, error)
}

// Figure is a drawing of a result.
type Figure struct {
	Name  string // of its file, without ".svg"
	Title string
	SVG   []byte
}

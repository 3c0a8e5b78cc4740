package study

// Schema is the version of the JSON of a Result.
const Schema = "stagecoach-study/1"

// Result is the result of a study.
type Result struct {
	Schema     string        `json:"schema"`
	Study      string        `json:"study"`
	Title      string        `json:"title"`
	About      string        `json:"about,omitempty"` // what was asked, and about what
	Ours       string        `json:"ours"`
	Budget     float64       `json:"budget_gpus"`
	Cores      int           `json:"cores,omitempty"` // per replica, of ours and of equal means
	Seeds      Seeds         `json:"seeds"`
	Multiples  []float64     `json:"multiples"`
	Objective  float64       `json:"objective"`
	Settings   []SettingInfo `json:"settings"`
	Contenders []ContendInfo `json:"contenders"`
	LeftOut    []LeftOut     `json:"left_out,omitempty"`
	Outcomes   []Outcome     `json:"outcomes"` // by setting, then contender, in the study's order
	Tuned      Tuned         `json:"tuned"`
	Goals      Goals         `json:"goals"`
	// over all settings, per group, then per setting
	Reached []GoalResult `json:"reached,omitempty"`
	Claims  []Claim      `json:"claims,omitempty"`
	// for the expectations of which there is a comparison
	Expected []Expected `json:"expected,omitempty"`
	More     *Result    `json:"more,omitempty"` // of Study.More; without Tuned
}

// SettingInfo is the part of a Setting in a result.
type SettingInfo struct {
	Name    string  `json:"name"`
	Model   string  `json:"model"`
	Group   string  `json:"group"`
	Service float64 `json:"service_s"`
	Seconds float64 `json:"seconds"`               // seconds of a run that count
	Budget  float64 `json:"budget_gpus,omitempty"` // replaces the study's
	Train   bool    `json:"train,omitempty"`       // contenders were tuned on its model
}

// ContendInfo is the part of a Contender in a result.
type ContendInfo struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Source string `json:"source,omitempty"`
	Like   string `json:"like,omitempty"`
	Oracle bool   `json:"oracle,omitempty"`
	Ours   bool   `json:"ours,omitempty"`
	Cores  int    `json:"cores,omitempty"` // largest number that a replica may use
}

// LeftOut is a setting whose data is missing.
type LeftOut struct {
	Setting string `json:"setting"`
	Why     string `json:"why"`
}

// Outcome is the result of one contender on one setting.
type Outcome struct {
	Setting   string    `json:"setting"`
	Contender string    `json:"contender"`
	Knobs     []float64 `json:"knobs,omitempty"` // in the order of the contender's Space
	// defaults, because there was no tuned configuration
	Untuned bool `json:"untuned,omitempty"`
	// the group that the configuration was tuned for, if that is another than the setting's
	TunedAs string `json:"tuned_as,omitempty"`

	// Latencies include all requests: a failed request counts with its timeout. Otherwise a contender
	// that refuses requests would look faster than one that lets them wait.
	Requests Sample `json:"requests"`
	Mean     Sample `json:"mean_s"`
	P50      Sample `json:"p50_s"`
	P75      Sample `json:"p75_s"`
	P99      Sample `json:"p99_s"`
	// mean latency of answered requests only; the timeout if none was
	Answered Sample `json:"mean_answered_s"`
	// shares of requests within each of Result.Multiples of T
	InTime []Sample `json:"in_time"`
	// requests within Result.Objective of T, per second
	Goodput     Sample         `json:"goodput_per_s"`
	Failed      Sample         `json:"failed"` // share of requests
	GPUs        Sample         `json:"gpus"`   // on average over time
	GPUSeconds  Sample         `json:"gpu_s"`
	CoreSeconds Sample         `json:"core_s"`
	Stages      []StageOutcome `json:"stages"` // sorted by name, those of the contender's scenario
	// hashes of all decisions of each seed's run, for ours and its ablations
	Decisions []string `json:"decisions,omitempty"`
}

// StageOutcome is the result of a stage's calls.
type StageOutcome struct {
	Name   string  `json:"name"`
	Queue  Sample  `json:"queue"`  // waiting calls, on average over time
	Wait   Sample  `json:"wait_s"` // mean per call
	CV     Sample  `json:"arrival_cv"`
	Starts []Start `json:"starts,omitempty"` // sorted by path, key stages last
}

// Start summarizes starts on one path, from the order to ready, over all seeds.
type Start struct {
	Path string  `json:"path"`
	Key  bool    `json:"key,omitempty"` // the stage was a key stage in the plan that ordered them
	N    int     `json:"n"`
	Mean float64 `json:"mean_s"`
}

// Sample is a figure of each seed, their mean, and half the width of its 95 % confidence interval.
type Sample struct {
	Mean  float64   `json:"mean"`
	CI    float64   `json:"ci95"`
	Seeds []float64 `json:"seeds"` // in their order
}

package study

// Schema is the version of the JSON of a Result.
const Schema = "stagecoach-study/1"

// Result is what came of a study.
type Result struct {
	Schema     string        `json:"schema"`
	Study      string        `json:"study"`
	Title      string        `json:"title"`
	About      string        `json:"about,omitempty"` // what was asked, and of what
	Ours       string        `json:"ours"`
	Budget     float64       `json:"budget_gpus"`
	Seeds      Seeds         `json:"seeds"`
	Multiples  []float64     `json:"multiples"`
	Objective  float64       `json:"objective"`
	Settings   []SettingInfo `json:"settings"`
	Contenders []ContendInfo `json:"contenders"`
	LeftOut    []LeftOut     `json:"left_out,omitempty"`
	Outcomes   []Outcome     `json:"outcomes"` // by setting, then contender, in the order of the study
	Tuned      Tuned         `json:"tuned"`
	Goals      Goals         `json:"goals"`
	Reached    []GoalResult  `json:"reached,omitempty"` // of all settings, groups, then each setting
	Claims     []Claim       `json:"claims,omitempty"`
}

// SettingInfo is what a result keeps of a Setting.
type SettingInfo struct {
	Name    string  `json:"name"`
	Model   string  `json:"model"`
	Group   string  `json:"group"`
	Service float64 `json:"service_s"`
	Seconds float64 `json:"seconds"`               // of a run that count
	Budget  float64 `json:"budget_gpus,omitempty"` // in place of the study's
}

// ContendInfo is what a result keeps of a Contender.
type ContendInfo struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Source string `json:"source,omitempty"`
	Like   string `json:"like,omitempty"`
	Oracle bool   `json:"oracle,omitempty"`
	Ours   bool   `json:"ours,omitempty"`
}

// LeftOut is a setting that could not be had.
type LeftOut struct {
	Setting string `json:"setting"`
	Why     string `json:"why"`
}

// Outcome is what came of one contender on one setting.
type Outcome struct {
	Setting   string    `json:"setting"`
	Contender string    `json:"contender"`
	Knobs     []float64 `json:"knobs,omitempty"`   // in the order of the contender's Space
	Untuned   bool      `json:"untuned,omitempty"` // the defaults, for want of anything better

	// Latencies are of all requests: a failed one has taken its timeout. Who refuses what would wait long would else look fast.
	Requests    Sample         `json:"requests"`
	Mean        Sample         `json:"mean_s"`
	P50         Sample         `json:"p50_s"`
	P75         Sample         `json:"p75_s"`
	P99         Sample         `json:"p99_s"`
	Answered    Sample         `json:"mean_answered_s"` // mean latency of what was answered alone; the timeout if nothing was
	InTime      []Sample       `json:"in_time"`         // parts of the requests, within each of Result.Multiples of T
	Goodput     Sample         `json:"goodput_per_s"`   // within Result.Objective of T
	Failed      Sample         `json:"failed"`          // part of the requests
	GPUs        Sample         `json:"gpus"`            // on average over time
	GPUSeconds  Sample         `json:"gpu_s"`
	CoreSeconds Sample         `json:"core_s"`
	Stages      []StageOutcome `json:"stages"` // sorted by name, those of the contender's scenario
}

// StageOutcome is what calls of a stage went through.
type StageOutcome struct {
	Name   string  `json:"name"`
	Queue  Sample  `json:"queue"`  // calls that wait, on average over time
	Wait   Sample  `json:"wait_s"` // of a call, on average
	CV     Sample  `json:"arrival_cv"`
	Starts []Start `json:"starts,omitempty"` // sorted by path, those of key stages after others
}

// Start is what it took to bring up replicas on one path, from the order to ready, over all seeds.
type Start struct {
	Path string  `json:"path"`
	Key  bool    `json:"key,omitempty"` // it was a key stage in the plan that ordered them
	N    int     `json:"n"`
	Mean float64 `json:"mean_s"`
}

// Sample is a figure of each seed, their mean, and half the width of its 95 % confidence interval.
type Sample struct {
	Mean  float64   `json:"mean"`
	CI    float64   `json:"ci95"`
	Seeds []float64 `json:"seeds"` // in their order
}

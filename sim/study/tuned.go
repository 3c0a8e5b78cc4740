package study

// TunedSchema is the version of the JSON of Tuned.
const TunedSchema = "stagecoach-tuned/1"

// Tuned are the configurations that were tried, and those that were chosen.
type Tuned struct {
	Schema     string   `json:"schema"`
	Study      string   `json:"study"`
	Budget     float64  `json:"budget_gpus"`
	Candidates int      `json:"candidates"` // of each contender, at most
	Seeds      Seeds    `json:"seeds"`
	Choices    []Choice `json:"choices"` // by group, then contender, in the order of the study
}

// Choice is a contender's in one group of settings.
type Choice struct {
	Group     string   `json:"group"`
	Contender string   `json:"contender"`
	Settings  []string `json:"settings"` // that it was tuned on
	Knobs     []string `json:"knobs"`
	Chosen    int      `json:"chosen"` // index into Points
	Points    []Point  `json:"points"` // all that was tried; the first one is the default
}

// Point is a configuration that was tried: the means over its runs.
type Point struct {
	Knobs  []float64 `json:"knobs"`
	GPUs   float64   `json:"gpus"`    // on average over time
	Score  float64   `json:"score"`   // ln(latency/T), where a failed request has taken its timeout; less is better
	InTime float64   `json:"in_time"` // part of the requests, within the objective
	Failed float64   `json:"failed"`  // part of the requests
}

package study

// Verdict says whether a claim was seen.
type Verdict string

// The verdicts.
const (
	Holds       Verdict = "holds"
	Partly      Verdict = "partly"
	No          Verdict = "no"
	NotMeasured Verdict = "not measured"
)

// Claim is something that was published, and what came of it here.
type Claim struct {
	ID      string  `json:"id"`    // "Q1"
	What    string  `json:"what"`  // "mean latency against Cocktail"
	Paper   string  `json:"paper"` // "-36.7 %"
	Ours    string  `json:"ours"`  // as text; empty: nothing of it was evaluated
	Values  []Value `json:"values,omitempty"`
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why,omitempty"`
	With    string  `json:"with,omitempty"` // what else is to be known: how many settings, what it cost, what failed
}

// Value is a figure that a claim rests on.
type Value struct {
	Name string `json:"name"`
	Interval
}

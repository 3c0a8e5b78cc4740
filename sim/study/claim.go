package study

// Verdict says whether a claim was confirmed.
type Verdict string

// The verdicts.
const (
	Holds       Verdict = "holds"
	Partly      Verdict = "partly"
	No          Verdict = "no"
	NotMeasured Verdict = "not measured"
)

// Claim is a published claim, and the result for it here.
type Claim struct {
	ID      string  `json:"id"`    // "Q1"
	What    string  `json:"what"`  // "mean latency against Cocktail"
	Paper   string  `json:"paper"` // "-36.7 %"
	Ours    string  `json:"ours"`  // as text; empty: nothing was evaluated
	Values  []Value `json:"values,omitempty"`
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why,omitempty"`
	With    string  `json:"with,omitempty"` // other facts: number of settings, cost, failures
}

// Value is a figure behind a claim.
type Value struct {
	Name string `json:"name"`
	Interval
}

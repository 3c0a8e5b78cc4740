package quart

import (
	"slices"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// withTwins returns r with the outcomes of the paper's opponents with eight cores under the names
// of the published ones, so that the claims can be judged on a study that has only the former. It
// returns false if r has any of the published ones, or none of their twins.
func withTwins(r *study.Result) (*study.Result, bool) {
	has := func(name string) bool {
		return slices.ContainsFunc(r.Outcomes, func(o study.Outcome) bool { return o.Contender == name })
	}
	if slices.ContainsFunc(three, has) || !slices.ContainsFunc(three, func(name string) bool { return has(twin(name)) }) {
		return r, false
	}
	out := *r
	out.Outcomes = slices.Clone(r.Outcomes)
	for i := range out.Outcomes {
		for _, name := range three {
			if o := &out.Outcomes[i]; o.Contender == twin(name) {
				o.Contender = name
			}
		}
	}
	return &out, true
}

// twin returns the name of an opponent with as many cores as ours may use.
func twin(name string) string { return name + "8" }

// againstTwins is among the circumstances of a claim that was judged against twins. The reasons are
// about the published opponents, so such a claim has none.
const againstTwins = "; opponents have eight cores"

// means returns what is to be said about the means of the paper's opponents: nothing if they are as
// published.
func (j *judged) means() string {
	if j.twins {
		return againstTwins
	}
	return ""
}

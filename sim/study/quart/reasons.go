package quart

import "github.com/stagecoach-serving/stagecoach/sim/study"

// reason says why a claim was judged as it was.
type reason struct {
	verdict study.Verdict // the verdict that it explains; it is not given with another one
	why     string
}

// reasons has the reason for each verdict, by the id of the claim. They were written by hand, after
// a look at the runs behind the verdicts.
var reasons = map[string]reason{
	"Q2a":   {study.Holds, "as Q1c"},
	"Q2b":   {study.Holds, "as Q1c"},
	"Q2c":   {study.Holds, "as Q1c"},
	"Q2d":   {study.Holds, "as Q1c"},
	"Q2e":   {study.Partly, "as Q1c"},
	"Q1a":   {study.Partly, "where load changes, a whole model starts too late; and ours may use twice the cores"},
	"Q1b":   {study.Partly, "a part of it is cores: with as many, InferLine is nearly even"},
	"Q1c":   {study.Holds, "about half of it is cores; the rest is azure-code, whose bursts a forecast of the mean does not have"},
	"Q3":    {study.Holds, "the paper's load is not known: a part in time says as much of the load as of the system"},
	"Q3a":   {study.Partly, "tuned for the load, INFless has most in time as well: twice as many is not left"},
	"Q3b":   {study.Partly, "as Q3a"},
	"Q3c":   {study.Partly, "as Q3a"},
	"Q4a":   {study.Partly, "steady arrivals leave nothing to follow: a quarter of the latency is what eight cores take off each stage in place of four, and fixed counts with eight cores have it, too. Where a model fits on a GPU, one pool of copies waits less than eight lines"},
	"Q4b":   {study.Partly, "as Q4a"},
	"Q4c":   {study.Partly, "as Q4b"},
	"Q5a":   {study.Partly, "a factor of ten needs a rival that answers next to nothing in time; tuned, each answers most up to CV 2"},
	"Q5b":   {study.Partly, "as Q5a"},
	"Q5c":   {study.Partly, "as Q5a"},
	"Q5-8a": {study.Partly, "bursts of CV 8 come within milliseconds: whoever scales, who has capacity when they come is in time, and on the same GPUs all have about as much"},
	"Q5-8b": {study.Partly, "as Q5-8a"},
	"Q5-8c": {study.Partly, "as Q5-8a; Cocktail's forecast keeps the least for bursts"},
	"Q6":    {study.Holds, "everybody's grows like that, ours too. Bursts shorter than a start are waited for"},
	"Q7":    {study.Partly, "as Q4a"},
	"Q8a":   {study.No, "a queue whose services vary less than its arrivals sends on what varies less: by Whitt's QNA 0.62 after the first stage, with a load of 0.8 and services' CV of 0.2"},
	"Q13":   {study.Holds, "replicas do not disturb each other in a simulation"},
}

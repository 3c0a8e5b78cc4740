package quart

import "github.com/stagecoach-serving/stagecoach/sim/study"

// reason is why a claim was judged as it was.
type reason struct {
	verdict study.Verdict // that it is the reason of: it is not stated of another one
	why     string
}

// reasons are by the ids of claims. They are written by who has looked at the runs behind a verdict.
var reasons = map[string]reason{
	"Q8a": {study.No, "a queue whose services vary less than its arrivals sends on what varies less: by Whitt's QNA 0.62 after the first stage, with a load of 0.8 and services' CV of 0.2"},
	"Q13": {study.Holds, "replicas do not disturb each other in a simulation"},
}

package load

import (
	"regexp"
	"slices"
	"strconv"
	"time"
)

// StageTime is the time that a request spent in a stage, summed over its calls.
type StageTime struct {
	Stage         string
	Calls         int
	Wait, Service time.Duration
}

var timingForm = regexp.MustCompile(`([^,; ]+)\.(wait|service);dur=([0-9.]+)(?:;desc="(\d+) calls")?`)

// ServerTiming parses Stagecoach's Server-Timing header: STAGE.wait and STAGE.service, with a
// duration in milliseconds. It ignores other metrics.
func ServerTiming(header string) []StageTime {
	var out []StageTime
	for _, m := range timingForm.FindAllStringSubmatch(header, -1) {
		ms, err := strconv.ParseFloat(m[3], 64)
		if err != nil || ms > float64(longest/time.Millisecond) {
			continue
		}
		i := slices.IndexFunc(out, func(s StageTime) bool { return s.Stage == m[1] })
		if i < 0 {
			i = len(out)
			out = append(out, StageTime{Stage: m[1], Calls: 1})
		}
		if n, err := strconv.Atoi(m[4]); err == nil {
			out[i].Calls = n
		}
		if d := time.Duration(ms * float64(time.Millisecond)); m[2] == "wait" {
			out[i].Wait = d
		} else {
			out[i].Service = d
		}
	}
	return out
}

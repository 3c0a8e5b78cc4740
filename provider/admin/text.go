package admin

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// Survived says that replicas ended under batches of more than most calls. It returns an empty text
// if most is 0: no replica has.
func Survived(most int) string {
	if most == 0 {
		return ""
	}
	return fmt.Sprintf("batches of at most %d until the next deploy, because replicas ended under larger ones, and not under their calls alone: "+
		"raise limits.memory, or lower stagecoach.dev/batch", most)
}

// MeasuredUntil returns the detail of a function that is pinned to be measured.
func MeasuredUntil(until time.Time) string {
	return "held at one replica to be measured (stagecoach profile), at least until " + until.UTC().Format(time.TimeOnly)
}

// Barred describes the devices that are barred for a function that runs on other devices. If the
// function runs on none, plan.Want.Short says so.
func Barred(bars []plan.Bar) string {
	var out []string
	for _, b := range bars {
		out = append(out, fmt.Sprintf("device %s of node %s is not tried until %s: %s", b.Device, b.Node, b.Until.UTC().Format(time.TimeOnly), b.Cause))
	}
	return strings.Join(out, "; ")
}

// Counted returns a number with its unit. one is the unit's singular, for 1, and more is its
// plural.
func Counted(n int, one, more string) string {
	if n == 1 {
		more = one
	}
	return fmt.Sprint(n, " ", more)
}

// oneLine returns text, such as the last lines of a program, as one line.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// finite returns a number, or nil if JSON cannot hold it.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// rounded formats a duration to a tenth of a millisecond, or with three digits.
func rounded(d time.Duration) string {
	unit := 100 * time.Microsecond
	for d.Abs() >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}

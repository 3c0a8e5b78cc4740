package main

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// measuredUntil returns the detail of a function that is pinned to be measured.
func measuredUntil(until time.Time) string {
	return "held at one replica to be measured (stagecoach profile), at least until " + until.UTC().Format(time.TimeOnly)
}

// barred lists the devices that are barred for a function which runs on others. If it runs on none,
// its Short says so.
func barred(bars []plan.Bar) string {
	var out []string
	for _, b := range bars {
		out = append(out, fmt.Sprintf("device %s of node %s is not tried until %s: %s", b.Device, b.Node, b.Until.UTC().Format(time.TimeOnly), b.Cause))
	}
	return strings.Join(out, "; ")
}

// counted returns a number with its unit: one for 1, more for the other numbers.
func counted(n int, one, more string) string {
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

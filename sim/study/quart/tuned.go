package quart

import (
	"bytes"
	_ "embed"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

//go:embed tuned.json
var tuned []byte

// Tuned returns the configurations of all contenders, as `make tune` last found them.
func Tuned() (study.Tuned, error) { return study.ReadTuned(bytes.NewReader(tuned), base().Name) }

//go:embed expectations.json
var expecting []byte

// expectations returns what was expected before the first run. The file is part of the program and
// is checked by a test.
func expectations() []study.Expectation {
	out, err := study.ReadExpectations(expecting)
	if err != nil {
		panic(err)
	}
	return out
}

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

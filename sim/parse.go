package sim

import (
	"io"

	"github.com/stagecoach-serving/stagecoach/internal/yamlfile"
)

// Parse reads YAML. It returns an error with the field's path, for example stages[2].service.mean,
// if a field is unknown or its value has the wrong type. [Scenario.Model] checks the rest.
func Parse(r io.Reader) (Scenario, error) {
	var s Scenario
	err := yamlfile.Read(r, "scenario", "a mapping with stages, pipelines and policies", &s)
	return s, err
}

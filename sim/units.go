package sim

import "github.com/stagecoach-serving/stagecoach/internal/yamlfile"

// Bytes is a size. It is written as in Kubernetes (512Mi, 16Gi) or as a number of bytes.
type Bytes = yamlfile.Bytes

// Milli is an amount of CPU in thousandths of a core. It is written as in Kubernetes (500m) or in
// cores (0.5).
type Milli = yamlfile.Milli

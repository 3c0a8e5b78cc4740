package yamlfile

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Bytes is a size. It is written as in Kubernetes (512Mi, 16Gi) or as a number of bytes.
type Bytes int64

// maxBytes bounds sizes, so that their sums do not overflow.
const maxBytes = 1 << 50

// UnmarshalYAML reads a size.
func (b *Bytes) UnmarshalYAML(n *yaml.Node) error {
	text, unit := strings.TrimSuffix(n.Value, "B"), float64(1)
	for i, u := range []string{"Ki", "Mi", "Gi", "Ti"} {
		if number, ok := strings.CutSuffix(text, u); ok {
			text, unit = number, math.Pow(1024, float64(i+1))
		}
	}
	v, err := strconv.ParseFloat(text, 64)
	if v *= unit; err != nil || !(v >= 0 && v <= maxBytes) {
		return errors.New("want a size of 0 to 1024Ti such as 512Mi or 16Gi")
	}
	*b = Bytes(v)
	return nil
}

// Milli is an amount of CPU in thousandths of a core. It is written as in Kubernetes (500m) or in
// cores (0.5).
type Milli int

// MaxMilli is the largest Milli.
const MaxMilli = 1 << 30

// UnmarshalYAML reads an amount of CPU.
func (m *Milli) UnmarshalYAML(n *yaml.Node) error {
	text, thousandths := strings.CutSuffix(n.Value, "m")
	v, err := strconv.ParseFloat(text, 64)
	if !thousandths {
		v *= 1000
	}
	if err != nil || !(v >= 0 && v <= MaxMilli) {
		return fmt.Errorf("want cores such as 2, 0.5 or 500m, at most %d", MaxMilli/1000)
	}
	*m = Milli(math.Round(v))
	return nil
}

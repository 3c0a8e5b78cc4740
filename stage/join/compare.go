package join

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Two floats count as equal if they differ by at most absolute + relative·|expected|. Joined runs
// add in another order, which for FP32 differs by about 1e-5. FP16 and BF16 are compared more
// loosely, by the factor coarse.
const (
	absolute = 1e-4
	relative = 1e-3
	coarse   = 20
)

// difference says how got differs from want, or returns "".
func difference(got, want []tensor.Tensor) string {
	if len(got) != len(want) {
		return fmt.Sprintf("%d outputs, want %d", len(got), len(want))
	}
	for i, w := range want {
		g := got[i]
		if g.Datatype != w.Datatype || !slices.Equal(g.Shape, w.Shape) || len(g.Data) != len(w.Data) {
			return fmt.Sprintf("output %q: %s %v, want %s %v", w.Name, g.Datatype, g.Shape, w.Datatype, w.Shape)
		}
		if why := valuesDiffer(g, w); why != "" {
			return fmt.Sprintf("output %q: %s", w.Name, why)
		}
	}
	return ""
}

func valuesDiffer(got, want tensor.Tensor) string {
	read, size, factor := reader(want.Datatype)
	if read == nil {
		if !bytes.Equal(got.Data, want.Data) {
			return "other values"
		}
		return ""
	}
	for at := 0; at+size <= len(want.Data); at += size {
		g, w := read(got.Data[at:]), read(want.Data[at:])
		if g == w || math.IsNaN(g) && math.IsNaN(w) {
			continue
		}
		if !(math.Abs(g-w) <= factor*(absolute+relative*math.Abs(w))) {
			return fmt.Sprintf("element %d is %g, want %g", at/size, g, w)
		}
	}
	return ""
}

// reader returns how floats of a datatype are read, or nil for other datatypes.
func reader(d tensor.Datatype) (read func([]byte) float64, size int, factor float64) {
	le := binary.LittleEndian
	switch d {
	case "FP64":
		return func(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) }, 8, 1
	case "FP32":
		return func(b []byte) float64 { return float64(math.Float32frombits(le.Uint32(b))) }, 4, 1
	case "BF16":
		return func(b []byte) float64 { return float64(math.Float32frombits(uint32(le.Uint16(b)) << 16)) }, 2, coarse
	case "FP16":
		return func(b []byte) float64 { return half(le.Uint16(b)) }, 2, coarse
	}
	return nil, 0, 0
}

// half returns the value of an IEEE 754 binary16.
func half(bits uint16) float64 {
	sign, exponent, fraction := 1.0, int(bits>>10&31), float64(bits&1023)
	if bits>>15 == 1 {
		sign = -1
	}
	switch {
	case exponent == 31 && fraction > 0:
		return math.NaN()
	case exponent == 31:
		return math.Inf(int(sign))
	case exponent == 0:
		return sign * math.Ldexp(fraction, -24)
	}
	return sign * math.Ldexp(1024+fraction, exponent-25)
}

package safetensors

import "github.com/stagecoach-serving/stagecoach/tensor"

// Dtype is a datatype by the format's name, such as F32 or BF16.
type Dtype string

// Bits returns the size of an element in bits, or 0 if there is no such datatype.
func (d Dtype) Bits() int {
	switch d {
	case "F4":
		return 4
	case "F6_E2M3", "F6_E3M2":
		return 6
	case "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ":
		return 8
	case "U16", "I16", "F16", "BF16":
		return 16
	case "U32", "I32", "F32":
		return 32
	case "U64", "I64", "F64", "C64":
		return 64
	}
	return 0
}

// Datatype returns the datatype of package tensor for d. It returns false if there is none, as for
// floating-point types of less than 16 bits.
func (d Dtype) Datatype() (tensor.Datatype, bool) {
	switch d {
	case "BOOL", "BF16":
		return tensor.Datatype(d), true
	case "U8", "U16", "U32", "U64":
		return tensor.Datatype("UINT" + d[1:]), true
	case "I8", "I16", "I32", "I64":
		return tensor.Datatype("INT" + d[1:]), true
	case "F16", "F32", "F64":
		return tensor.Datatype("FP" + d[1:]), true
	}
	return "", false
}

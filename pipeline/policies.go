package pipeline

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Units of the annotation length.
const (
	LengthTensor = "tensor" // a dimension of a named tensor
	LengthBytes  = "bytes"  // bytes of the items' contents
	LengthItems  = "items"  // number of items
)

// maxDimension is the highest dimension that a length may name.
const maxDimension = 15

// Length says how the length of a task is measured. The zero Length means that it is not measured.
type Length struct {
	Unit   string // LengthTensor, LengthBytes or LengthItems
	Tensor string // name of the tensor; only with LengthTensor
	Dim    int    // dimension of the tensor, from 0; only with LengthTensor
}

// ParseLength reads the value of the annotation length. ok is false for an invalid value. The empty
// value means that nothing is measured.
func ParseLength(v string) (l Length, ok bool) {
	switch rest, tensor := strings.CutPrefix(v, LengthTensor+":"); {
	case tensor:
		at := strings.LastIndexByte(rest, ':') // names of tensors may have colons
		if at < 1 {
			return Length{}, false
		}
		dim, err := strconv.Atoi(rest[at+1:])
		if err != nil || dim < 0 || dim > maxDimension {
			return Length{}, false
		}
		return Length{LengthTensor, rest[:at], dim}, true
	case v == "", v == LengthBytes, v == LengthItems:
		return Length{Unit: v}, true
	}
	return Length{}, false
}

// variantsAndPolicies returns the readers of the annotations of variants, lengths and policies.
func (p *parser) variantsAndPolicies(f *Function) map[string]func(v string) {
	return map[string]func(v string){
		"variant-of": func(v string) {
			if f.VariantOf = p.name(v); f.VariantOf == f.Name {
				p.fail(p.path, strconv.Quote(v), "another function: a stage is no variant of itself")
			}
		},
		"length":        func(v string) { f.Length = p.length(v) },
		"rank":          func(v string) { f.Rank = p.rank(v) },
		"allocator":     func(v string) { f.Allocator = p.policy(v) },
		"route":         func(v string) { f.Route = p.policy(v) },
		"retry-dropped": func(v string) { f.Async.RetryDropped = p.boolean(v) },
		"accuracy":      func(v string) { f.Accuracy = p.accuracy(v) },
		"min-accuracy":  func(v string) { f.MinAccuracy = p.accuracy(v) },
		"max-length":    func(v string) { f.MaxLength = p.number(v, 0, 1, 1<<30) },
	}
}

func (p *parser) length(v string) string {
	v = strings.TrimSpace(v)
	if _, ok := ParseLength(v); !ok || v == "" {
		p.fail(p.path, strconv.Quote(v), fmt.Sprintf("tensor:NAME:DIMENSION with a dimension from 0 to %d, bytes or items", maxDimension))
		return ""
	}
	return v
}

func (p *parser) rank(v string) string {
	v = strings.TrimSpace(v)
	if !slices.Contains([]string{RankFIFO, RankFair, RankLeastSlack}, v) {
		p.fail(p.path, strconv.Quote(v), fmt.Sprintf("%s, %s or %s", RankFIFO, RankFair, RankLeastSlack))
		return ""
	}
	return v
}

// policy reads the name of a policy. Only the program that has the policies knows the valid names.
func (p *parser) policy(v string) string {
	v = strings.TrimSpace(v)
	if !nameForm.MatchString(v) {
		p.fail(p.path, strconv.Quote(v), "the name of a policy: "+nameWant)
		return ""
	}
	return v
}

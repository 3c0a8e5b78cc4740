// Package score compares answers with the answers that were expected, and estimates the mean of
// such scores. A score is 0 for a useless answer and 1 for a perfect one.
package score

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Scorer scores answers.
type Scorer struct {
	Name string // as [Parse] reads it
	// Hits means that scores are 0 or 1 only.
	Hits bool
	// Score returns the score of an answer, 0 to 1.
	Score func(want, got []byte) (float64, error)
}

// Names is what Parse reads, for messages.
const Names = "exact, cer, topk=K, cosine or command=PROGRAM"

// Parse returns a scorer by its name: exact, cer, topk=K or cosine.
func Parse(name string) (Scorer, error) {
	switch name {
	case "exact":
		return Scorer{name, true, Exact}, nil
	case "cer":
		return Scorer{name, false, CER}, nil
	case "cosine":
		return Scorer{name, false, Cosine}, nil
	}
	if number, ok := strings.CutPrefix(name, "topk="); ok {
		if k, err := strconv.Atoi(number); err == nil && k > 0 {
			return Scorer{name, true, func(want, got []byte) (float64, error) { return TopK(k, want, got) }}, nil
		}
	}
	return Scorer{}, fmt.Errorf("scorer %q, want %s, with K above 0", name, Names)
}

// Exact is 1 if both are equal except for space around them.
func Exact(want, got []byte) (float64, error) {
	return hit(bytes.Equal(bytes.TrimSpace(want), bytes.TrimSpace(got))), nil
}

func hit(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// mostCells bounds the work of [CER].
const mostCells = 1 << 30

// CER is 1 minus the character error rate, and not below 0. The rate is the smallest number of
// Unicode code points to insert, delete or replace, per code point of want. Space around both does
// not count. If want is empty, only an empty answer is right.
func CER(want, got []byte) (float64, error) {
	a, b := []rune(string(bytes.TrimSpace(want))), []rune(string(bytes.TrimSpace(got)))
	if len(a) == 0 {
		return hit(len(b) == 0), nil
	}
	if len(a)*len(b) > mostCells {
		return 0, fmt.Errorf("texts of %d and %d characters, want a product of at most %d", len(a), len(b), mostCells)
	}
	return max(1-float64(distance(a, b))/float64(len(a)), 0), nil
}

// distance is Levenshtein's.
func distance(a, b []rune) int {
	row := make([]int, len(b)+1) // of the letters of a so far
	for j := range row {
		row[j] = j
	}
	for i, x := range a {
		corner := row[0]
		row[0] = i + 1
		for j, y := range b {
			next := corner
			if x != y {
				next = min(corner, row[j], row[j+1]) + 1
			}
			corner, row[j+1] = row[j+1], next
		}
	}
	return row[len(b)]
}

// TopK is 1 if the wanted label is among the first k of a ranked list. The list is a JSON array of
// strings, numbers or objects with a field "label", or text with one label per line.
func TopK(k int, want, got []byte) (float64, error) {
	label := strings.TrimSpace(string(want))
	if text := ""; json.Unmarshal(want, &text) == nil {
		label = strings.TrimSpace(text)
	}
	if label == "" {
		return 0, errors.New("the expected label is empty")
	}
	labels, err := ranked(got)
	if err != nil {
		return 0, err
	}
	for _, l := range labels[:min(k, len(labels))] {
		if l == label {
			return 1, nil
		}
	}
	return 0, nil
}

// ranked returns the labels of an answer, the best first.
func ranked(got []byte) (labels []string, err error) {
	var list []any
	if json.Unmarshal(got, &list) != nil {
		for line := range strings.Lines(string(got)) {
			if line = strings.TrimSpace(line); line != "" {
				labels = append(labels, line)
			}
		}
		return labels, nil
	}
	if len(list) == 1 { // the list is the only item of the answer
		if inner, ok := list[0].([]any); ok {
			list = inner
		}
	}
	for i, v := range list {
		if fields, ok := v.(map[string]any); ok {
			v = fields["label"]
		}
		switch v := v.(type) {
		case string:
			labels = append(labels, strings.TrimSpace(v))
		case float64:
			labels = append(labels, strconv.FormatFloat(v, 'g', -1, 64))
		default:
			return nil, fmt.Errorf("label %d of the answer is no string, no number and no object with a field \"label\"", i+1)
		}
	}
	return labels, nil
}

// Cosine is the cosine of the angle between two vectors, and not below 0. A vector is a JSON array
// of numbers, which may be nested, or an answer of tensors.
func Cosine(want, got []byte) (float64, error) {
	a, err := vector(want)
	if err != nil {
		return 0, fmt.Errorf("expected answer: %w", err)
	}
	b, err := vector(got)
	if err != nil {
		return 0, fmt.Errorf("answer: %w", err)
	}
	if len(a) != len(b) {
		return 0, fmt.Errorf("answer of %d numbers, want %d", len(b), len(a))
	}
	// Scaled by the largest numbers, squares neither overflow nor vanish.
	x, y := largest(a), largest(b)
	if x == 0 || y == 0 {
		return 0, errors.New("a vector of zeros has no direction")
	}
	dot, aa, bb := 0.0, 0.0, 0.0
	for i := range a {
		u, v := a[i]/x, b[i]/y
		dot, aa, bb = dot+u*v, aa+u*u, bb+v*v
	}
	return min(max(dot/math.Sqrt(aa*bb), 0), 1), nil
}

func largest(v []float64) (most float64) {
	for _, x := range v {
		most = max(most, math.Abs(x))
	}
	return most
}

func vector(text []byte) ([]float64, error) {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		return nil, fmt.Errorf("no JSON: %w", err)
	}
	out, err := numbers(nil, v)
	if err == nil && len(out) == 0 {
		err = errors.New("no numbers")
	}
	return out, err
}

// numbers appends all numbers of v to out.
func numbers(out []float64, v any) ([]float64, error) {
	var err error
	switch v := v.(type) {
	case float64:
		return append(out, v), nil
	case []any:
		for _, e := range v {
			if out, err = numbers(out, e); err != nil {
				return nil, err
			}
		}
		return out, nil
	case map[string]any: // an answer of tensors, or one tensor
		for _, name := range []string{"outputs", "data"} {
			if inner, ok := v[name]; ok {
				return numbers(out, inner)
			}
		}
	}
	return nil, errors.New("want an array of numbers, or tensors")
}

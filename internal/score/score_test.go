package score

import (
	"math"
	"strings"
	"testing"
)

// TestScores compares scores with values that were computed by hand.
func TestScores(t *testing.T) {
	for _, tc := range []struct {
		scorer, want, got string
		score             float64
	}{
		{"exact", "cat\n", " cat", 1},
		{"exact", "cat", "Cat", 0},
		{"cer", "kitten", "sitting\n", 0.5}, // 3 edits of 6
		{"cer", "straße", "strasse", 1 - 2.0/6},
		{"cer", "日本語", "日本", 1 - 1.0/3}, // code points, not bytes
		{"cer", "ab", "xyzxyz", 0},      // 6 edits of 2
		{"cer", "", "", 1},
		{"cer", "", "x", 0},
		{"cer", "abc", "", 0},
		{"topk=1", "cat", `["cat", "dog"]`, 1},
		{"topk=1", "dog", `["cat", "dog"]`, 0},
		{"topk=2", `"dog"`, `["cat", "dog"]`, 1},
		{"topk=5", "dog", `["cat", "dog"]`, 1},
		{"topk=2", "dog", "cat\n\n dog \nfox\n", 1},
		{"topk=2", "fox", "cat\n\n dog \nfox\n", 0},
		{"topk=2", "dog", `[["cat", "dog"]]`, 1},
		{"topk=1", "dog", `[{"label": "dog", "score": 0.5}]`, 1},
		{"topk=2", "7", `[3, 7, 1]`, 1},
		{"cosine", "[1, 0]", "[1, 1]", math.Sqrt2 / 2},
		{"cosine", "[[3, 4]]", "[6, 8]", 1},
		{"cosine", "[1, 2]", "[-1, -2]", 0},
		{"cosine", "[1e200, 0]", "[3e-200, 4e-200]", 0.6},
		{"cosine", "[3, 4]", `{"outputs": [{"name": "x", "shape": [2], "data": [4, 3]}]}`, 24.0 / 25},
	} {
		s, err := Parse(tc.scorer)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := s.Score([]byte(tc.want), []byte(tc.got)); err != nil || math.Abs(got-tc.score) > 1e-12 {
			t.Errorf("%s of %q, expected %q: %v, %v, want %v", tc.scorer, tc.got, tc.want, got, err, tc.score)
		}
	}
}

// TestScorersRefuse checks the errors of answers that cannot be scored, and of unknown scorers.
func TestScorersRefuse(t *testing.T) {
	for _, tc := range [][4]string{
		{"topk=1", "", "cat", "label is empty"},
		{"topk=1", "cat", `[["a"], ["b"]]`, "label 1 of the answer is no string"},
		{"cosine", "x", "[1]", "expected answer: no JSON"},
		{"cosine", "[1]", "x", "answer: no JSON"},
		{"cosine", "[1]", "[1, 2]", "answer of 2 numbers, want 1"},
		{"cosine", "[1]", "[0]", "no direction"},
		{"cosine", "[1]", "[]", "no numbers"},
		{"cosine", "[1]", `["1"]`, "want an array of numbers"},
	} {
		s, err := Parse(tc[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Score([]byte(tc[1]), []byte(tc[2])); err == nil || !strings.Contains(err.Error(), tc[3]) {
			t.Errorf("%s of %q: %v, want %q", tc[0], tc[2], err, tc[3])
		}
	}
	for _, name := range []string{"", "topk", "topk=0", "topk=x", "bleu"} {
		if _, err := Parse(name); err == nil || !strings.Contains(err.Error(), Names) {
			t.Errorf("scorer %q: %v, want the names", name, err)
		}
	}
}

// TestIntervals compares intervals with published and hand-computed values.
func TestIntervals(t *testing.T) {
	hits := func(n, of int) []float64 {
		out := make([]float64, of)
		for i := range n {
			out[i] = 1
		}
		return out
	}
	for name, tc := range map[string]struct {
		scores []float64
		hits   bool
		want   Estimate
	}{
		// Newcombe, Statistics in Medicine 1998, table I: 81 of 263, 15 of 148, 0 of 20.
		"81 of 263": {hits(81, 263), true, Estimate{263, 0.307985, 0.2553, 0.3662}},
		"15 of 148": {hits(15, 148), true, Estimate{148, 0.101351, 0.0624, 0.1605}},
		"0 of 20":   {hits(0, 20), true, Estimate{20, 0, 0, 0.1611}},
		"20 of 20":  {hits(20, 20), true, Estimate{20, 1, 0.8389, 1}},
		// Mean 0.6, standard deviation 0.158114, t 2.776, half width 0.19629.
		"five":      {[]float64{0.4, 0.5, 0.6, 0.7, 0.8}, false, Estimate{5, 0.6, 0.4037, 0.7963}},
		"cut":       {[]float64{0.5, 1}, false, Estimate{2, 0.75, 0, 1}},
		"all equal": {[]float64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, false, Estimate{10, 1, 0.7225, 1}},
		"none":      {nil, false, Estimate{0, 0, 0, 1}},
	} {
		got := Of(tc.scores, tc.hits)
		if got.N != tc.want.N || math.Abs(got.Mean-tc.want.Mean) > 1e-6 || math.Abs(got.Low-tc.want.Low) > 1e-4 || math.Abs(got.High-tc.want.High) > 1e-4 {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
	// From a table of Student's t.
	for df, want := range map[int]float64{1: 12.706, 19: 2.093, 20: 2.0860, 30: 2.0423, 100: 1.9840, 1_000_000: 1.9600} {
		if got := student(df); math.Abs(got-want) > 1e-4 {
			t.Errorf("t of %d: %v, want %v", df, got, want)
		}
	}
}

package ocr

// CER returns the character error rate: the number of insertions, deletions and replacements of
// characters that turn the read text into the wanted one (Levenshtein 1966), divided by the length
// of the wanted one. The rate may exceed 1. If the wanted text is empty, the rate is 0 if the read
// text is empty, too, and 1 otherwise.
func CER(got, want string) float64 {
	if want == "" {
		return float64(min(1, len(got)))
	}
	return float64(distance([]rune(got), []rune(want))) / float64(len([]rune(want)))
}

// distance returns the edit distance of a and b. It keeps one row of the matrix: row[j] is the
// distance between the part of a so far and b[:j].
func distance(a, b []rune) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i, x := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j, y := range b {
			replace := diagonal
			if x != y {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

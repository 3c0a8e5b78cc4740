package ocr

// CER is the character error rate: how many characters have to be put in, taken out or replaced to turn got into want
// (Levenshtein 1966), by the length of want. It may exceed 1. When want is empty, it is 0 or, if got is not, 1.
func CER(got, want string) float64 {
	if want == "" {
		return float64(min(1, len(got)))
	}
	return float64(distance([]rune(got), []rune(want))) / float64(len([]rune(want)))
}

// distance keeps one row of the matrix: row[j] is the distance of the part of a seen so far to b[:j].
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

package ocr

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Keys are the texts of the recogniser's classes. Class 0 is the blank, with the text "".
type Keys []string

// ParseKeys parses a file with one character per line. It adds the recogniser's two other classes:
// the blank before them, and the space after them.
func ParseKeys(b []byte) (Keys, error) {
	if !utf8.Valid(b) {
		return nil, fmt.Errorf("keys: %d bytes that are not UTF-8, want one character per line", len(b))
	}
	keys := Keys{""}
	for i, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
		if utf8.RuneCountInString(line) != 1 {
			return nil, fmt.Errorf("keys: line %d is %q, want one character", i+1, line)
		}
		keys = append(keys, line)
	}
	return append(keys, " "), nil
}

package ocr

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Keys are the recogniser's classes: its text for each, "" for class 0, the blank.
type Keys []string

// ParseKeys reads a file with one character a line. The recogniser has two classes more: the blank before them, the space
// after them.
func ParseKeys(b []byte) (Keys, error) {
	if !utf8.Valid(b) {
		return nil, fmt.Errorf("keys: %d bytes that are not UTF-8, want one character a line", len(b))
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

package console

import (
	"io"
	"strings"
	"text/tabwriter"
	"unicode"
)

// NewTable returns a table. Control characters of a server's text do not reach the terminal.
func NewTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(harmlessWriter{w}, 0, 0, 2, ' ', 0)
}

type harmlessWriter struct{ io.Writer }

func (w harmlessWriter) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.Writer, Harmless(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Harmless keeps lines and columns, and replaces what would control a terminal by question marks.
func Harmless(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

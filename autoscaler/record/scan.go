package record

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// MaxLine is the largest line of a record in bytes. A line with ten thousand functions is smaller.
const MaxLine = 64 << 20

// Scan calls f with each line of a record that is not empty, and with its number. The record may be
// gzipped. f must not keep text. Scan stops at the first error of f and returns it.
func Scan(r io.Reader, f func(n int, text []byte) error) error {
	b := bufio.NewReaderSize(r, 64<<10)
	if magic, err := b.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(b)
		if err != nil {
			return err
		}
		b = bufio.NewReaderSize(z, 64<<10)
	}
	lines := bufio.NewScanner(b)
	lines.Buffer(nil, MaxLine)
	last := false // the line has no end
	lines.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		last = atEOF && bytes.IndexByte(data, '\n') < 0
		return bufio.ScanLines(data, atEOF)
	})
	n := 0
	for lines.Scan() {
		if last && lines.Err() != nil {
			break // the file could not be read to the end of the line
		}
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if err := f(n, lines.Bytes()); err != nil {
			return err
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("line %d: longer than %s, want a decision a line", n+1, plan.Size(MaxLine))
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("after line %d: the gzipped file ends in the middle: copy it again", n)
	case err != nil:
		return fmt.Errorf("after line %d: %w", n, err)
	}
	return nil
}

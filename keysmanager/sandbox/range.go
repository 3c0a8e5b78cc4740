package sandbox

import (
	"fmt"
	"strconv"
	"strings"
)

// Range is a range of user and group numbers. It includes both ends.
type Range struct{ First, Last int }

// DefaultRange is above the users of machines and containers, and below those of systemd.
var DefaultRange = Range{200_000, 265_535}

// Bounds of a Range.
const (
	leastNumber  = 1000
	mostNumber   = 1<<31 - 1
	leastNumbers = 1024
)

// UnmarshalText reads 200000-265535.
func (r *Range) UnmarshalText(text []byte) error {
	first, last, _ := strings.Cut(string(text), "-")
	a, errA := strconv.ParseUint(first, 10, 31)
	b, errB := strconv.ParseUint(last, 10, 31)
	if errA != nil || errB != nil || a < leastNumber || b > mostNumber || b < a+leastNumbers-1 {
		return fmt.Errorf("%q, want FIRST-LAST, such as %v, with at least %d numbers, all at least %d", text, DefaultRange, leastNumbers, leastNumber)
	}
	*r = Range{int(a), int(b)}
	return nil
}

// MarshalText is the reverse of UnmarshalText.
func (r Range) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

func (r Range) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// A quarter of the numbers are groups of namespaces. The others are users, except the last number,
// which no process ever runs as.
func (r Range) users() Range  { return Range{r.groups().Last + 1, r.Last - 1} }
func (r Range) groups() Range { return Range{r.First, r.First + (r.Last-r.First+1)/4 - 1} }
func (r Range) nobody() int   { return r.Last }

func (r Range) holds(n int) bool { return n >= r.First && n <= r.Last }
func (r Range) size() int        { return r.Last - r.First + 1 }

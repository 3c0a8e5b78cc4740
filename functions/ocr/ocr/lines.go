package ocr

import (
	"cmp"
	"encoding/json"
	"fmt"
	"image"
	"slices"
	"strings"
	"unicode/utf8"
)

// Line is a text and its place on the page.
type Line struct {
	Text       string  `json:"text"`
	Confidence float64 `json:"confidence"` // mean of its characters, 0..1
	Box        Rect    `json:"box"`
}

// Rect is a rectangle in the page's pixels; in JSON [left, top, right, bottom].
type Rect struct{ image.Rectangle }

// MarshalJSON writes [left, top, right, bottom].
func (r Rect) MarshalJSON() ([]byte, error) {
	return json.Marshal([4]int{r.Min.X, r.Min.Y, r.Max.X, r.Max.Y})
}

// UnmarshalJSON reads [left, top, right, bottom].
func (r *Rect) UnmarshalJSON(b []byte) error {
	var v []int
	if err := json.Unmarshal(b, &v); err != nil || len(v) != 4 || v[0] >= v[2] || v[1] >= v[3] {
		return fmt.Errorf("box %s, want [left, top, right, bottom] in pixels", b)
	}
	r.Rectangle = image.Rect(v[0], v[1], v[2], v[3])
	return nil
}

// Assemble sorts pieces of text into reading order, and joins the pieces of a line with spaces. It
// leaves out pieces without text.
func Assemble(pieces []Line) []Line {
	pieces = slices.DeleteFunc(slices.Clone(pieces), func(p Line) bool { return p.Text == "" })
	slices.SortFunc(pieces, func(a, b Line) int { // keeps the result the same among equal boxes
		return cmp.Or(strings.Compare(a.Text, b.Text), cmp.Compare(a.Confidence, b.Confidence))
	})
	lines := []Line{}
	for _, row := range group(pieces, func(p Line) image.Rectangle { return p.Box.Rectangle }) {
		line, texts, runes, sum := Line{}, []string{}, 0, 0.0
		for _, p := range row {
			n := utf8.RuneCountInString(p.Text)
			texts, runes, sum = append(texts, p.Text), runes+n, sum+p.Confidence*float64(n)
			line.Box.Rectangle = line.Box.Union(p.Box.Rectangle)
		}
		line.Text, line.Confidence = strings.Join(texts, " "), sum/float64(runes)
		lines = append(lines, line)
	}
	return lines
}

// Plain returns the text of lines, separated by newlines.
func Plain(lines []Line) string {
	texts := make([]string, len(lines))
	for i, l := range lines {
		texts[i] = l.Text
	}
	return strings.Join(texts, "\n")
}

// group splits boxes into lines, from top to bottom, and sorts each line from left to right. A box
// belongs to a line if its middle is close enough to the middle of the line's topmost box: the
// vertical distance must be less than half the height of the smaller box. Boxes with equal
// rectangles stay in the order of the argument.
func group[T any](all []T, rect func(T) image.Rectangle) [][]T {
	byTop := slices.Clone(all)
	slices.SortStableFunc(byTop, func(a, b T) int { return compare(rect(a), rect(b), false) })
	var lines [][]T
	for _, v := range byTop {
		at := slices.IndexFunc(lines, func(line []T) bool { return sameLine(rect(line[0]), rect(v)) })
		if at < 0 {
			lines = append(lines, []T{v})
			continue
		}
		lines[at] = append(lines[at], v)
	}
	for _, line := range lines {
		slices.SortStableFunc(line, func(a, b T) int { return compare(rect(a), rect(b), true) })
	}
	return lines
}

func sameLine(a, b image.Rectangle) bool {
	apart := a.Min.Y + a.Max.Y - b.Min.Y - b.Max.Y // twice the distance between the middles
	return max(apart, -apart) < min(a.Dy(), b.Dy())
}

// compare orders rectangles totally, by the left edge first if left is true, else by the top edge.
func compare(a, b image.Rectangle, left bool) int {
	x, y := cmp.Compare(a.Min.X, b.Min.X), cmp.Compare(a.Min.Y, b.Min.Y)
	if !left {
		x, y = y, x
	}
	return cmp.Or(x, y, cmp.Compare(a.Max.X, b.Max.X), cmp.Compare(a.Max.Y, b.Max.Y))
}

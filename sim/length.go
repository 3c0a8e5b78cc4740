package sim

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// The bounds of lengths.
const (
	maxLength  = math.MaxInt32
	maxLengths = 10_000_000 // in a file
)

// lengths draws the lengths of a pipeline's items, or the numbers of items of a stage's answers.
type lengths struct {
	list  []int // constant and list: drawn; file: in turn
	turn  bool
	mu    float64 // of the logarithm of a lognormal length; unused with a list
	sigma float64
	least int
	max   int
}

func (l *Length) complete() {
	if l.Mean != 0 && l.CV == nil {
		l.CV = pointer(1.0)
	}
}

// kinds returns the fields that say how lengths are drawn.
func (l *Length) kinds() (given []string) {
	for name, is := range map[string]bool{"constant": l.Constant != 0, "mean": l.Mean != 0, "list": len(l.List) > 0, "file": l.File != ""} {
		if is {
			given = append(given, name)
		}
	}
	slices.Sort(given)
	return given
}

// addLengths reads the lengths of a pipeline's items.
func (m *Model) addLengths(i int, open Opener, p *problems) {
	pipe, path := &m.pipelines[i], fmt.Sprintf("pipelines[%d].length", i)
	pipe.lengths = pipe.spec.Length.read(path, 1, maxLength, open, p)
}

// read returns how numbers from least to most are drawn; nil: nothing is given, or it is wrong.
// open is nil if there can be no file.
func (l *Length) read(path string, least, most int, open Opener, p *problems) *lengths {
	given := l.kinds()
	if len(given) > 1 {
		p.add(path, "%s are given, want one of constant, mean, list and file", strings.Join(given, " and "))
		return nil
	}
	only := func(field string, is bool, kind string) {
		if is && !slices.Contains(given, kind) {
			p.add(path+"."+field, "it is given without %s, want both or none", kind)
		}
	}
	only("cv", l.CV != nil, "mean")
	only("max", l.Max != 0, "mean")
	only("column", l.Column != "", "file")
	if len(given) == 0 {
		return nil
	}
	out := &lengths{least: least, max: most}
	switch given[0] {
	case "constant":
		within(p, path+".constant", l.Constant, 1, most)
		out.list = []int{l.Constant}
	case "mean":
		within(p, path+".mean", l.Mean, 1, float64(most))
		within(p, path+".cv", *l.CV, 0, maxCV)
		within(p, path+".max", l.Max, 0, most)
		variance := math.Log(1 + *l.CV**l.CV)
		out.mu, out.sigma = math.Log(l.Mean)-variance/2, math.Sqrt(variance)
		if l.Max > 0 {
			out.max = l.Max
		}
	case "list":
		for k, n := range l.List {
			within(p, fmt.Sprintf("%s.list[%d]", path, k), n, least, most)
		}
		out.list = l.List
	case "file":
		if open == nil {
			p.add(path+".file", "%q, want constant, mean or list", l.File)
			return nil
		}
		var err error
		if out.list, err = readLengths(l.File, l.Column, open); err != nil {
			p.add(path+".file", "%v", err)
			return nil
		}
		out.turn = true
	}
	return out
}

// readLengths reads a file of lengths: see [Length.File].
func readLengths(name, column string, open Opener) ([]int, error) {
	f, err := open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := csv.NewReader(bufio.NewReader(f))
	r.ReuseRecord = true
	at := 0
	if column != "" {
		names, err := r.Read()
		if err != nil {
			return nil, fmt.Errorf("%s: the line of names: %w", name, err)
		}
		if at = slices.Index(names, column); at < 0 {
			return nil, fmt.Errorf("%s: no column %q, want one of %s", name, column, strings.Join(names, ", "))
		}
	}
	var out []int
	for {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		line, _ := r.FieldPos(0)
		if column == "" && len(row) > 1 {
			return nil, fmt.Errorf("%s: line %d: %d columns, want one, or the name of a column", name, line, len(row))
		}
		n, err := strconv.Atoi(strings.TrimSpace(row[at]))
		if err != nil || n < 1 || n > maxLength {
			return nil, fmt.Errorf("%s: line %d: got %q, want a length of 1 to %d", name, line, row[at], maxLength)
		}
		if out = append(out, n); len(out) > maxLengths {
			return nil, fmt.Errorf("%s: more than %d lengths", name, maxLengths)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: no lengths, want at least one", name)
	}
	return out, nil
}

// draw returns the length of an item. number counts the items of all requests of the pipeline from
// 0.
func (l *lengths) draw(r *rand.Rand, number uint64) int {
	switch {
	case l.turn:
		return l.list[number%uint64(len(l.list))]
	case l.list != nil:
		return l.list[r.IntN(len(l.list))]
	}
	return int(min(max(math.Round(math.Exp(l.mu+l.sigma*r.NormFloat64())), float64(l.least)), float64(l.max)))
}

// outline returns the lengths of a request's items as the coordinator measures them. It returns nil
// if they are unknown. The draws depend only on the seed, the pipeline and the number of the
// request.
func (c *coordinator) outline(w *world) []tensor.Outline {
	if c.lengths == nil {
		return nil
	}
	w.pcg.Seed(mix(w.seed*0x9E3779B97F4A7C15+uint64(c.i)<<48+c.number), 2)
	c.outlines = c.outlines[:0]
	for k := range c.spec.Items {
		n := c.lengths.draw(w.rand, (c.number-1)*uint64(c.spec.Items)+uint64(k))
		c.outlines = append(c.outlines, tensor.Outline{Bytes: int64(n)})
	}
	return c.outlines
}

// lengthUnit is the unit in which coordinators measure. A call of several items has the sum of
// their lengths.
const lengthUnit = pipeline.LengthBytes

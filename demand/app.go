package demand

import (
	"cmp"
	"container/list"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// Sizes in bytes that the limits count, without names and the bins of sketches. They include what a
// slice, a map or an allocation adds.
const (
	appSize   = 320
	stageSize = 352
	cellSize  = 192
	nextSize  = 80
)

// app is what was learned about one application. Weights are relative to calls at ref.
type app struct {
	name      string
	place     *list.Element
	ref, last time.Time
	bytes     int
	requests  float64  // weight of all requests
	completed float64  // weight of complete requests
	stages    []*stage // sorted by name
}

// stage is what was learned about one stage of an application.
type stage struct {
	name    string
	cells   []*cell         // sorted by function, then class
	lengths sketch.Weighted // of the inputs of known length
	sized   float64         // weight of these inputs
	next    []*next         // sorted by to
	ran     float64         // weight of the complete requests in which it ran
	calls   float64         // weight of its calls in complete requests

	now turn
}

// turn is what a stage did in the request with this number.
type turn struct {
	number                 uint64
	calls, given, returned int
	before                 int // number of edges that lead here
}

// next is what was learned about an edge.
type next struct {
	to    string
	seen  float64 // weight of the complete requests in which its first stage ran
	taken float64 // weight of those in which its second stage ran, too
	given float64 // items that its first stage received
	items float64 // items that its second stage received through it
}

// cell is what was learned about the calls of a stage that one function ran in batches of about one
// size.
type cell struct {
	function string
	class    int // of the batch size, see classOf
	last     time.Time

	calls, batch    float64 // weights of calls, and of calls times batch size
	given, returned float64 // items
	sum, squares    float64 // of the seconds per item, and of their squares
	work            sketch.Weighted
}

// classOf returns the class of a batch size: 1, 2, 3 to 4, 5 to 8, and so on.
func classOf(batch int) int { return bits.Len(uint(max(batch, 1) - 1)) }

// mostClass is the class of all larger batches, too.
const mostClass = 12

// mostCalls bounds the weight of a cell's calls relative to a call at its time. Beyond it, earlier
// calls fade faster, so that a new call still changes the float32 weights of its sketch.
const mostCalls = 1 << 20

// mostNext bounds the edges per stage. Further ones are ignored.
const mostNext = 64

// find returns the stage with this name; nil: it has never run.
func (a *app) find(name string) *stage {
	if i, ok := slices.BinarySearchFunc(a.stages, name, (*stage).compare); ok {
		return a.stages[i]
	}
	return nil
}

func (s *stage) compare(name string) int { return strings.Compare(s.name, name) }

func (n *next) compare(to string) int { return strings.Compare(n.to, to) }

// stage returns the stage with this name. It creates it if there is none.
func (a *app) stage(name string) *stage {
	if s := a.find(name); s != nil {
		return s
	}
	s := &stage{name: name}
	i, _ := slices.BinarySearchFunc(a.stages, name, (*stage).compare)
	a.stages = slices.Insert(a.stages, i, s)
	a.bytes += stageSize + len(name)
	return s
}

// cell returns the stage's cell of a function and class. It creates it if there is none.
func (a *app) cell(s *stage, function string, class int) *cell {
	for _, c := range s.cells {
		if c.class == class && c.function == function {
			return c
		}
	}
	c := &cell{function: function, class: class}
	i, _ := slices.BinarySearchFunc(s.cells, c, byFunction)
	s.cells = slices.Insert(s.cells, i, c)
	a.bytes += cellSize + len(function)
	return c
}

func byFunction(a, b *cell) int {
	return cmp.Or(cmp.Compare(a.function, b.function), cmp.Compare(a.class, b.class))
}

// next returns the edge from s to the stage with this name. It creates it if there is none. It
// returns nil if s has too many edges.
func (a *app) next(s *stage, to string) *next {
	i, ok := slices.BinarySearchFunc(s.next, to, (*next).compare)
	switch {
	case ok:
		return s.next[i]
	case len(s.next) >= mostNext:
		return nil
	}
	n := &next{to: to}
	s.next = slices.Insert(s.next, i, n)
	a.bytes += nextSize + len(to)
	return n
}

// turn returns what the stage did in the current request.
func (s *stage) turn(number uint64) *turn {
	if s.now.number != number {
		s.now = turn{number: number}
	}
	return &s.now
}

// add counts a call with weight w.
func (a *app) add(k *Call, now time.Time, w float64, number uint64) {
	s := a.stage(k.Stage)
	c := a.cell(s, k.Function, min(classOf(k.Batch), mostClass))
	given := max(k.Given, 1)
	t := s.turn(number)
	t.calls++
	t.given += given
	t.returned += k.Returned

	if c.calls > mostCalls*w {
		c.scale(0.5)
	}
	before := c.work.Bytes() + s.lengths.Bytes()
	work := max(k.Work, 0) / time.Duration(given)
	seconds := work.Seconds()
	if c.last = now; k.Length > 0 {
		if s.sized > mostCalls*w {
			s.scaleLengths(0.5)
		}
		s.sized += w
		s.lengths.Add(int64(k.Length), w)
	}
	c.calls += w
	c.batch += w * float64(max(k.Batch, 1))
	c.given += w * float64(given)
	c.returned += w * float64(k.Returned)
	c.sum += w * seconds
	c.squares += w * seconds * seconds
	c.work.Add(int64(work), w)
	a.bytes += c.work.Bytes() + s.lengths.Bytes() - before
}

// complete counts how the current request, which has weight w, went through the application's
// graph.
func (a *app) complete(edges []Edge, w float64, number uint64) {
	a.completed += w
	for _, s := range a.stages {
		if s.now.number == number {
			s.ran += w
			s.calls += w * float64(s.now.calls)
		}
	}
	for _, e := range edges {
		if to := a.find(e.To); to != nil {
			to.turn(number).before++
		}
	}
	for _, e := range edges {
		from, to := a.find(e.From), a.find(e.To)
		if from == nil || from.turn(number).calls == 0 {
			continue
		}
		n := a.next(from, e.To)
		if n == nil {
			continue
		}
		n.seen += w
		n.given += w * float64(from.now.given)
		if to == nil || to.now.calls == 0 {
			continue
		}
		n.taken += w
		items := to.now.given
		if to.now.before > 1 { // its other inputs are from other stages
			items = from.now.returned
		}
		n.items += w * float64(items)
	}
}

// shrink forgets the least recently used cells until the application takes at most limit bytes. The
// last cell stays.
func (a *app) shrink(limit int) {
	for a.bytes > limit {
		var of *stage
		var old *cell
		cells := 0
		for _, s := range a.stages {
			for _, c := range s.cells {
				if cells++; old == nil || c.last.Before(old.last) {
					of, old = s, c
				}
			}
		}
		if cells < 2 {
			return
		}
		of.cells = slices.DeleteFunc(of.cells, func(c *cell) bool { return c == old })
		if len(of.cells) == 0 {
			a.stages = slices.DeleteFunc(a.stages, func(s *stage) bool { return s == of })
			for _, s := range a.stages {
				s.next = slices.DeleteFunc(s.next, func(n *next) bool { return n.to == of.name })
			}
		}
		a.bytes = a.size()
	}
}

// size counts the bytes of the application.
func (a *app) size() int {
	n := appSize + len(a.name)
	for _, s := range a.stages {
		n += stageSize + len(s.name) + s.lengths.Bytes()
		for _, c := range s.cells {
			n += cellSize + len(c.function) + c.work.Bytes()
		}
		for _, e := range s.next {
			n += nextSize + len(e.to)
		}
	}
	return n
}

// scale multiplies all weights with f.
func (a *app) scale(f float64) {
	a.requests *= f
	a.completed *= f
	for _, s := range a.stages {
		s.ran *= f
		s.calls *= f
		s.scaleLengths(f)
		for _, c := range s.cells {
			c.scale(f)
		}
		for _, n := range s.next {
			n.seen, n.taken, n.given, n.items = n.seen*f, n.taken*f, n.given*f, n.items*f
		}
	}
}

// faintest is the weight below which a sketch does not fade, so that its shape lasts.
const faintest = 1e-9

// fade returns the factor for a sketch of a given weight; f is wanted.
func fade(f, weight float64) float64 { return min(1, max(f, faintest/weight)) }

func (s *stage) scaleLengths(f float64) {
	if s.sized > 0 {
		f = fade(f, s.sized)
		s.sized *= f
		s.lengths.Scale(f)
	}
}

func (c *cell) scale(f float64) {
	f = fade(f, c.calls)
	c.calls, c.batch, c.given, c.returned, c.sum, c.squares = c.calls*f, c.batch*f, c.given*f, c.returned*f, c.sum*f, c.squares*f
	c.work.Scale(f)
}

// merge adds what another learner has learned about the same application. Both get the later ref.
func (a *app) merge(o *app, halfLife time.Duration) {
	a.rebase(o.ref, halfLife)
	o.rebase(a.ref, halfLife)
	if o.last.After(a.last) {
		a.last = o.last
	}
	a.requests += o.requests
	a.completed += o.completed
	for _, from := range o.stages {
		s := a.stage(from.name)
		s.ran += from.ran
		s.calls += from.calls
		s.sized += from.sized
		s.lengths.Merge(&from.lengths)
		for _, k := range from.cells {
			c := a.cell(s, k.function, k.class)
			if k.last.After(c.last) {
				c.last = k.last
			}
			c.calls, c.batch, c.given, c.returned = c.calls+k.calls, c.batch+k.batch, c.given+k.given, c.returned+k.returned
			c.sum, c.squares = c.sum+k.sum, c.squares+k.squares
			c.work.Merge(&k.work)
		}
		for _, e := range from.next {
			n := a.next(s, e.to)
			if n == nil {
				continue
			}
			n.seen, n.taken, n.given, n.items = n.seen+e.seen, n.taken+e.taken, n.given+e.given, n.items+e.items
		}
	}
	a.bytes = a.size()
}

package logbook

import (
	"container/list"
	"context"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Line is a line of output.
type Line struct {
	At      time.Time
	Replica string
	Stream  string // stdout or stderr
	Text    string // without its end
}

// overhead is what a line takes in bytes beside its text, about.
const overhead = 160

func (l *Line) size() int64 { return overhead + int64(len(l.Text)) }

// Book keeps lines. Its methods are safe for concurrent use.
type Book struct {
	perFunction, total int64 // bounds in bytes

	mu        sync.Mutex
	closed    bool
	bytes     int64
	functions map[pipeline.Key]*pages
	order     *list.List // of *entry: the lines of all functions, oldest first
}

// entry is a line's place among the lines of all functions.
type entry struct {
	of   *pages
	line Line
}

// pages are the lines of one function. They go when they are empty and nobody reads them.
type pages struct {
	of      pipeline.Key    // the function
	lines   []*list.Element // oldest first; values are *entry
	first   uint64          // number of lines[0]; numbers grow by one from the function's first line on
	bytes   int64
	readers int
	changed chan struct{} // closed at the next line; nil: nobody waits
	ended   bool          // forgotten
}

// New returns an empty book that keeps at most perFunction bytes of one function's lines and total bytes of all, the lines'
// own overhead included. The oldest lines go first.
func New(perFunction, total int64) *Book {
	return &Book{perFunction: perFunction, total: total, functions: map[pipeline.Key]*pages{}, order: list.New()}
}

// Add writes a line down.
func (b *Book) Add(function pipeline.Key, l Line) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	p := b.of(function)
	p.lines = append(p.lines, b.order.PushBack(&entry{p, l}))
	p.bytes += l.size()
	b.bytes += l.size()
	for p.bytes > b.perFunction && len(p.lines) > 0 {
		b.drop(p)
	}
	for b.bytes > b.total && b.order.Len() > 0 {
		b.drop(b.order.Front().Value.(*entry).of) // the oldest of all is the oldest of its function
	}
	p.wake()
}

// of returns the pages of a function, which are made if need be; b.mu is held.
func (b *Book) of(function pipeline.Key) *pages {
	p := b.functions[function]
	if p == nil {
		p = &pages{of: function}
		b.functions[function] = p
	}
	return p
}

// drop lets the oldest line of p go; b.mu is held.
func (b *Book) drop(p *pages) {
	e := b.order.Remove(p.lines[0]).(*entry)
	p.lines[0] = nil
	p.lines = p.lines[1:]
	p.first++
	p.bytes -= e.line.size()
	b.bytes -= e.line.size()
	b.tidy(p)
}

// tidy lets p go when it has no lines and no readers; b.mu is held.
func (b *Book) tidy(p *pages) {
	if p.readers == 0 && len(p.lines) == 0 && b.functions[p.of] == p {
		delete(b.functions, p.of)
	}
}

func (p *pages) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// Forget drops the lines of a function and ends its readers.
func (b *Book) Forget(function pipeline.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.functions[function]
	if p == nil {
		return
	}
	for len(p.lines) > 0 {
		b.drop(p)
	}
	p.ended = true
	p.wake()
	delete(b.functions, function)
}

// Close ends all readers. Lines that come later are dropped.
func (b *Book) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, p := range b.functions {
		p.wake()
	}
}

// Query says which lines of a function are wanted.
type Query struct {
	Function pipeline.Key
	Replica  string    // empty: of all
	Since    time.Time // lines at or after it; zero: all that are kept
	Tail     int       // at most that many of those that are there, the latest; 0 or less: all
	Follow   bool      // then go on with those that come
}

// Reader reads lines. It is for one goroutine.
type Reader struct {
	b    *Book
	q    Query
	p    *pages
	next uint64 // number of the next line to be looked at
	past bool   // what was there has been read
}

// Read returns a reader of what q asks for. Its caller closes it.
func (b *Book) Read(q Query) *Reader {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &Reader{b: b, q: q, p: b.of(q.Function)}
	r.p.readers++
	return r
}

// Close lets the reader go.
func (r *Reader) Close() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	r.p.readers--
	r.b.tidy(r.p)
}

// maxRead is how many lines come at a time.
const maxRead = 1000

// Read returns the next lines, oldest first, at most 1000, and how many went before they could be read because the reader
// was slow. It waits for lines when a query that follows has none left. At the end of what was asked for, when the function
// is forgotten or the book closed, its error is io.EOF; when ctx ends, ctx's.
func (r *Reader) Read(ctx context.Context) (lines []Line, lost uint64, err error) {
	for {
		lines, lost, wait, err := r.read()
		if err != nil || len(lines) > 0 || lost > 0 {
			return lines, lost, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

func (r *Reader) read() (lines []Line, lost uint64, wait <-chan struct{}, err error) {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	p := r.p
	if !r.past {
		r.past = true
		r.start()
	}
	if r.next < p.first {
		lost, r.next = p.first-r.next, p.first
	}
	for i := int(r.next - p.first); i < len(p.lines) && len(lines) < maxRead; i++ {
		if l := p.lines[i].Value.(*entry).line; r.wants(l) {
			lines = append(lines, l)
		}
		r.next++
	}
	switch {
	case len(lines) > 0 || lost > 0:
		return lines, lost, nil, nil
	case !r.q.Follow || p.ended || r.b.closed:
		return nil, 0, nil, io.EOF
	}
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return nil, 0, p.changed, nil
}

// start goes to the first line that is wanted of those that are there; what went before that was not this reader's to see.
func (r *Reader) start() {
	r.next = r.p.first
	if r.q.Tail <= 0 {
		return
	}
	left := r.q.Tail
	for i, e := range slices.Backward(r.p.lines) {
		if !r.wants(e.Value.(*entry).line) {
			continue
		}
		if left--; left == 0 {
			r.next = r.p.first + uint64(i)
			return
		}
	}
}

func (r *Reader) wants(l Line) bool {
	return (r.q.Replica == "" || l.Replica == r.q.Replica) && !l.At.Before(r.q.Since)
}

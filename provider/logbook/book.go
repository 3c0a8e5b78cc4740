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

// Line is one line of output.
type Line struct {
	At      time.Time
	Replica string
	Stream  string // stdout or stderr
	Text    string // without the line end
}

// overhead estimates what a line takes in bytes besides its text.
const overhead = 160

func (l *Line) size() int64 { return overhead + int64(len(l.Text)) }

// Book keeps lines. Its methods are safe for concurrent use.
type Book struct {
	perFunction, total int64 // bounds in bytes

	mu        sync.Mutex
	closed    bool
	bytes     int64
	functions map[pipeline.Key]*pages
	order     *list.List // lines of all functions as *entry, oldest first
}

// entry is a line in the order of all lines.
type entry struct {
	of   *pages
	line Line
}

// pages holds the lines of one function. They are removed when they are empty and have no readers.
type pages struct {
	of    pipeline.Key    // the function
	lines []*list.Element // oldest first; values are *entry
	// Number of lines[0]; lines are numbered from the function's first line on.
	first   uint64
	bytes   int64
	readers int
	changed chan struct{} // closed at the next line; nil: nobody waits
	ended   bool          // the function was forgotten
}

// New returns an empty book. It keeps at most perFunction bytes of lines per function and total
// bytes in all, including the overhead per line. The oldest lines are dropped first.
func New(perFunction, total int64) *Book {
	return &Book{perFunction: perFunction, total: total, functions: map[pipeline.Key]*pages{}, order: list.New()}
}

// Add adds a line.
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
		// The oldest line of all is the oldest of its function.
		b.drop(b.order.Front().Value.(*entry).of)
	}
	p.wake()
}

// of returns the pages of a function and creates them if necessary. The caller holds b.mu.
func (b *Book) of(function pipeline.Key) *pages {
	p := b.functions[function]
	if p == nil {
		p = &pages{of: function}
		b.functions[function] = p
	}
	return p
}

// drop removes the oldest line of p. The caller holds b.mu.
func (b *Book) drop(p *pages) {
	e := b.order.Remove(p.lines[0]).(*entry)
	p.lines[0] = nil
	p.lines = p.lines[1:]
	p.first++
	p.bytes -= e.line.size()
	b.bytes -= e.line.size()
	b.tidy(p)
}

// tidy removes p if it has no lines and no readers. The caller holds b.mu.
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

// Close ends all readers. Later lines are dropped.
func (b *Book) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, p := range b.functions {
		p.wake()
	}
}

// Query selects lines of a function.
type Query struct {
	Function pipeline.Key
	Replica  string    // empty: all replicas
	Since    time.Time // only lines at or after it; zero: all
	Tail     int       // only the latest Tail of the present lines; 0 or less: all
	Follow   bool      // continue with new lines
}

// Reader reads lines. Only one goroutine may use it.
type Reader struct {
	b    *Book
	q    Query
	p    *pages
	next uint64 // number of the next line to look at
	past bool   // it has read all lines that were present at the start
}

// Read returns a reader for q. The caller closes it.
func (b *Book) Read(q Query) *Reader {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &Reader{b: b, q: q, p: b.of(q.Function)}
	r.p.readers++
	return r
}

// Close releases the reader.
func (r *Reader) Close() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	r.p.readers--
	r.b.tidy(r.p)
}

// maxRead is the largest number of lines per Read.
const maxRead = 1000

// Read returns the next lines, oldest first, at most 1000. lost is how many lines before them were
// dropped because this reader was slow. With Follow, Read waits for new lines. It returns io.EOF at
// the end of the query, when the function is forgotten, or when the book is closed. If ctx ends, it
// returns ctx's error.
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

// start moves to the first present line that the query selects. Earlier lines do not count as lost.
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

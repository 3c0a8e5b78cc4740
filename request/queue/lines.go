package queue

import (
	"container/heap"
	"time"
)

// lines decides in which order the journal's records run. It knows which records wait, for which
// function or receiver, and which may run now. It is a pure value without a clock. The journal's
// lock guards it.
//
// The runs of one function wait in one line, and the callbacks for one receiver in another. Lines
// take turns, one record per turn. Two bounds limit the records in work: one per line, and one per
// kind of work. So a slow or long line delays only itself.
type lines struct {
	limits   func(function string) Limits
	of       map[lineKey]*line
	accounts map[string]*account
	kinds    [2]kindOfWork // index: Kind
	delayed  delayed
	bytes    int64 // of all records
}

// lineKey names a line: a function or a receiver of callbacks.
type lineKey struct {
	kind Kind
	name string
}

// kindOfWork is the state that all lines of one kind share.
type kindOfWork struct {
	turns  []*line // lines with a record that may run, each once
	window int     // upper bound of records in work
	inWork int
	bytes  int64 // in work
}

// Bounds in bytes of the records in work. A single record may be larger.
const (
	lineBytes = 32 << 20
	kindBytes = 512 << 20
)

// line holds what waits for one function or receiver.
type line struct {
	key    lineKey
	ready  []item
	head   int // index of the first item of ready
	later  int // number of records in back-off
	inWork int
	bytes  int64   // in work
	window float64 // learnt bound of records in work; 0: no bound learnt yet
	turn   bool    // the line is in turns
}

// item is a record in the index. Its content is on disk.
type item struct {
	seq     uint64
	size    int64
	account *account
	shard   int32
	old     bool // another process accepted or started it
}

// account counts the records of one function in the journal, in any state.
type account struct {
	function string
	records  int
	bytes    int64
	runs     int // number of its runs in work
}

// later is an item in back-off.
type later struct {
	at   time.Time
	line *line
	item item
}

type delayed []later

func (d delayed) Len() int           { return len(d) }
func (d delayed) Less(i, j int) bool { return d[i].at.Before(d[j].at) }
func (d delayed) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *delayed) Push(x any)        { *d = append(*d, x.(later)) }
func (d *delayed) Pop() any {
	last := len(*d) - 1
	x := (*d)[last]
	(*d)[last] = later{}
	*d = (*d)[:last]
	return x
}

func newLines(runs, callbacks int, limits func(string) Limits) *lines {
	l := &lines{limits: limits, of: map[lineKey]*line{}, accounts: map[string]*account{}}
	l.kinds[Run].window, l.kinds[Callback].window = runs, callbacks
	return l
}

// open counts a new record of function.
func (l *lines) open(function string, size int64) *account {
	a := l.accounts[function]
	if a == nil {
		a = &account{function: function}
		l.accounts[function] = a
	}
	a.records++
	a.bytes += size
	l.bytes += size
	return a
}

// close stops counting a record.
func (l *lines) close(a *account, size int64) {
	a.bytes -= size
	l.bytes -= size
	if a.records--; a.records == 0 {
		delete(l.accounts, a.function)
	}
}

// resize changes the counted size of a record.
func (l *lines) resize(a *account, by int64) {
	a.bytes += by
	l.bytes += by
}

func (l *lines) line(key lineKey) *line {
	ln := l.of[key]
	if ln == nil {
		ln = &line{key: key}
		l.of[key] = ln
	}
	return ln
}

// push adds a record to its line. If at is in the future, the record waits until then.
func (l *lines) push(key lineKey, it item, at, now time.Time) {
	ln := l.line(key)
	if at.After(now) {
		ln.later++
		heap.Push(&l.delayed, later{at, ln, it})
		return
	}
	ln.ready = append(ln.ready, it)
	l.queue(ln)
}

// wake makes delayed records ready that are due. It returns when the next one will be due; zero:
// there is none.
func (l *lines) wake(now time.Time) time.Time {
	for len(l.delayed) > 0 {
		if at := l.delayed[0].at; at.After(now) {
			return at
		}
		d := heap.Pop(&l.delayed).(later)
		d.line.later--
		d.line.ready = append(d.line.ready, d.item)
		l.queue(d.line)
	}
	return time.Time{}
}

// queue adds a line to turns if it has a record that may run.
func (l *lines) queue(ln *line) {
	if !ln.turn && ln.head < len(ln.ready) && ln.inWork < l.bound(ln) && (ln.bytes < lineBytes || ln.inWork == 0) {
		ln.turn = true
		k := &l.kinds[ln.key.kind]
		k.turns = append(k.turns, ln)
	}
}

// perReceiver is the number of concurrent callbacks per receiver.
const perReceiver = 16

// bound returns how many records of a line may be in work.
func (l *lines) bound(ln *line) int {
	most := perReceiver
	if ln.key.kind == Run {
		most = l.limits(ln.key.name).Concurrency
	}
	if ln.window > 0 {
		most = min(most, int(ln.window))
	}
	return max(most, 1)
}

// next removes and returns the next record of a kind to run.
func (l *lines) next(kind Kind) (*line, item, bool) {
	k := &l.kinds[kind]
	var ln *line
	for ln == nil {
		if len(k.turns) == 0 || k.inWork >= k.window || k.bytes >= kindBytes && k.inWork > 0 {
			return nil, item{}, false
		}
		ln = k.turns[0]
		k.turns[0] = nil
		k.turns = k.turns[1:]
		ln.turn = false
		if ln.inWork >= l.bound(ln) { // the bound has shrunk since the line got its turn
			ln = nil
		}
	}
	it := ln.ready[ln.head]
	ln.ready[ln.head] = item{}
	if ln.head++; ln.head == len(ln.ready) {
		ln.ready, ln.head = nil, 0
	} else if ln.head > 64 && ln.head*2 > len(ln.ready) {
		ln.ready, ln.head = append([]item(nil), ln.ready[ln.head:]...), 0
	}
	ln.inWork++
	ln.bytes += it.size
	k.inWork++
	k.bytes += it.size
	if kind == Run {
		it.account.runs++
	}
	l.queue(ln)
	return ln, it, true
}

// end ends the work on a record that the method next has returned. If busy is set, the function or
// receiver was overloaded: the line's window shrinks to the number of records still in work.
// Otherwise the window, if one is set, grows by 1/window. So it has grown by about one after a
// whole window of records.
func (l *lines) end(ln *line, it item, busy bool) {
	k := &l.kinds[ln.key.kind]
	k.inWork--
	k.bytes -= it.size
	ln.inWork--
	ln.bytes -= it.size
	if ln.key.kind == Run {
		it.account.runs--
	}
	switch {
	case busy:
		ln.window = float64(max(1, ln.inWork))
	case ln.window > 0:
		ln.window += 1 / ln.window
	}
	l.queue(ln)
}

// settle removes an empty line.
func (l *lines) settle(ln *line) {
	if ln.head == len(ln.ready) && ln.inWork == 0 && ln.later == 0 {
		delete(l.of, ln.key)
	}
}

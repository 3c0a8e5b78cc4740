package queue

import (
	"container/heap"
	"time"
)

// lines is the journal's order of work: which records wait, for whom, and which of them may run now. It is a pure value
// without a clock; the journal guards it with its lock.
//
// Records of one function wait in one line, and results for one receiver in another. Lines take turns, one record each, as
// long as their own bound and that of their kind allow, so that a line which is slow or long holds up itself alone.
type lines struct {
	limits   func(function string) Limits
	of       map[lineKey]*line
	accounts map[string]*account
	kinds    [2]kindOfWork // by Kind
	delayed  delayed
	bytes    int64 // of all records
}

// lineKey names a line: a function, or a receiver of callbacks.
type lineKey struct {
	kind Kind
	name string
}

// kindOfWork is what all lines of a kind share.
type kindOfWork struct {
	turns  []*line // that have a record which may run as far as they know, each once
	window int     // records in work at most
	inWork int
	bytes  int64 // in work
}

// The bounds in bytes of what is in work; a single record may be larger.
const (
	lineBytes = 32 << 20
	kindBytes = 512 << 20
)

// line is what waits for one function or receiver.
type line struct {
	key    lineKey
	ready  []item
	head   int // of ready
	later  int // in back-off
	inWork int
	bytes  int64   // in work
	window float64 // records in work at most, learnt; 0: nothing learnt
	turn   bool    // it is among turns
}

// item is a record in the index. Its content stays on disk.
type item struct {
	seq     uint64
	size    int64
	account *account
	shard   int32
	old     bool // another process accepted it, or was given it
}

// account is what one function has in the journal, in whatever state.
type account struct {
	function string
	records  int
	bytes    int64
	runs     int // of them in work as runs
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

// open counts a record of function in.
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

// close counts a record out.
func (l *lines) close(a *account, size int64) {
	a.bytes -= size
	l.bytes -= size
	if a.records--; a.records == 0 {
		delete(l.accounts, a.function)
	}
}

// resize says that a record counted in has another size now.
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

// push puts a record into its line: at once, or at a time after now.
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

// wake makes ready what was delayed until now, and returns when the next one will be; zero: there is none.
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

// queue gives a line its turn if it could use one.
func (l *lines) queue(ln *line) {
	if !ln.turn && ln.head < len(ln.ready) && ln.inWork < l.bound(ln) && (ln.bytes < lineBytes || ln.inWork == 0) {
		ln.turn = true
		k := &l.kinds[ln.key.kind]
		k.turns = append(k.turns, ln)
	}
}

// perReceiver is how many callbacks one receiver gets at a time.
const perReceiver = 16

// bound is how many records of a line may be in work.
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

// next takes the record of a kind that runs next.
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
		if ln.inWork >= l.bound(ln) { // which has shrunk since
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

// end says that a record taken by next is not in work any more. busy: who works on it had too much already, so the line
// shrinks to what is left in work; otherwise it grows by one a window's worth of ends.
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

// settle forgets a line that has nothing.
func (l *lines) settle(ln *line) {
	if ln.head == len(ln.ready) && ln.inWork == 0 && ln.later == 0 {
		delete(l.of, ln.key)
	}
}

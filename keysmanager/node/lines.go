package node

import (
	"sync"
	"time"
)

// Line is a line that a replica or zygote has printed. If Lost is set, the Line stands for that
// many lines that were lost.
type Line struct {
	At       time.Time `json:"at,omitzero"`
	Function string    `json:"function,omitempty"`
	Replica  string    `json:"replica,omitempty"` // or "zygote"
	Stream   string    `json:"stream,omitempty"`  // stdout, stderr
	Text     string    `json:"text,omitempty"`
	Lost     uint64    `json:"lost,omitempty"`
}

// Bounds of the lines that wait to be read.
const (
	outboxLines = 16 << 10
	outboxBytes = 4 << 20
)

// outbox holds lines until they are taken.
type outbox struct {
	wake chan struct{} // has one when there are lines

	mu    sync.Mutex
	lines []Line
	bytes int
	lost  uint64 // since the last line in lines
	all   uint64 // that were ever lost
}

func newOutbox() outbox { return outbox{wake: make(chan struct{}, 1)} }

// add appends a line, or counts it as lost if there is no room.
func (o *outbox) add(l Line) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.lines) >= outboxLines || o.bytes+len(l.Text) > outboxBytes {
		o.lost++
		o.all++
		return
	}
	o.mark()
	o.lines = append(o.lines, l)
	o.bytes += len(l.Text)
	o.wakeReaders()
}

// wakeReaders wakes the goroutine that takes lines.
func (o *outbox) wakeReaders() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// mark records in place how many lines are missing. The caller holds o.mu.
func (o *outbox) mark() {
	if o.lost > 0 {
		o.lines = append(o.lines, Line{Lost: o.lost})
		o.lost = 0
	}
}

// take removes and returns all waiting lines.
func (o *outbox) take() []Line {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mark()
	out := o.lines
	o.lines, o.bytes = nil, 0
	return out
}

// missed counts lines that were taken and did not arrive.
func (o *outbox) missed(lines []Line) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range lines {
		if l.Lost > 0 {
			o.lost += l.Lost // counted in all already
			continue
		}
		o.lost++
		o.all++
	}
}

// dropped returns how many lines were lost so far.
func (o *outbox) dropped() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all
}

package node

import (
	"cmp"
	"slices"
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
	Number   uint64    `json:"n,omitempty"` // of the daemon's lines, from 1; of the last lost line
}

// Bounds of the lines that wait to be read, and of those that are kept after that.
const (
	outboxLines = 16 << 10
	outboxBytes = 4 << 20
)

// outbox holds lines until they are taken. It keeps the latest ones that were taken, for a control
// plane that follows another one.
type outbox struct {
	wake chan struct{} // has one when there are lines

	mu     sync.Mutex
	lines  []Line
	bytes  int
	lost   uint64 // since the last line in lines
	all    uint64 // that were ever lost
	number uint64 // of the latest line

	kept      []Line // that were taken, oldest first
	keptBytes int
}

func newOutbox() outbox { return outbox{wake: make(chan struct{}, 1)} }

// add appends a line, or counts it as lost if there is no room.
func (o *outbox) add(l Line) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.number++
	l.Number = o.number
	if len(o.lines) >= outboxLines || o.bytes+len(l.Text) > outboxBytes {
		o.lost++
		o.all++
		return
	}
	o.mark(o.number - 1)
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

// mark records in place how many lines are missing, up to the one with this number. The caller
// holds o.mu.
func (o *outbox) mark(number uint64) {
	if o.lost > 0 {
		o.lines = append(o.lines, Line{Lost: o.lost, Number: number})
		o.lost = 0
	}
}

// take returns all lines after a number. From now on, they do not wait, but are kept.
func (o *outbox) take(after uint64) []Line {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mark(o.number)
	fresh := o.lines
	o.lines, o.bytes = nil, 0
	from, _ := slices.BinarySearchFunc(o.kept, after+1, func(l Line, n uint64) int { return cmp.Compare(l.Number, n) })
	out := append(slices.Clone(o.kept[from:]), fresh...)
	for _, l := range fresh {
		o.keptBytes += len(l.Text)
	}
	o.kept = append(o.kept, fresh...)
	drop := 0
	for ; len(o.kept)-drop > outboxLines || o.keptBytes > outboxBytes; drop++ {
		o.keptBytes -= len(o.kept[drop].Text)
		o.kept[drop] = Line{}
	}
	o.kept = o.kept[drop:]
	return out
}

// dropped returns how many lines were lost so far.
func (o *outbox) dropped() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all
}

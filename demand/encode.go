package demand

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/sketch"
)

// Version is the version of the records that [Learner.Encode] writes.
const Version = 1

// magic begins each record. The version follows, then the applications, then a CRC-32 of all bytes
// before it (Castagnoli).
const magic = "sc-demand"

// ErrNewer is wrapped by the error of [Decode] for a record of a later version.
var ErrNewer = errors.New("a newer Stagecoach has written it")

// ErrDamaged is wrapped by the error of [Decode] for bytes that are no whole record.
var ErrDamaged = errors.New("it is damaged")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encode returns a record of the applications that keep accepts, the most recently used first. It
// is at most limit bytes long: applications that do not fit are left out, and left is their number.
func (l *Learner) Encode(keep func(app string) bool, limit int) (record []byte, left int) {
	b := append([]byte(magic), Version)
	for e := l.order.Front(); e != nil; e = e.Next() {
		a := e.Value.(*app)
		if !keep(a.name) {
			continue
		}
		before := len(b)
		if b = a.append(b); len(b)+crc32.Size > limit {
			b = b[:before]
			left++
		}
	}
	return seal(b), left
}

// seal appends the checksum of b to b.
func seal(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// Decode reads a record into a new learner with these limits. The error wraps [ErrNewer] or
// [ErrDamaged]; then nothing was read.
func Decode(record []byte, limits Limits) (*Learner, error) {
	if len(record) < len(magic)+1+crc32.Size || string(record[:len(magic)]) != magic {
		return nil, fmt.Errorf("learned demand: %w: got %d bytes without the beginning of a record, want %q", ErrDamaged, len(record), magic)
	}
	// A later version may end in another way.
	if v := record[len(magic)]; v > Version {
		return nil, fmt.Errorf("learned demand: got version %d, want at most %d: %w", v, Version, ErrNewer)
	}
	body, sum := record[:len(record)-crc32.Size], binary.LittleEndian.Uint32(record[len(record)-crc32.Size:])
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return nil, fmt.Errorf("learned demand: %w: got checksum %08x, want %08x", ErrDamaged, got, sum)
	}
	if v := body[len(magic)]; v != Version {
		return nil, fmt.Errorf("learned demand: %w: got version %d, want %d", ErrDamaged, v, Version)
	}
	r := reader{b: body[len(magic)+1:]}
	l := New(limits)
	for len(r.b) > 0 && r.err == nil {
		a := r.app()
		if l.apps[a.name] != nil {
			r.fail(fmt.Sprintf("twice the application %q", a.name))
		}
		if r.err != nil {
			break
		}
		a.bytes = a.size()
		a.shrink(limits.AppBytes)
		l.apps[a.name] = a
		a.place = l.insert(a)
		l.bytes += a.bytes
	}
	if r.err != nil {
		return nil, fmt.Errorf("learned demand: %w: %w", ErrDamaged, r.err)
	}
	l.shrink()
	return l, nil
}

// append appends an application to a record.
func (a *app) append(b []byte) []byte {
	b = appendText(b, a.name)
	b = appendTime(appendTime(b, a.ref), a.last)
	b = appendFloats(b, a.requests, a.completed)
	b = binary.AppendUvarint(b, uint64(len(a.stages)))
	for _, s := range a.stages {
		b = appendText(b, s.name)
		b = appendFloats(b, s.ran, s.calls, s.sized)
		b = s.lengths.Append(b)
		b = binary.AppendUvarint(b, uint64(len(s.cells)))
		for _, c := range s.cells {
			b = appendText(b, c.function)
			b = append(b, byte(c.class))
			b = appendTime(b, c.last)
			b = appendFloats(b, c.calls, c.batch, c.given, c.returned, c.sum, c.squares)
			b = c.work.Append(b)
		}
		b = binary.AppendUvarint(b, uint64(len(s.next)))
		for _, n := range s.next {
			b = appendText(b, n.to)
			b = appendFloats(b, n.seen, n.taken, n.given, n.items)
		}
	}
	return b
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendTime(b []byte, t time.Time) []byte { return binary.AppendVarint(b, t.UnixNano()) }

func appendFloats(b []byte, all ...float64) []byte {
	for _, v := range all {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
	}
	return b
}

// reader reads a record. After the first fault, it returns zero values.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(why string) {
	if r.err == nil {
		r.err = errors.New(why)
	}
	r.b = nil
}

// Bounds of one application in a record. They are above what a learner keeps in its limits.
const (
	mostParts = 4096 // stages, or cells of a stage
	mostText  = 1024 // bytes of a name; a learner ignores longer ones
)

func (r *reader) number(most int) int {
	v, size := binary.Uvarint(r.b)
	if size <= 0 || v > uint64(most) {
		r.fail(fmt.Sprintf("a number at %d bytes before the end, want at most %d", len(r.b), most))
		return 0
	}
	r.b = r.b[size:]
	return int(v)
}

func (r *reader) text() string {
	n := r.number(mostText)
	if n > len(r.b) {
		r.fail(fmt.Sprintf("a name of %d bytes, want at most %d", n, len(r.b)))
		return ""
	}
	s := string(r.b[:n])
	r.b = r.b[n:]
	return s
}

func (r *reader) time() time.Time {
	v, size := binary.Varint(r.b)
	if size <= 0 {
		r.fail("no time")
		return time.Time{}
	}
	r.b = r.b[size:]
	return time.Unix(0, v).UTC()
}

func (r *reader) floats(all ...*float64) {
	for _, to := range all {
		if len(r.b) < 8 {
			r.fail("a weight is cut off")
			return
		}
		*to = math.Float64frombits(binary.LittleEndian.Uint64(r.b))
		if r.b = r.b[8:]; !(*to >= 0 && *to <= math.MaxFloat64) {
			r.fail(fmt.Sprintf("the weight %v, want 0 or more", *to))
			return
		}
	}
}

func (r *reader) sketch() (s sketch.Weighted) {
	s, rest, err := sketch.ReadWeighted(r.b)
	if err != nil {
		r.fail(err.Error())
		return sketch.Weighted{}
	}
	r.b = rest
	return s
}

func (r *reader) app() *app {
	a := &app{name: r.text(), ref: r.time(), last: r.time()}
	r.floats(&a.requests, &a.completed)
	for range r.number(mostParts) {
		s := r.stage()
		if r.err != nil {
			return a
		}
		if n := len(a.stages); n > 0 && a.stages[n-1].name >= s.name {
			r.fail(fmt.Sprintf("stage %q after %q, want them sorted", s.name, a.stages[n-1].name))
		}
		a.stages = append(a.stages, s)
	}
	return a
}

func (r *reader) stage() *stage {
	s := &stage{name: r.text()}
	r.floats(&s.ran, &s.calls, &s.sized)
	s.lengths = r.sketch()
	for range r.number(mostParts) {
		c := &cell{function: r.text(), class: r.number(mostClass), last: r.time()}
		r.floats(&c.calls, &c.batch, &c.given, &c.returned, &c.sum, &c.squares)
		c.work = r.sketch()
		if n := len(s.cells); n > 0 && byFunction(s.cells[n-1], c) >= 0 {
			r.fail(fmt.Sprintf("function %q after %q, want them sorted", c.function, s.cells[n-1].function))
		}
		if r.err != nil {
			return s
		}
		s.cells = append(s.cells, c)
	}
	for range r.number(mostNext) {
		n := &next{to: r.text()}
		r.floats(&n.seen, &n.taken, &n.given, &n.items)
		if k := len(s.next); k > 0 && s.next[k-1].to >= n.to {
			r.fail(fmt.Sprintf("the edge to %q after %q, want them sorted", n.to, s.next[k-1].to))
		}
		if r.err != nil {
			return s
		}
		s.next = append(s.next, n)
	}
	return s
}

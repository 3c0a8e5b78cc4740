package pack

import (
	"bytes"
	"math"
	"strings"
	"testing"
)

func TestReaderReturnsWhatWasAppended(t *testing.T) {
	b := Bytes(nil, []byte("bytes"))
	b = String(b, "")
	b = Uint(b, math.MaxUint64)
	b = Int(b, math.MinInt64)
	b = append(b, 7)
	r := NewReader(b)
	p := r.Bytes()
	if string(p) != "bytes" || r.String() != "" || r.Uint() != math.MaxUint64 || r.Int() != math.MinInt64 || r.Byte() != 7 || r.End() != nil {
		t.Errorf("read %q and others, %v", p, r.End())
	}
	if p[0] = 'B'; !bytes.Contains(b, []byte("Bytes")) {
		t.Error("the bytes are a copy, want them to alias the message")
	}
	if _ = append(p, '!'); bytes.ContainsRune(b, '!') {
		t.Error("what is appended to a field writes over the next one")
	}
}

// TestFirstFaultIsKept reads on after each fault.
func TestFirstFaultIsKept(t *testing.T) {
	for want, tc := range map[string]struct {
		b    []byte
		read func(r *Reader)
	}{
		"at byte 0 of 0: 1 bytes wanted, 0 left":         {nil, func(r *Reader) { r.Byte() }},
		"at byte 0 of 1: no varint":                      {[]byte{0x80}, func(r *Reader) { r.Uint() }},
		"at byte 0 of 0: no varint":                      {nil, func(r *Reader) { r.Int() }},
		"at byte 1 of 2: 9 elements of at least 1 bytes": {[]byte{9, 1}, func(r *Reader) { r.Bytes() }},
		"2 elements of at least 4 bytes":                 {[]byte{2, 0, 0, 0, 0, 0, 0, 0}, func(r *Reader) { r.Count(4) }},
		"elements of at least 1 bytes":                   {bytes.Repeat([]byte{0xff}, 9), func(r *Reader) { r.b = append(r.b, 1); r.Count(1) }},
		"-1 bytes wanted":                                {[]byte{1}, func(r *Reader) { r.Take(-1) }},
		"at byte 0 of 1: 1 bytes left over":              {[]byte{1}, func(*Reader) {}},
		"mine 1":                                         {[]byte{1}, func(r *Reader) { r.Fail("mine %d", 1); r.Fail("mine 2") }},
	} {
		r := NewReader(tc.b)
		tc.read(r)
		_ = r.End()
		if r.Byte() != 0 && r.Err() != nil || r.Uint() != 0 || r.Int() != 0 || r.Bytes() != nil || r.String() != "" {
			t.Errorf("%s: something was read after the fault", want)
		}
		if err := r.End(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

package onnx

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// ExternalFile is a file with parameters of a model, beside the model's own file.
type ExternalFile struct {
	Location string // relative to the model's folder, inside it
	Bytes    int64  // minimum size, according to the model
}

// ErrNoModel means that a file is not a complete ONNX model.
var ErrNoModel = errors.New("not a whole ONNX model")

// External returns the files with parameters that a model names, sorted by location. size is the
// size of the model's file in bytes. External reads only the model's structure and skips its
// parameters, so it takes milliseconds even for gigabytes. It returns an error if the file ends too
// early.
func External(r io.ReaderAt, size int64) ([]ExternalFile, error) {
	s := &scanner{r: r, files: map[string]int64{}}
	if err := s.message(kindModel, 0, size, 0); err != nil {
		return nil, err
	}
	if !s.graph {
		return nil, fmt.Errorf("%w: there is no graph in %d bytes", ErrNoModel, size)
	}
	var out []ExternalFile
	for location, bytes := range s.files {
		out = append(out, ExternalFile{location, bytes})
	}
	slices.SortFunc(out, func(a, b ExternalFile) int { return strings.Compare(a.Location, b.Location) })
	return out, nil
}

// kind is a message of onnx.proto that can contain names of files.
type kind int

const (
	kindModel kind = iota + 1
	kindGraph
	kindNode
	kindAttribute
	kindSparse
	kindTensor
	kindEntry // a key and a value of a tensor's external data
	kindValue // an input or output of the model
)

// Field numbers of a graph's values.
const (
	graphInput  = 11
	graphOutput = 12
)

// inside returns the kind of a message's field by its number. It returns 0 if the scanner skips the
// field.
func (k kind) inside(field uint64) kind {
	switch {
	case k == kindModel && field == 7:
		return kindGraph
	case k == kindGraph && field == 1:
		return kindNode
	case k == kindGraph && field == 5, k == kindAttribute && (field == 5 || field == 10), k == kindSparse && field <= 2:
		return kindTensor
	case k == kindGraph && field == 15, k == kindAttribute && (field == 22 || field == 23):
		return kindSparse
	case k == kindGraph && (field == graphInput || field == graphOutput):
		return kindValue
	case k == kindNode && field == 5:
		return kindAttribute
	case k == kindAttribute && (field == 6 || field == 11):
		return kindGraph
	case k == kindTensor && field == 13:
		return kindEntry
	}
	return 0
}

// Limits of a model.
const (
	maxNesting  = 64      // depth of messages, such as subgraphs in subgraphs
	maxName     = 4 << 10 // bytes of a file's name
	maxExternal = 10_000  // files
	maxValue    = 1 << 20 // bytes per description of an input or output
)

// scanner reads the encoding of a model field by field.
type scanner struct {
	r     io.ReaderAt
	files map[string]int64
	graph bool
	// value is called for each input and output of the model; nil: they are skipped.
	value func(field uint64, description []byte) error

	buf  [4096]byte // the last bytes that were read
	from int64
	have int

	entry map[string]string // external data of the current tensor
}

// bytes returns n bytes at an offset. n is at most the size of buf.
func (s *scanner) bytes(at int64, n int) ([]byte, error) {
	if at < s.from || at+int64(n) > s.from+int64(s.have) {
		got, err := s.r.ReadAt(s.buf[:], at)
		if err != nil && (!errors.Is(err, io.EOF) || got < n) {
			return nil, fmt.Errorf("%w: at byte %d: %w", ErrNoModel, at, err)
		}
		s.from, s.have = at, got
	}
	i := int(at - s.from)
	return s.buf[i : i+n], nil
}

func (s *scanner) varint(at, end int64) (v uint64, next int64, err error) {
	b, err := s.bytes(at, int(min(binary.MaxVarintLen64, max(end-at, 0))))
	if err != nil {
		return 0, 0, err
	}
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, 0, fmt.Errorf("%w: no number at byte %d", ErrNoModel, at)
	}
	return v, at + int64(n), nil
}

// message reads the fields of a message.
func (s *scanner) message(k kind, at, end int64, depth int) error {
	if depth > maxNesting {
		return fmt.Errorf("%w: messages nested more than %d deep", ErrNoModel, maxNesting)
	}
	if k == kindGraph {
		s.graph = true
	}
	if k == kindTensor {
		s.entry = map[string]string{}
	}
	for at < end {
		tag, next, err := s.varint(at, end)
		if err != nil {
			return err
		}
		length := int64(0)
		switch tag & 7 {
		case 0:
			if _, next, err = s.varint(next, end); err != nil {
				return err
			}
		case 1:
			length = 8
		case 5:
			length = 4
		case 2:
			n, after, err := s.varint(next, end)
			if err != nil {
				return err
			}
			next, length = after, int64(min(n, 1<<62))
		default:
			return fmt.Errorf("%w: field of type %d at byte %d", ErrNoModel, tag&7, at)
		}
		if length > end-next {
			return fmt.Errorf("%w: it ends after %d bytes, inside a field of %d bytes that begins at %d", ErrNoModel, end, length, next)
		}
		if err := s.field(k, tag, next, next+length, depth); err != nil {
			return err
		}
		at = next + length
	}
	if k == kindTensor {
		return s.tensor()
	}
	return nil
}

func (s *scanner) field(k kind, tag uint64, at, end int64, depth int) error {
	inside := k.inside(tag >> 3)
	if tag&7 != 2 || inside == 0 {
		return nil
	}
	switch inside {
	case kindEntry:
		return s.pair(at, end)
	case kindValue:
		if s.value == nil || depth > 1 { // values of subgraphs are skipped
			return nil
		}
		if end-at > maxValue {
			return fmt.Errorf("%w: an input or output of %d bytes, want at most %d", ErrNoModel, end-at, maxValue)
		}
		b := make([]byte, end-at)
		if _, err := s.r.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: at byte %d: %w", ErrNoModel, at, err)
		}
		return s.value(tag>>3, b)
	}
	return s.message(inside, at, end, depth+1)
}

// pair reads a key and a value of external data.
func (s *scanner) pair(at, end int64) error {
	var both [2]string
	for at < end {
		tag, next, err := s.varint(at, end)
		if err != nil {
			return err
		}
		n, next, err := s.varint(next, end)
		if err != nil {
			return err
		}
		if tag&7 != 2 || n > maxName || int64(n) > end-next {
			return fmt.Errorf("%w: external data at byte %d, want a key and a value of at most %d bytes", ErrNoModel, at, maxName)
		}
		b, err := s.bytes(next, int(n))
		if err != nil {
			return err
		}
		if i := tag >> 3; i == 1 || i == 2 {
			both[i-1] = string(b)
		}
		at = next + int64(n)
	}
	s.entry[both[0]] = both[1]
	return nil
}

// tensor records the file of the tensor that was read.
func (s *scanner) tensor() error {
	location := s.entry["location"]
	if location == "" {
		return nil
	}
	if !filepath.IsLocal(location) {
		return fmt.Errorf("external data in %q, want a file in the model's folder", location)
	}
	var number [2]int64
	for i, name := range []string{"offset", "length"} {
		if text := s.entry[name]; text != "" {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil || n < 0 || n > 1<<61 {
				return fmt.Errorf("external data in %q: %s %q, want a number of bytes", location, name, text)
			}
			number[i] = n
		}
	}
	s.files[location] = max(s.files[location], number[0]+number[1])
	if len(s.files) > maxExternal {
		return fmt.Errorf("external data in more than %d files", maxExternal)
	}
	return nil
}

package safetensors

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// parse decodes the header. Its offsets are relative to the data and not checked yet. encoding/json
// is not used, because it accepts keys that occur twice or differ in case, and lists of a wrong
// length.
func parse(header []byte) (tensors []Info, metadata map[string]string, err error) {
	if !utf8.Valid(header) {
		return nil, nil, fmt.Errorf("%.40q, want UTF-8", header)
	}
	if len(header) == 0 || header[0] != '{' {
		return nil, nil, fmt.Errorf("%.40q, want a JSON object", header)
	}
	s := &scanner{b: header}
	seen := map[string]bool{}
	err = s.object(func(name string) error {
		if seen[name] {
			return fmt.Errorf("tensor %.80q: it occurs twice", name)
		}
		seen[name] = true
		if name == "__metadata__" {
			if s.null() { // some writers write null if they have no metadata
				return nil
			}
			if metadata, err = s.texts(); err != nil {
				return fmt.Errorf("__metadata__: %w", err)
			}
			return nil
		}
		if len(tensors) == maxTensors {
			return fmt.Errorf("more than %d tensors", maxTensors)
		}
		t, err := s.tensor()
		if err != nil {
			return fmt.Errorf("tensor %.80q: %w", name, err)
		}
		t.Name = name
		tensors = append(tensors, t)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if rest := bytes.TrimRight(header[s.at:], " "); len(rest) > 0 {
		return nil, nil, fmt.Errorf("%.40q after the header's end, want only spaces", rest)
	}
	return tensors, metadata, nil
}

// scanner decodes JSON that is valid UTF-8.
type scanner struct {
	b  []byte
	at int
}

// tensor decodes the description of a tensor. Its Bytes may be negative.
func (s *scanner) tensor() (Info, error) {
	var t Info
	seen := map[string]bool{}
	err := s.object(func(key string) (err error) {
		if seen[key] {
			return fmt.Errorf("%.80s: it occurs twice", key)
		}
		seen[key] = true
		switch key {
		case "dtype":
			var text string
			if text, err = s.text(); err != nil {
				return fmt.Errorf("dtype: %w", err)
			}
			if t.Dtype = Dtype(text); t.Dtype.Bits() == 0 {
				return fmt.Errorf("dtype %.40q, want one of BOOL, U8 … U64, I8 … I64, F4 … F64, BF16, C64", text)
			}
		case "shape":
			if t.Shape, err = s.numbers(maxRank); err != nil {
				return fmt.Errorf("shape: %w", err)
			}
		case "data_offsets":
			offsets, err := s.numbers(2)
			if err == nil && len(offsets) != 2 {
				err = fmt.Errorf("%d numbers, want 2", len(offsets))
			}
			if err != nil {
				return fmt.Errorf("data_offsets: %w", err)
			}
			t.Offset, t.Bytes = offsets[0], offsets[1]-offsets[0]
		default:
			return fmt.Errorf("%.40q, want dtype, shape and data_offsets", key)
		}
		return nil
	})
	if err == nil && len(seen) != 3 {
		err = fmt.Errorf("%d fields, want dtype, shape and data_offsets", len(seen))
	}
	return t, err
}

// texts decodes an object whose values are strings.
func (s *scanner) texts() (map[string]string, error) {
	all := map[string]string{}
	return all, s.object(func(key string) error {
		if _, twice := all[key]; twice {
			return fmt.Errorf("%.80q: it occurs twice", key)
		}
		if len(all) == maxTensors {
			return fmt.Errorf("more than %d texts", maxTensors)
		}
		v, err := s.text()
		if err != nil {
			return fmt.Errorf("%.80q: %w", key, err)
		}
		all[key] = v
		return nil
	})
}

// null skips a null and reports whether there was one.
func (s *scanner) null() bool {
	s.space()
	if !strings.HasPrefix(string(s.b[s.at:min(s.at+4, len(s.b))]), "null") {
		return false
	}
	s.at += 4
	return true
}

// object decodes an object. each decodes the value of a key.
func (s *scanner) object(each func(key string) error) error {
	return s.list('{', '}', func() error {
		key, err := s.text()
		if err != nil {
			return err
		}
		if !s.next(':') {
			return s.wrong("a colon")
		}
		return each(key)
	})
}

// numbers decodes a list of integers of at least 0. limit is the largest length of the list.
func (s *scanner) numbers(limit int) ([]int64, error) {
	var all []int64
	return all, s.list('[', ']', func() error {
		if len(all) == limit {
			return fmt.Errorf("more than %d numbers", limit)
		}
		s.space()
		from := s.at
		for s.at < len(s.b) && '0' <= s.b[s.at] && s.b[s.at] <= '9' {
			s.at++
		}
		digits := string(s.b[from:s.at])
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || len(digits) > 1 && digits[0] == '0' || s.at < len(s.b) && strings.IndexByte(",] \t\r\n", s.b[s.at]) < 0 {
			s.at = from
			return s.wrong("an integer of at least 0")
		}
		all = append(all, n)
		return nil
	})
}

// list decodes elements that are separated by commas, between two brackets.
func (s *scanner) list(opening, closing byte, each func() error) error {
	if !s.next(opening) {
		return s.wrong(strconv.QuoteRune(rune(opening)))
	}
	if s.next(closing) {
		return nil
	}
	for {
		if err := each(); err != nil {
			return err
		}
		if s.next(closing) {
			return nil
		}
		if !s.next(',') {
			return s.wrong("a comma or " + strconv.QuoteRune(rune(closing)))
		}
	}
}

// text decodes a string.
func (s *scanner) text() (string, error) {
	if !s.next('"') {
		return "", s.wrong("a string")
	}
	from, escaped := s.at, false
	for ; s.at < len(s.b) && s.b[s.at] != '"'; s.at++ {
		if s.b[s.at] == '\\' {
			escaped = true
			s.at++
		} else if s.b[s.at] < ' ' {
			return "", s.wrong("a string without control characters")
		}
	}
	if s.at >= len(s.b) {
		return "", fmt.Errorf("it ends within a string")
	}
	raw := s.b[from:s.at]
	s.at++
	if !escaped {
		return string(raw), nil
	}
	var text string
	if err := json.Unmarshal(s.b[from-1:s.at], &text); err != nil {
		return "", fmt.Errorf("%.40q: %w", raw, err)
	}
	// encoding/json returns this for half a surrogate pair.
	if strings.ContainsRune(text, utf8.RuneError) {
		return "", fmt.Errorf("%.40q, want Unicode", raw)
	}
	return text, nil
}

// next skips spaces, and c if it follows. It reports whether c followed.
func (s *scanner) next(c byte) bool {
	s.space()
	if s.at >= len(s.b) || s.b[s.at] != c {
		return false
	}
	s.at++
	return true
}

func (s *scanner) space() {
	for s.at < len(s.b) && strings.IndexByte(" \t\r\n", s.b[s.at]) >= 0 {
		s.at++
	}
}

func (s *scanner) wrong(want string) error {
	if s.at >= len(s.b) {
		return fmt.Errorf("it ends too early, want %s", want)
	}
	return fmt.Errorf("%.20q at byte %d, want %s", s.b[s.at:], s.at, want)
}

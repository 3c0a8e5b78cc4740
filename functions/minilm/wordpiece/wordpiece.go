package wordpiece

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// maxWord is the maximum length of a word in characters. A longer word is unknown.
const maxWord = 100

// Tokenizer has a vocabulary. It never changes, and it is safe for concurrent use.
type Tokenizer struct {
	ids           map[string]int64
	cls, sep, unk int64
	special       []string // names of special tokens, which are tokens wherever they occur in a text
}

// New parses a vocabulary with one token per line. The id of a token is its line number, counted
// from 0.
func New(vocabulary string) (*Tokenizer, error) {
	t := &Tokenizer{ids: map[string]int64{}, special: []string{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}}
	for line := range strings.Lines(vocabulary) {
		token := strings.TrimRight(line, "\r\n")
		if before, twice := t.ids[token]; twice {
			return nil, fmt.Errorf("vocabulary: line %d: token %q is already in line %d", len(t.ids)+1, token, before+1)
		}
		t.ids[token] = int64(len(t.ids))
	}
	for _, name := range t.special {
		if _, ok := t.ids[name]; !ok {
			return nil, fmt.Errorf("vocabulary of %d lines: it has no token %s, want BERT's five special tokens", len(t.ids), name)
		}
	}
	t.cls, t.sep, t.unk = t.ids["[CLS]"], t.ids["[SEP]"], t.ids["[UNK]"]
	return t, nil
}

// Size returns the number of tokens in the vocabulary. Ids are below it.
func (t *Tokenizer) Size() int { return len(t.ids) }

// IDs returns the tokens of a text between [CLS] and [SEP]. limit is the maximum number of tokens
// with these two, and is at least 2. IDs does not read the text beyond the limit.
func (t *Tokenizer) IDs(text string, limit int) []int64 {
	w := walk{Tokenizer: t, ids: []int64{t.cls}, most: limit - 1}
	for len(text) > 0 && !w.full() {
		at, name := t.nextSpecial(text)
		w.text(text[:at])
		if name != "" {
			w.ids = append(w.ids, t.ids[name])
		}
		text = text[at+len(name):]
	}
	return append(w.ids[:min(len(w.ids), w.most)], t.sep)
}

// nextSpecial returns the offset and the name of the first special token in text, or the text's end
// and "".
func (t *Tokenizer) nextSpecial(text string) (at int, name string) {
	for at = 0; ; at++ {
		i := strings.IndexByte(text[at:], '[')
		if i < 0 {
			return len(text), ""
		}
		at += i
		for _, name := range t.special {
			if strings.HasPrefix(text[at:], name) {
				return at, name
			}
		}
	}
}

// walk collects a text's tokens.
type walk struct {
	*Tokenizer
	ids  []int64
	most int
}

func (w *walk) full() bool { return len(w.ids) >= w.most }

// text adds the tokens of a text without special tokens.
func (w *walk) text(s string) {
	var word []byte
	end := func() {
		w.word(string(word))
		word = word[:0]
	}
	for _, r := range s {
		switch {
		case isSpace(r):
			end()
		case isRemoved(r):
		case isChinese(r):
			end()
			word = utf8.AppendRune(word, r)
			end()
		default:
			word = utf8.AppendRune(word, r)
		}
		if w.full() {
			return
		}
	}
	end()
}

// word adds the tokens of the characters between two spaces: without accents, in lower case, split
// at punctuation.
func (w *walk) word(s string) {
	var part []byte
	for _, r := range norm.NFD.String(s) {
		if unicode.Is(unicode.Mn, r) {
			continue
		}
		r = unicode.ToLower(r)
		if !isPunctuation(r) {
			part = utf8.AppendRune(part, r)
			continue
		}
		w.pieces(string(part))
		w.pieces(string(r))
		if part = part[:0]; w.full() {
			return
		}
	}
	w.pieces(string(part))
}

// pieces covers a word from its beginning with the longest pieces of the vocabulary. In the
// vocabulary, pieces after the first begin with ##.
func (w *walk) pieces(s string) {
	if s == "" || w.full() {
		return
	}
	if utf8.RuneCountInString(s) > maxWord {
		w.ids = append(w.ids, w.unk)
		return
	}
	begin, prefix := len(w.ids), ""
	for s != "" {
		id, n, ok := w.longest(prefix, s)
		if !ok {
			w.ids = append(w.ids[:begin], w.unk)
			return
		}
		w.ids = append(w.ids, id)
		s, prefix = s[n:], "##"
	}
}

// longest returns the id of the longest piece at the beginning of s, and the piece's length in
// bytes.
func (w *walk) longest(prefix, s string) (id int64, n int, ok bool) {
	for n = len(s); n > 0; {
		if id, ok := w.id(prefix + s[:n]); ok {
			return id, n, true
		}
		_, size := utf8.DecodeLastRuneInString(s[:n])
		n -= size
	}
	return 0, 0, false
}

func (w *walk) id(piece string) (int64, bool) {
	id, ok := w.Tokenizer.ids[piece]
	return id, ok
}

// isSpace reports whether r separates words.
func isSpace(r rune) bool {
	return r == '\t' || r == '\n' || r == '\r' || !isRemoved(r) && unicode.IsSpace(r)
}

// isRemoved reports whether r is removed: control and format characters, characters for private
// use, and the replacement character.
func isRemoved(r rune) bool {
	return r == utf8.RuneError || r != '\t' && r != '\n' && r != '\r' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co)
}

// isPunctuation reports whether r is punctuation in Unicode, or a symbol in ASCII, such as $ and ~.
func isPunctuation(r rune) bool {
	return unicode.Is(unicode.P, r) || r < utf8.RuneSelf && unicode.Is(unicode.S, r)
}

// isChinese reports whether r is in one of the reference's blocks of CJK ideographs. These do not
// include kana and hangul.
func isChinese(r rune) bool {
	switch {
	case r < 0x3400:
		return false
	case r <= 0x4DBF, 0x4E00 <= r && r <= 0x9FFF, 0xF900 <= r && r <= 0xFAFF,
		0x20000 <= r && r <= 0x2A6DF, 0x2A700 <= r && r <= 0x2B73F, 0x2B740 <= r && r <= 0x2B81F, 0x2B920 <= r && r <= 0x2CEAF, 0x2F800 <= r && r <= 0x2FA1F:
		return true
	}
	return false
}

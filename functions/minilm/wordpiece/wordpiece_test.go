package wordpiece_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestIDsEqualTheReference compares the ids of every text with those of the reference.
func TestIDsEqualTheReference(t *testing.T) {
	b, err := os.ReadFile(proctest.Built(t, "models", "minilm", "vocab.txt"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := wordpiece.New(string(b))
	if err != nil {
		t.Fatal(err)
	}
	var reference struct {
		Max   int `json:"max_tokens"`
		Texts []struct {
			Text string
			IDs  []int64
		}
	}
	b, err = os.ReadFile("../testdata/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &reference); err != nil || len(reference.Texts) != 20 {
		t.Fatalf("%d texts, %v", len(reference.Texts), err)
	}
	for _, r := range reference.Texts {
		if got := tok.IDs(r.Text, reference.Max); !slices.Equal(got, r.IDs) {
			t.Errorf("%q:\ngot  %v\nwant %v", r.Text, got, r.IDs)
		}
	}
}

const small = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nab\n##a\n##b\n##bc\n,\n世\n~\ni\nss\ns\n##s\n;\n"

func tokenizer(t testing.TB) *wordpiece.Tokenizer {
	t.Helper()
	tok, err := wordpiece.New(small)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestIDsCoverWordsWithLongestPieces(t *testing.T) {
	names := strings.Fields(small)
	for text, want := range map[string]string{
		"":                             "",
		" \t\n\r\u00a0\u3000":          "",
		"a b":                          "a b",
		"AB":                           "ab",
		"abab":                         "ab ##a ##b",
		"babc":                         "b ##a ##bc",
		"abx":                          "[UNK]",
		"ab,a":                         "ab , a",
		"a\x00b":                       "ab",
		"a\u200bb":                     "ab",
		"a\ufffdb":                     "ab",
		"a\x0bb":                       "ab", // a vertical tab counts as a control character
		"a\u2028b":                     "a b",
		"a世b":                          "a 世 b",
		"á\u0301":                      "a",
		"\u0301":                       "",
		"İ":                            "i",
		"a~b":                          "a ~ b",
		"a\u037eb":                     "a ; b", // a Greek question mark is a semicolon
		"a[SEP]b":                      "a [SEP] b",
		"[[MASK][PAD]":                 "[UNK] [MASK] [PAD]",
		"[sep]":                        "[UNK] [UNK] [UNK]",
		strings.Repeat("a", 100):       "a" + strings.Repeat(" ##a", 99),
		strings.Repeat("a", 101):       "[UNK]",
		strings.Repeat("a,", 2):        "a , a ,",
		"a" + strings.Repeat("́", 500): "a",
	} {
		var got []string
		ids := tokenizer(t).IDs(text, 256)
		for _, id := range ids[1 : len(ids)-1] {
			got = append(got, names[id])
		}
		if s := strings.Join(got, " "); s != want || ids[0] != 2 || ids[len(ids)-1] != 3 {
			t.Errorf("%q: %q between %d and %d, want %q between 2 and 3", text, s, ids[0], ids[len(ids)-1], want)
		}
	}
}

func TestLimitCutsIDsBeforeTheEndToken(t *testing.T) {
	tok := tokenizer(t)
	for _, text := range []string{strings.Repeat("a ", 50), strings.Repeat("ab", 50), strings.Repeat("[SEP]", 50), strings.Repeat(",", 50), strings.Repeat("世", 50)} {
		whole := tok.IDs(text, 1000)
		for _, limit := range []int{2, 3, 4, 51} {
			want := append(slices.Clone(whole[:limit-1]), 3)
			if got := tok.IDs(text, limit); !slices.Equal(got, want) {
				t.Errorf("%.10q… with a limit of %d: %v, want %v", text, limit, got, want)
			}
		}
	}
}

func TestNewRefusesInvalidVocabularies(t *testing.T) {
	for name, tc := range map[string]struct{ vocabulary, want string }{
		"nothing": {"", "no token [PAD]"},
		"twice":   {small + "ab\n", `line 20: token "ab" is already in line 8`},
		"no mask": {strings.Replace(small, "[MASK]", "mask", 1), "no token [MASK]"},
	} {
		if _, err := wordpiece.New(tc.vocabulary); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tc.want)
		}
	}
}

func FuzzIDs(f *testing.F) {
	for _, s := range []string{"", "ab,a 世 [SEP]", "É\u0301\x00\xff[MASK", "한국어 ﬁ İ ß"} {
		f.Add(s, 16)
	}
	tok := tokenizer(f)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = 2 + int(uint(limit)%300)
		got := tok.IDs(s, limit)
		if len(got) < 2 || len(got) > limit || got[0] != 2 || got[len(got)-1] != 3 {
			t.Fatalf("%v, want [CLS], [SEP] and at most %d tokens", got, limit)
		}
		for _, id := range got {
			if id < 0 || id >= int64(strings.Count(small, "\n")) {
				t.Fatalf("token %d is not in the vocabulary", id)
			}
		}
		if !utf8.ValidString(s) {
			return
		}
		if again := tok.IDs("  "+s+" \n", limit); !slices.Equal(got, again) {
			t.Fatalf("spaces around it change %v to %v", got, again)
		}
		if more := tok.IDs(s, limit+1); fmt.Sprint(more[:min(len(more), limit)-1]) != fmt.Sprint(got[:len(got)-1]) {
			t.Fatalf("a higher limit changes the beginning of %v to %v", got, more)
		}
	})
}

package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	columns = 100 // of a line of prose; a tab counts as one
	words   = 40  // of a sentence
)

type finding struct {
	line int
	what string
}

func (f finding) String() string { return fmt.Sprintf("%d: %s", f.line, f.what) }

// check returns the findings of a file, ordered by line.
func check(file, src string) ([]finding, error) {
	blocks, names, err := extract(file, src)
	if err != nil {
		return nil, err
	}
	var found []finding
	for _, b := range blocks {
		found = append(found, checkBlock(b)...)
	}
	for _, n := range names {
		for _, word := range split(n.text) {
			if instead, bad := banned[word]; bad && !slices.Contains(keywords, n.text) {
				found = append(found, finding{n.line, fmt.Sprintf("name %s: %q, want %s", n.text, word, instead)})
			}
		}
	}
	slices.SortStableFunc(found, func(a, b finding) int { return cmp.Compare(a.line, b.line) })
	return slices.Compact(found), nil
}

func checkBlock(b block) (found []finding) {
	for i, raw := range b.raw {
		if n := utf8.RuneCountInString(raw); b.wraps && n > columns && !endsInLink(raw) {
			found = append(found, finding{b.line + i, fmt.Sprintf("%d columns, want at most %d", n, columns)})
		}
	}
	text := prose(strings.Join(b.text, "\n"))
	at := func(offset int) int { return b.line + strings.Count(text[:offset], "\n") }
	for _, m := range rate.FindAllStringSubmatchIndex(text, -1) {
		between := "" // the number and the article
		if m[2] >= 0 {
			between = text[m[2]:m[3]]
		}
		if phrase := oneLine(text[m[0]:m[1]]); !slices.Contains(noRate, between) && !ordinal(phrase, text[m[1]:]) {
			found = append(found, finding{at(m[0]), fmt.Sprintf("%q, want \"per\"", phrase)})
		}
	}
	for _, m := range turn.FindAllStringIndex(text, -1) {
		found = append(found, finding{at(m[0]), fmt.Sprintf("%q, want a subject and a verb", oneLine(text[m[0]:m[1]]))})
	}
	for _, m := range word.FindAllStringIndex(text, -1) {
		w := strings.ToLower(text[m[0]:m[1]])
		if instead, bad := banned[w]; bad {
			found = append(found, finding{at(m[0]), fmt.Sprintf("%q, want %s", w, instead)})
		}
	}
	for _, s := range sentences(text) {
		if n := len(strings.Fields(s.text)); n > words {
			first := strings.Join(strings.Fields(s.text)[:5], " ")
			found = append(found, finding{at(s.offset), fmt.Sprintf("%d words in a sentence, want at most %d: %q …", n, words, first)})
		}
	}
	return found
}

var (
	inlineCode = regexp.MustCompile("``[^`]+``|`[^`]*`")
	target     = regexp.MustCompile(`\]\([^)]*\)|\]\[[^\]]*\]|https?://[^\s)]+`)
)

// prose removes from a text what is not English: code in backquotes and the targets of links. Line
// breaks stay, so that the line of an offset can still be found.
func prose(text string) string {
	breaks := func(with string) func(string) string {
		return func(s string) string { return with + strings.Repeat("\n", strings.Count(s, "\n")) }
	}
	return target.ReplaceAllStringFunc(inlineCode.ReplaceAllStringFunc(text, breaks("`x`")), breaks("]"))
}

// endsInLink reports whether a line is too wide only because it ends in a link or word that cannot
// be broken: the text before that fits.
func endsInLink(raw string) bool {
	if strings.HasPrefix(raw, "![") {
		return true
	}
	if fits := utf8.RuneCountInString(target.ReplaceAllString(raw, "]")) <= columns; fits && target.MatchString(raw) {
		return true
	}
	return len(strings.Fields(strings.TrimLeft(raw, "#/ \t-*"))) <= 1
}

const (
	number = `one|two|three|four|five|six|eight|ten|twenty|hundred|thousand|million|\d[\d.,]*\d|\d`
	unit   = `ms|µs|us|ns|s|seconds|milliseconds|microseconds|%|[KMGT]i?B|bytes|cores|cents?`
	thing  = `replica|stage|function|node|call|request|start|fork|item|message|pipeline|namespace|device|core|tick|hop|token|` +
		`task|process|model|batch|byte|page|connection|user|caller|hour|minute|day|round|run|test|key|order|file|image|line|kind|queue|worker|second`
	plural = `requests|replicas|tasks|bytes|messages|arrivals|items|children|processes`
	// verb has plurals that may also be verbs, as in "starts a stage". They count only before a time.
	verb = `calls|forks|starts|orders|loads|hits|targets|decisions`
	time = `second|minute|hour|day`
)

var (
	// rate finds `one a stage`, `one word a call`, `10 ms a start` and `requests a second`.
	rate = regexp.MustCompile(`(?i)\b(?:(?:` + number + `)(?:\s+([a-zµ%]+))?|` + unit + `|` + plural + `)\s+an?\s+(?:` + thing + `)\b|` +
		`\b(?:` + verb + `)\s+an?\s+(?:` + time + `)\b`)
	// turn finds turns of phrase that make a reader look for the subject.
	turn = regexp.MustCompile(`(?i)\b(?:(?:is|are|was|were)\s+to\s+be\s+(?:[a-z]+ed|had|done|seen|made|found)|(?:is|are)\s+had\s+by|of\s+those\s+alike|at\s+last:|be\s+it\s+(?:that|a|of)|so\s+much\s+of\s+it\s+as|what\s+there\s+is\s+of|one\s+a\s+piece)`)
	word = regexp.MustCompile(`[A-Za-z]+`)
)

// noRate has words after which "a stage" does not belong to the number before them, as in "two of a
// stage". It also has "times": "ten times a second" is English.
var noRate = strings.Fields("times after as at before by for from gives if in is like load make makes needs of on or over " +
	"plus takes than that through to under wakes want when where which while with without")

// ordinal reports whether "a second" at the end of a phrase is an ordinal and not a time, as in
// `gives calls a second try`. after is the text that follows the phrase.
func ordinal(phrase, after string) bool {
	next := strings.TrimSpace(word.FindString(after))
	return strings.HasSuffix(phrase, "second") && strings.HasPrefix(after, " "+next) && slices.Contains(nouns, next)
}

// nouns follow "a second" where it is an ordinal.
var nouns = strings.Fields("one time try attempt chance copy replica node call request process daemon run stage function terminal machine")

// sentence is a sentence of a text, with its offset in that text.
type sentence struct {
	offset int
	text   string
}

var stop = regexp.MustCompile(`[.!?]["')*_]*(?:\s+|$)`)

// sentences cuts a text after full stops, except after abbreviations.
func sentences(text string) (all []sentence) {
	start := 0
	for _, m := range stop.FindAllStringIndex(text, -1) {
		if before := text[start:m[0]]; strings.HasSuffix(before, "e.g") || strings.HasSuffix(before, "i.e") {
			continue
		}
		all = append(all, sentence{start, text[start:m[1]]})
		start = m[1]
	}
	return append(all, sentence{start, text[start:]})
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// split returns the words of an identifier, in lower case.
func split(id string) (all []string) {
	start := 0
	for i, r := range id {
		if i > start && (r == '_' || unicode.IsUpper(r)) {
			all = append(all, strings.ToLower(strings.Trim(id[start:i], "_")))
			start = i
		}
	}
	return append(all, strings.ToLower(strings.Trim(id[start:], "_")))
}

// keywords are names that a language gives.
var keywords = []string{"yield"}

// banned has the words that readers stumble over, and what to write instead.
var banned = func() map[string]string {
	all := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(`
bear bears bore borne bearing = start, fork, hold or tolerate
mourn mourns mourned mourning = record a crash, or reap
forgo forgoes forgoing forwent = skip or give up
moor moors moored mooring = attach or park
yield yields yielded yielding = return, give or release
bring brings bringing brought = start, add or cause
disclose discloses disclosed = show or report
provide provides provided providing = give, start or supply; "if" for "provided that"
mend mends mended mending = repair or fix
anew afresh = again
lest = so that … not
whence whither hence thence = from where, so
thereof therein thereby thereto whereof wherein whereby hereby = name the thing
hitherto heretofore = so far
ere nigh yonder naught aught nought = a plain word
dwell dwells abide abides = stay or run
perish perishes perished slay slays slain = die, stop or kill
beget begets beseech bespeak heed heeds behold = a plain verb
tidings woe plight kin foe = a plain noun
amidst amongst whilst upon = amid, among, while, on
`), "\n") {
		bad, instead, _ := strings.Cut(line, " = ")
		for _, w := range strings.Fields(bad) {
			all[w] = instead
		}
	}
	return all
}()

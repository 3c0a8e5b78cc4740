package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
)

// A block is text that is read in one go: a comment, a paragraph, an item of a list, a table row.
type block struct {
	line  int      // number of the first line
	text  []string // the prose, per line
	raw   []string // the lines as they are in the file, for their width
	wraps bool     // whether the author can wrap the lines: not those of a table or heading
}

// A name is an identifier that a file declares.
type name struct {
	line int
	text string
}

// extract returns the texts and the declared names of a file.
func extract(file, src string) ([]block, []name, error) {
	switch kindOf(file) {
	case ".go":
		return extractGo(file, src)
	case ".md":
		return markdown(src), nil, nil
	case ".c":
		return comments(src, "//", "/*", "*/"), nil, nil
	case ".py":
		return comments(src, "#", `"""`, `"""`), declared(src, pythonName), nil
	}
	return comments(src, "#", "", ""), nil, nil
}

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func extractGo(file, src string) (blocks []block, names []name, err error) {
	if generated.MatchString(src) {
		return nil, nil, nil
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	lines := strings.Split(src, "\n")
	preamble := map[*ast.CommentGroup]bool{} // C code
	ast.Inspect(f, func(n ast.Node) bool {
		var ids []*ast.Ident
		switch n := n.(type) {
		case *ast.GenDecl:
			for _, s := range n.Specs {
				if imp, ok := s.(*ast.ImportSpec); ok && imp.Path.Value == `"C"` {
					preamble[n.Doc] = true
				}
			}
		case *ast.FuncDecl:
			ids = append(ids, n.Name)
		case *ast.TypeSpec:
			ids = append(ids, n.Name)
		case *ast.ValueSpec:
			ids = n.Names
		case *ast.Field:
			ids = n.Names
		}
		for _, id := range ids {
			names = append(names, name{fset.Position(id.Pos()).Line, id.Name})
		}
		return true
	})
	for _, group := range f.Comments {
		if preamble[group] {
			continue
		}
		first := fset.Position(group.Pos()).Line
		b := block{line: first, wraps: true}
		for _, c := range group.List {
			for i, text := range strings.Split(c.Text, "\n") {
				at := fset.Position(c.Pos()).Line + i
				b.raw = append(b.raw, lines[at-1])
				text = strings.TrimPrefix(strings.TrimPrefix(text, "//"), "/*")
				if directive.MatchString(c.Text) || strings.HasPrefix(text, "\t") {
					text = "" // code
				}
				b.text = append(b.text, strings.TrimSuffix(text, "*/"))
			}
		}
		blocks = append(blocks, paragraphs(b)...)
	}
	return blocks, names, nil
}

var (
	directive  = regexp.MustCompile(`^//(go:|nolint|export |line |#)`)
	pythonName = regexp.MustCompile(`^\s*(?:def|class)\s+(\w+)`)
)

// declared returns the names that a source declares. On each line, it finds at most one name, by
// the given expression.
func declared(src string, form *regexp.Regexp) (names []name) {
	for i, line := range strings.Split(src, "\n") {
		if m := form.FindStringSubmatch(line); m != nil {
			names = append(names, name{i + 1, m[1]})
		}
	}
	return names
}

// comments returns the comments of a source. A comment begins with mark and ends with its line, or
// it is the text between open and end. Marks in a string are skipped if the string ends on the line
// that it begins on.
func comments(src, mark, open, end string) (blocks []block) {
	var b *block // that is being read
	inside := false
	flush := func() {
		if b != nil {
			blocks = append(blocks, paragraphs(*b)...)
			b = nil
		}
	}
	add := func(n int, text, raw string) {
		if b == nil {
			b = &block{line: n, wraps: true}
		}
		b.text, b.raw = append(b.text, text), append(b.raw, raw)
	}
	for i, raw := range strings.Split(src, "\n") {
		line := strings.TrimSpace(raw)
		if inside {
			text, _, ends := strings.Cut(line, end)
			add(i+1, strings.TrimPrefix(text, "* "), raw)
			if inside = !ends; ends {
				flush()
			}
			continue
		}
		if open != "" && strings.HasPrefix(line, open) {
			flush()
			text, _, ends := strings.Cut(line[len(open):], end)
			add(i+1, text, raw)
			if inside = !ends; ends {
				flush()
			}
			continue
		}
		at := commentAt(raw, mark)
		if at < 0 || strings.HasPrefix(raw, "#!") {
			flush()
			continue
		}
		trailing := !strings.HasPrefix(line, mark)
		if trailing {
			flush()
		}
		add(i+1, strings.TrimLeft(raw[at:], "#/"), raw)
		if trailing {
			flush()
		}
	}
	flush()
	return blocks
}

// commentAt returns where a line's comment starts, or -1.
func commentAt(line, mark string) int {
	var quote byte
	for i := range len(line) {
		switch c := line[i]; {
		case quote != 0:
			if c == quote && line[i-1] != '\\' {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case strings.HasPrefix(line[i:], mark) && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t'):
			return i
		}
	}
	return -1
}

var item = regexp.MustCompile(`^\s*(?:[-*]|\d+\.)\s`)

// paragraphs cuts a block where a blank line or an item of a list begins.
func paragraphs(b block) (all []block) {
	start := 0
	cut := func(end int) {
		if end > start {
			all = append(all, block{b.line + start, b.text[start:end], b.raw[start:end], b.wraps})
		}
		start = end
	}
	for i, text := range b.text {
		if item.MatchString(text) || strings.TrimSpace(text) == "" {
			cut(i)
		}
	}
	cut(len(b.text))
	return all
}

var fenceLine = regexp.MustCompile("^\\s*(```|~~~)")

// markdown returns the paragraphs, headings, items and rows of a page, without its code.
func markdown(src string) (blocks []block) {
	var b block
	flush := func() {
		if len(b.text) > 0 {
			blocks = append(blocks, paragraphs(b)...)
		}
		b = block{}
	}
	fenced := false
	for i, line := range strings.Split(src, "\n") {
		row := strings.HasPrefix(strings.TrimSpace(line), "|")
		switch {
		case fenceLine.MatchString(line):
			flush()
			fenced = !fenced
		case fenced:
		case strings.HasPrefix(line, "    ") && len(b.text) == 0: // indented code
		case row, strings.HasPrefix(line, "#"):
			flush()
			cells := []string{line}
			if row {
				cells = strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
			}
			for _, cell := range cells {
				b = block{i + 1, []string{cell}, []string{line}, false}
				flush()
			}
		case strings.TrimSpace(line) == "":
			flush()
		default:
			if len(b.text) == 0 {
				b = block{line: i + 1, wraps: true}
			}
			b.text, b.raw = append(b.text, line), append(b.raw, line)
		}
	}
	flush()
	return blocks
}

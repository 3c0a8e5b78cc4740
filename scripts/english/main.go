// Command english checks the English of comments, names and documents. It checks those rules of
// CONTRIBUTING.md that a program can check.
//
//	go run ./scripts/english         # checks the rooms of scripts/english/rooms: make lint
//	go run ./scripts/english PATH…   # checks these files and folders, listed or not
//
// It prints one line per finding, as file:line: what, and exits with 1 if there is a finding.
// scripts/english/allow lists accepted findings, with the reason for each.
package main

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	n, err := run(os.Stdout, ".", os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "english:", err)
		os.Exit(2)
	}
	if n > 0 {
		fmt.Fprintf(os.Stderr, "english: %d findings; CONTRIBUTING.md has the rules\n", n)
		os.Exit(1)
	}
}

// run checks the given paths below root, or the rooms if there are none. It prints the findings to
// w and returns their number.
func run(w io.Writer, root string, paths []string) (int, error) {
	rooms, err := readList(filepath.Join(root, "scripts/english/rooms"))
	if err != nil {
		return 0, err
	}
	allowed, err := readAllow(filepath.Join(root, "scripts/english/allow"))
	if err != nil {
		return 0, err
	}
	var skip []string
	rooms = slices.DeleteFunc(rooms, func(r string) bool {
		out, no := strings.CutPrefix(r, "!")
		if no {
			skip = append(skip, out)
		}
		return no
	})
	if len(paths) == 0 {
		paths = rooms
	}
	n := 0
	checked := map[string]bool{}
	for _, p := range paths {
		files, err := filesOf(root, path.Clean(p), skip)
		if err != nil {
			return n, err
		}
		for _, file := range files {
			if checked[file] {
				continue
			}
			checked[file] = true
			b, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				return n, err
			}
			found, err := check(file, string(b))
			if err != nil {
				return n, err
			}
			for _, f := range found {
				if !allowed.accepts(file, f) {
					n++
					fmt.Fprintf(w, "%s:%s\n", file, f)
				}
			}
		}
	}
	for _, a := range allowed {
		if checked[a.file] && !a.used {
			n++
			fmt.Fprintf(w, "scripts/english/allow:%d: %s has no %q any more: remove this entry\n", a.line, a.file, a.phrase)
		}
	}
	return n, nil
}

// filesOf returns the files at or below p that can be checked. It leaves out foreign files and
// those to skip, but never p itself. It returns an error if p does not exist, so that a renamed
// room does not drop out of the check unnoticed.
func filesOf(root, p string, skip []string) (files []string, err error) {
	err = filepath.WalkDir(filepath.Join(root, p), func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		foreign := rel == "build" || rel == filepath.Join("internal", "third_party") || rel != p && slices.Contains(skip, rel)
		if d.IsDir() {
			if foreign || rel != "." && strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if !foreign && kindOf(rel) != "" {
			files = append(files, rel)
		}
		return nil
	})
	return files, err
}

// kindOf returns the language of a file by its name, or "" if its text is not checked. A file
// without an extension is a shell script if it is one of scripts/.
func kindOf(file string) string {
	switch ext := path.Ext(file); {
	case ext == ".go", ext == ".py", ext == ".md", ext == ".c", ext == ".sh":
		return ext
	case ext == ".h":
		return ".c"
	case path.Base(file) == "Makefile", ext == "" && path.Dir(file) == "scripts":
		return ".sh"
	}
	return ""
}

// readList returns the lines of a file without comments and blank lines.
func readList(file string) (lines []string, err error) {
	b, err := os.ReadFile(file)
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines, err
}

// entry accepts the findings of one file that contain a phrase.
type entry struct {
	file, phrase string
	line         int
	used         bool
}

type allowList []*entry

func (all allowList) accepts(file string, f finding) bool {
	for _, e := range all {
		if e.file == file && strings.Contains(f.what, e.phrase) {
			e.used = true
			return true
		}
	}
	return false
}

// readAllow reads lines of the form `FILE: PHRASE # REASON`.
func readAllow(file string) (all allowList, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		accepted, reason, _ := strings.Cut(text, " # ")
		name, phrase, ok := strings.Cut(accepted, ": ")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s:%d: got %q, want FILE: PHRASE # REASON", file, n, text)
		}
		all = append(all, &entry{file: name, phrase: strings.TrimSpace(phrase), line: n})
	}
	return all, lines.Err()
}

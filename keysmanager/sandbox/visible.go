package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Others is an account that no user of this machine has. Every account can reach the files that
// Others can reach.
var Others = Account{UID: -1, GID: -1}

// Visible returns an error if a process with c's account could not see or run the files that its
// start needs:
//   - the program
//   - the interpreter that the program's first line names
//   - the interpreter that made the program's virtual environment
//
// A missing program is no error, because it may be added later.
func (c Command) Visible() error {
	_, err := c.program(environment(c.Env, nil))
	if errors.Is(err, errNoProgram) {
		return nil
	}
	return err
}

// program returns the path of the program of a command with an account, and an error if the process
// cannot see it.
func (c Command) program(env []string) (string, error) {
	program := c.Args()[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(c.Dir, program)
	}
	// Look in the command's PATH, which may name folders that only this process can enter.
	program, err := find(program, env)
	if err != nil || !filepath.IsAbs(program) {
		return program, err
	}
	w := viewer{c: c, env: env}
	for _, p := range slices.Concat(c.Reads, c.Writes, []string{c.Dir}) {
		path, err := filepath.EvalSymlinks(p)
		if err != nil {
			return program, nil //nolint:nilerr // the start reports it
		}
		w.given = append(w.given, path)
	}
	return program, w.canRun(program, 0)
}

// viewer checks whether a process sees files.
type viewer struct {
	c     Command
	env   []string
	given []string // paths that the process sees, wherever they are
}

// Limits of the paths that a viewer follows.
const (
	maxInterpreters = 4  // as Linux does
	maxLinks        = 40 // as Linux does
)

// canRun checks a program and its interpreters.
func (w viewer) canRun(program string, depth int) error {
	file, err := w.sees(program)
	if err != nil || file == "" || depth > maxInterpreters {
		return err
	}
	if next := interpreter(file, w.env); next != "" {
		if err := w.canRun(next, depth+1); err != nil {
			return fmt.Errorf("the first line of %s: %w", program, err)
		}
	}
	if base := venvHome(program); base != "" {
		if _, err := w.sees(base); err != nil {
			return fmt.Errorf("the virtual environment of %s was made with another interpreter: %w", program, err)
		}
	}
	return nil
}

// sees follows a path link by link. It returns the file or folder at the end of the path, or an
// empty path if nothing exists there.
func (w viewer) sees(path string) (file string, err error) {
	at, rest, links := "/", parts(path), 0
	// cover is the last folder on the way that is empty for the process, or a file at the end that
	// it cannot open.
	cover := ""
	for len(rest) > 0 {
		at, rest = filepath.Join(at, rest[0]), rest[1:]
		info, err := os.Lstat(at)
		if err != nil {
			return "", nil //nolint:nilerr // the start reports it
		}
		switch under := cover != "" && within(at, cover); {
		case w.has(at):
			cover = ""
		case under && !w.leads(at):
			return "", unseen(path, at, cover)
		case !under && w.covers(at, info):
			cover = at
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			continue
		}
		target, err := os.Readlink(at)
		if links++; err != nil || links > maxLinks {
			return "", err
		}
		if at = filepath.Dir(at); filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(parts(target), rest...)
	}
	if at == cover {
		return "", unseen(path, at, cover)
	}
	return at, nil
}

// has reports whether a path is one of the given paths or below one.
func (w viewer) has(path string) bool {
	return slices.ContainsFunc(w.given, func(g string) bool { return path == g || within(path, g) })
}

// leads reports whether a given path is below a folder.
func (w viewer) leads(folder string) bool {
	return slices.ContainsFunc(w.given, func(g string) bool { return within(g, folder) })
}

// covers reports whether the process sees an empty folder in place of this folder, or cannot open
// this file.
func (w viewer) covers(path string, info fs.FileInfo) bool {
	if path == RunFolder || ownFolderAt(path) {
		return true
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && !passes(unix.Stat_t{Uid: st.Uid, Gid: st.Gid, Mode: st.Mode}, w.c.As)
}

// ownFolderAt reports whether each process has its own folder at a path, such as /tmp.
func ownFolderAt(path string) bool {
	return slices.ContainsFunc(privateFolders, func(o struct{ at, size string }) bool { return o.at == path })
}

// unseen returns the error for a path to a file or folder that a process does not see.
func unseen(path, at, cover string) error {
	if at != path && !within(path, at) {
		path += " leads to " + at
	}
	why := "functions do not see " + cover
	switch info, err := os.Stat(cover); {
	case ownFolderAt(cover):
		why = "functions have an empty " + cover + " of their own"
	case err == nil && cover != RunFolder:
		verb := "run"
		if info.IsDir() {
			verb = "enter"
		}
		why = fmt.Sprintf("functions run as users of their own, who cannot %s %s (%v)", verb, cover, info.Mode())
	}
	return fmt.Errorf("%s: %s; want it in a folder that every user of the machine can read, such as /opt", path, why)
}

// within reports whether a path is below a folder.
func within(path, folder string) bool {
	return strings.HasPrefix(path, strings.TrimSuffix(folder, "/")+"/")
}

// parts returns the names in a path. It keeps "..", because its meaning depends on the links before
// it.
func parts(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(p string) bool { return p == "" || p == "." })
}

// interpreter returns the program that a file's first line names, or "".
func interpreter(file string, env []string) string {
	words := strings.Fields(firstLine(file))
	switch {
	case len(words) == 0:
		return ""
	case filepath.Base(words[0]) != "env" || len(words) == 1:
		return words[0]
	}
	program, err := find(words[1], env)
	if err != nil || !filepath.IsAbs(program) { // an option or a variable of env
		return words[0]
	}
	return program
}

// firstLine returns the first line of a script, without the leading #!.
func firstLine(file string) string {
	f, err := openRegular(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	head := make([]byte, 256) // Linux reads no more
	n, _ := io.ReadFull(f, head)
	line, _, _ := bytes.Cut(head[:n], []byte("\n"))
	text, script := strings.CutPrefix(string(line), "#!")
	if !script {
		return ""
	}
	return text
}

// openRegular opens a file that a function names. It refuses files that are not regular: opening a
// pipe would wait for a writer, and opening a device may have effects.
func openRegular(file string) (*os.File, error) {
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is a %v, want a file", file, info.Mode().Type())
	}
	if err != nil {
		return nil, err
	}
	return os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// maxVenv bounds the description of a virtual environment, in bytes.
const maxVenv = 64 << 10

// venvHome returns the folder of the interpreter that a program's virtual environment was made
// with. It is empty if the program is in no virtual environment.
func venvHome(program string) string {
	f, err := openRegular(filepath.Join(filepath.Dir(filepath.Dir(program)), "pyvenv.cfg"))
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxVenv))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(line, "="); ok && strings.TrimSpace(name) == "home" {
			if home := strings.TrimSpace(value); filepath.IsAbs(home) {
				return home
			}
		}
	}
	return ""
}

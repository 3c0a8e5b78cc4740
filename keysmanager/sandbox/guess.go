package sandbox

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Guess is the program that an image's folder is probably made for.
type Guess struct {
	Process string // in the form of the variable fprocess; empty: nothing was guessed
	HTTP    bool   // its name says that it is a server, not a command
	Why     string // the reason, for messages
}

// tellingNames are names that mark a function's program. The last part of the image's name marks
// one, too.
var tellingNames = []string{"server", "main", "index", "handler", "app"}

// library matches the names of shared libraries, which are often executable files.
var library = regexp.MustCompile(`\.so(\.[0-9.]+)?$`)

// Guess guesses which program to run in the folder of an image without an executable ./stage.
// Candidates are the executables at the top of the folder, and Python programs with names in
// tellingNames. If there are several candidates, Guess takes the only one with a telling name. If
// no candidate or more than one has a telling name, the error names all candidates. Without
// candidates, the result is empty.
func (s Images) Guess(image string) (Guess, error) {
	folder, err := s.folder(image)
	if err != nil {
		return Guess{}, err
	}
	return GuessIn(folder, image)
}

// GuessIn does what [Images.Guess] does for an image whose files are in a folder elsewhere.
func GuessIn(folder, image string) (Guess, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return Guess{}, fmt.Errorf("image %q: %w", image, err)
	}
	if executable(filepath.Join(folder, Executable)) {
		return Guess{}, nil
	}
	var all, telling []string // processes
	repository, _, _ := strings.Cut(image, ":")
	names := append(slices.Clone(tellingNames), path.Base(repository))
	for _, e := range entries {
		process := candidate(folder, e.Name())
		if process == "" {
			continue
		}
		all = append(all, process)
		if slices.Contains(names, stem(process)) {
			telling = append(telling, process)
		}
	}
	why := "nothing else in its image's folder can be run"
	chosen := all
	if len(all) > 1 && len(telling) == 1 {
		chosen, why = telling, fmt.Sprintf("of %s, only its name marks a function's program", some(all))
	}
	switch len(chosen) {
	case 0:
		return Guess{}, nil
	case 1:
		return Guess{Process: chosen[0], HTTP: stem(chosen[0]) == "server", Why: why}, nil
	}
	return Guess{}, fmt.Errorf("its folder has several programs: %s", some(all))
}

// some lists processes in a message, and shortens a long list.
func some(processes []string) string {
	const most = 20
	text := strings.Join(processes[:min(len(processes), most)], ", ")
	if more := len(processes) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// candidate returns the command that runs a file of a folder. It returns nothing if the file is not
// a program.
func candidate(folder, name string) string {
	// Spaces separate the words of fprocess.
	if strings.HasPrefix(name, ".") || strings.ContainsAny(name, " \t\n") || library.MatchString(name) {
		return ""
	}
	file := filepath.Join(folder, name)
	if executable(file) && runnable(file) {
		return "./" + name
	}
	if script, ok := strings.CutSuffix(name, ".py"); ok && slices.Contains(tellingNames, script) {
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return "python3 " + name
		}
	}
	return ""
}

// runnable reports whether Linux can run a file by itself, judging by its first bytes.
func runnable(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	head := make([]byte, 4)
	n, _ := io.ReadFull(f, head) // a shorter file is no program
	return bytes.HasPrefix(head[:n], []byte("#!")) || bytes.Equal(head[:n], []byte("\x7fELF"))
}

// stem returns the name of a process's file without its extension.
func stem(process string) string {
	name := path.Base(strings.TrimPrefix(process, "python3 "))
	return strings.TrimSuffix(name, path.Ext(name))
}

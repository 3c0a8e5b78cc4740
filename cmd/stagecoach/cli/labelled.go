package cli

import (
	"cmp"
	"fmt"
	"mime"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// example is an input with the answer that is expected.
type example struct {
	name          string
	input, answer string // files
}

// The two layouts of a folder of examples: two folders, whose files have the same names except for
// their extensions, or pairs of files NAME.in and NAME.want.
const (
	inputsFolder, answersFolder = "inputs", "answers"
	inputEnd, answerEnd         = ".in", ".want"
)

// readExamples lists the examples of a folder, sorted by name. Each input needs an answer, and each
// answer an input.
func readExamples(folder string, least int) ([]example, error) {
	inputs, err := examplesIn(filepath.Join(folder, inputsFolder), "")
	var answers map[string]string
	where := [2]string{filepath.Join(folder, inputsFolder, "NAME"), filepath.Join(folder, answersFolder, "NAME")}
	if os.IsNotExist(err) {
		where = [2]string{filepath.Join(folder, "NAME"+inputEnd), filepath.Join(folder, "NAME"+answerEnd)}
		if inputs, err = examplesIn(folder, inputEnd); err == nil {
			answers, err = examplesIn(folder, answerEnd)
		}
	} else if err == nil {
		answers, err = examplesIn(filepath.Join(folder, answersFolder), "")
	}
	if err != nil {
		return nil, fmt.Errorf("profile: --accuracy: %w", err)
	}
	if len(inputs)+len(answers) == 0 {
		return nil, fmt.Errorf("profile: --accuracy %s: no inputs, want files %s/NAME.EXT and %s/NAME.EXT in it, or NAME%s and NAME%s",
			folder, inputsFolder, answersFolder, inputEnd, answerEnd)
	}
	var out []example
	for name, file := range inputs {
		if answers[name] == "" {
			return nil, fmt.Errorf("profile: input %s has no answer, want it in %s", file, strings.Replace(where[1], "NAME", name, 1))
		}
		out = append(out, example{name, file, answers[name]})
	}
	for name, file := range answers {
		if inputs[name] == "" {
			return nil, fmt.Errorf("profile: answer %s has no input, want it in %s", file, strings.Replace(where[0], "NAME", name, 1))
		}
	}
	if len(out) < least {
		return nil, fmt.Errorf("profile: --accuracy %s: %d inputs, want at least %d (--min)", folder, len(out), least)
	}
	slices.SortFunc(out, func(a, b example) int { return cmp.Compare(a.name, b.name) })
	return out, nil
}

// examplesIn returns the files of a folder by their names, without end. If end is empty, it takes
// all files, without their extensions. Hidden files and folders do not count.
func examplesIn(folder, end string) (map[string]string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, e := range entries {
		file := filepath.Join(folder, e.Name())
		name, ok := strings.CutSuffix(e.Name(), cmp.Or(end, filepath.Ext(e.Name())))
		if e.IsDir() || name == "" || strings.HasPrefix(name, ".") || end != "" && !ok {
			continue
		}
		if other := out[name]; other != "" {
			return nil, fmt.Errorf("%s and %s have one name, want each name once", other, file)
		}
		out[name] = file
	}
	return out, nil
}

// typeOf returns the content type of an input: by its file's extension, or by its content.
func typeOf(body []byte, file string) string {
	if t := mime.TypeByExtension(filepath.Ext(file)); t != "" && filepath.Ext(file) != inputEnd {
		return t
	}
	return guessType(body, file)
}

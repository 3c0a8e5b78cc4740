package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// folderOf creates a folder with these files.
func folderOf(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, f := range files {
		path := filepath.Join(dir, f)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(f), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestExamples reads both layouts of labelled inputs, and refuses folders whose files do not match.
func TestExamples(t *testing.T) {
	for want, files := range map[string][]string{
		"a b.c": {"b.c.in", "b.c.want", "a.in", "a.want", "README.md", ".hidden.in"},
		"x y.z": {"inputs/x.png", "inputs/y.z.json", "answers/x.txt", "answers/y.z.txt", "inputs/.hidden"},
	} {
		var names []string
		dir := folderOf(t, files...)
		all, err := readExamples(dir, 2)
		for _, e := range all {
			names = append(names, e.name)
			if filepath.Dir(e.input) == filepath.Dir(e.answer) != (filepath.Dir(e.input) == dir) {
				t.Errorf("%+v in %s", e, dir)
			}
		}
		if got := strings.Join(names, " "); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", files, got, err, want)
		}
	}
	for want, files := range map[string][]string{
		"no inputs, want files inputs/NAME.EXT":       {"readme"},
		"/a.in has no answer, want it in ":            {"a.in", "b.in", "b.want"},
		"/b.want has no input, want it in ":           {"a.in", "a.want", "b.want"},
		"/inputs/a.png has no answer":                 {"inputs/a.png", "answers/b.txt"},
		"1 inputs, want at least 2 (--min)":           {"a.in", "a.want"},
		"/inputs/a.png have one name, want each name": {"inputs/a.jpg", "inputs/a.png", "answers/a.txt"},
		"/answers: no such file or directory":         {"inputs/a.jpg"},
	} {
		if _, err := readExamples(folderOf(t, files...), 2); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", files, err, want)
		}
	}
}

// TestScorerProgram runs programs that score, fail, and print no score.
func TestScorerProgram(t *testing.T) {
	dir := folderOf(t, "want", "got")
	for script, want := range map[string]string{
		`test "$(cat "$1")" = want && test "$(cat "$2")" = got && echo " 0.25"`: "",
		"echo it broke >&2; exit 3": "exit status 3: it broke",
		"echo 1.5":                  `printed "1.5\n", want a number from 0 to 1`,
		"echo NaN":                  "want a number from 0 to 1",
	} {
		program := filepath.Join(t.TempDir(), "scorer")
		//nolint:gosec // it is a program
		if err := os.WriteFile(program, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		v, err := runScorer(t.Context(), program, filepath.Join(dir, "want"), filepath.Join(dir, "got"))
		if want == "" && (err != nil || v != 0.25) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, %v, want %q", script, v, err, want)
		}
	}
}

// TestProfileFlagsOfAccuracy checks which flags go together.
func TestProfileFlagsOfAccuracy(t *testing.T) {
	for args, want := range map[string]string{
		"f --accuracy x --cpu 1":  "--cpu and --accuracy, want one of them",
		"f --accuracy x --show":   "--show and --accuracy",
		"f --scorer cer":          "--scorer without --accuracy FOLDER",
		"f --accuracy x --min 0":  "--min 0, want at least 1",
		"f --accuracy x --min -1": "--min -1",
	} {
		if _, err := parseProfile(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	if f, err := parseProfile(strings.Fields("f --accuracy x --scorer cer --content-type a/b")); err != nil || f.accuracy.folder != "x" || f.contentType != "a/b" {
		t.Errorf("%+v, %v", f, err)
	}
}

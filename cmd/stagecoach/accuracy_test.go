package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/accuracy"
)

// edits returns a stage that edits its input with sed. It speaks HTTP through the watchdog.
func edits(name, script string, annotations map[string]string) fn {
	return fn{name, "echo-http", one(), annotations, map[string]string{"fprocess": "sed " + script, "mode": "streaming"}}
}

// TestAccuracyOfVariantsAndChains measures two stages with a variant each, and the four chains. A
// variant's answers are wrong for inputs with a certain digit, so all accuracies are known.
func TestAccuracyOfVariantsAndChains(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(
		edits("find", "s/z/z/", map[string]string{"pipeline": "ocr", "next": "read"}),
		edits("find-small", "s/1/x/", map[string]string{"variant-of": "find"}), // wrong in 2 of 10
		edits("read", "s/z/z/", map[string]string{"pipeline": "ocr"}),
		edits("read-small", "s/2/x/", map[string]string{"variant-of": "read"}), // wrong in 3 of 10
	)
	folder := t.TempDir()
	for i, text := range []string{"1a", "1b", "2a", "2b", "2c", "3a", "3b", "3c", "3d", "3e"} {
		for _, end := range []string{"in", "want"} {
			if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%d.%s", i, end)), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	c := &operator{t, t.TempDir(), r.Base}
	c.run(`(?m)^find +find +1, as nobody has stated or measured it\nfind +find-small +1, as .*\nread +read +1, as .*
read +read-small +1, as .*

CHAIN +ACCURACY +FROM
find → read +1 +measured by exact, n 10, 0\.7225 to 1
find → read-small +0\.7 +measured by exact, n 10, 0\.3968 to 0\.8922
find-small → read +0\.8 +measured by exact, n 10, 0\.4902 to 0\.9433
find-small → read-small +0\.5 +measured by exact, n 10, 0\.2366 to 0\.7634`, "", "profile", "ocr", "--accuracy", folder, "--min", "10")
	c.run(`(?m)^find → read-small +0\.7 +measured by exact, n 10`, "", "pipeline", "describe", "ocr")

	// The functions of a stage, with a command that scores.
	scorer := filepath.Join(t.TempDir(), "half")
	//nolint:gosec // it is a program
	if err := os.WriteFile(scorer, []byte("#!/bin/sh\ncmp -s \"$1\" \"$2\" && echo 1 || echo 0.5\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.run(`(?m)^find +find +1, measured by command=\S+ on 10 inputs, .*\nfind +find-small +0\.9, measured by .*on 10 inputs, 95 % interval 0\.7492 to 1`, "", "profile", "find", "--accuracy", folder, "--min", "10", "--scorer", "command="+scorer)
	c.run(`(?m)^Accuracy: +0\.9, measured by command=`, "", "describe", "find-small")

	// Nothing is stored if something is wrong, and errors name the files.
	c.refuse(`profile: --accuracy .*: 10 inputs, want at least 20 \(--min\)`, "", "profile", "ocr", "--accuracy", folder)
	c.refuse(`answer to .*/\d\.in, against .*/\d\.want: expected answer: no JSON`, "", "profile", "find", "--accuracy", folder, "--min", "1", "--scorer", "cosine")
	if err := os.Remove(filepath.Join(folder, "7.want")); err != nil {
		t.Fatal(err)
	}
	c.refuse(`input .*/7\.in has no answer, want it in .*/7\.want`, "", "profile", "ocr", "--accuracy", folder)
	r.must(http.StatusBadRequest, http.MethodPut, "/system/accuracy/find", `{"version":1,"images":{"find":{"image":"stagecoach/echo-http:0.1.0"}},"functions":[{"functions":["find"],"scorer":"exact","n":10,"mean":1.2,"low":0,"high":1}]}`)
	var sheet accuracy.Sheet
	if err := r.Get(t.Context(), "/system/accuracy/find", &sheet); err != nil || sheet.Functions[0].Accuracy != 1 || sheet.Functions[0].Measured == nil {
		t.Errorf("%+v, %v, want what was measured", sheet, err)
	}
}

// Package golden compares results of tests with golden files in the folder testdata. A series, a
// report or a drawing is easier to review as a file than to check in code. The package adds the
// flag -rewrite to each test that imports it; with the flag, the test writes its golden files.
//
//	golden.Compare(t, "step.txt", series)
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write golden files again; commit them only if you can say why each line moved")

// Rewriting reports whether -rewrite is set. If it is, tests may also rewrite the sources of golden
// files.
func Rewriting() bool { return *rewrite }

// Compare fails t at the first line in which got differs from the named file in testdata. With
// -rewrite, it writes the file.
func Compare(t testing.TB, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil { //nolint:gosec // it is committed
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; `go test -rewrite` in this package writes it", err)
	}
	want := string(text)
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	i := 0
	for i < min(len(g), len(w)) && g[i] == w[i] {
		i++
	}
	line := func(lines []string) string { return slices.Concat(lines, []string{"(the end)"})[i] }
	t.Errorf("%s, line %d:\n got %s\nwant %s\nSee `go test -rewrite` in this package, and commit only if you can say why each line moved.", file, i+1, line(g), line(w))
}

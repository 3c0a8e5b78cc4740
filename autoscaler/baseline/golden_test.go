package baseline

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the golden series anew; commit them only if you can say why each line moved")

// golden compares a series with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	g, w := strings.Split(got, "\n"), strings.Split(string(text), "\n")
	for i := range max(len(g), len(w)) {
		if i >= len(g) || i >= len(w) || g[i] != w[i] {
			t.Fatalf("%s, line %d:\n got %s\nwant %s\nSee `go test ./autoscaler/baseline -rewrite`, and commit only if you can say why each line moved.",
				file, i+1, append(g, "")[min(i, len(g))], append(w, "")[min(i, len(w))])
		}
	}
}

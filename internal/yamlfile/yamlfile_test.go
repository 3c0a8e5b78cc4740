package yamlfile

import (
	"strings"
	"testing"
)

// TestAliasesAreBounded reads a small file whose aliases stand for a billion values.
func TestAliasesAreBounded(t *testing.T) {
	type point struct {
		N int `yaml:"n"`
	}
	type list struct {
		Points []point `yaml:"points"`
	}
	var file struct {
		One   point  `yaml:"one"`
		Few   list   `yaml:"few"`
		Lists []list `yaml:"lists"`
	}
	text := "one: &p {n: 1}\nfew: &l {points: [" + strings.Repeat("*p, ", 999) + "*p]}\nlists: [" + strings.Repeat("*l, ", 999) + "*l]\n"
	err := Read(strings.NewReader(text), "test", "a mapping", &file)
	if err == nil || !strings.Contains(err.Error(), "more than 262144 values") || len(err.Error()) > 1000 {
		t.Errorf("got %.2000v, want the bound, once", err)
	}
	if file.One.N != 1 || len(file.Few.Points) != 1000 {
		t.Errorf("got %d and %d points, want what is within the bound", file.One.N, len(file.Few.Points))
	}
}

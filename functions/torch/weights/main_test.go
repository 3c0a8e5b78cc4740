package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

func TestRunWritesOneFilePerStage(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	var out strings.Builder
	if err := run(t.Context(), []string{"--stages", "3", "--stage-size", "2M", "--dtype", "BF16", dir}, &out); err != nil {
		t.Fatal(err)
	}
	m, err := safetensors.Inspect(dir)
	if err != nil || len(m.Parts) != 3 || m.Data < 5.9e6 || m.Data > 6.5e6 {
		t.Errorf("%d files of %d bytes, %v, want three of 2 MB", len(m.Parts), m.Data, err)
	}
	for want, args := range map[string][]string{
		"0 arguments":      nil,
		`"8X", want bytes`: {"--stage-size", "8X", dir},
		`"-1", want bytes`: {"--stage-size", "-1", dir},
		`"NaN", want`:      {"--stage-size", "NaN", dir},
		"0 stages":         {"--stages", "0", dir},
		`dtype "F16"`:      {"--dtype", "F16", dir},
	} {
		if err := run(t.Context(), args, &out); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q in it", args, err, want)
		}
	}
}

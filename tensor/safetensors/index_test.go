package safetensors

import (
	"path/filepath"
	"testing"
)

func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":6},"weight_map":{"a":"1.safetensors","b":"1.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../1.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		names, index, err := parseIndex(b)
		if err != nil {
			return
		}
		for _, file := range index {
			if file != filepath.Base(file) || !filepath.IsLocal(file) || len(names) == 0 || len(names) > len(index) {
				t.Fatalf("file %q of %q", file, names)
			}
		}
	})
}

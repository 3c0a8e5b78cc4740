package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image"
)

func TestRetag(t *testing.T) {
	for _, tc := range [][3]string{
		{"example/a:1", "", "example/a:1"},
		{"example/a:1", "2", "example/a:2"},
		{"", "2", ""},
		{"10.0.0.7:5000/a", "2", "10.0.0.7:5000/a:2"},
		{"10.0.0.7:5000/a:1", "2", "10.0.0.7:5000/a:2"},
		{"example/a@sha256:0123", "2", "example/a:2"},
		{"example/a:1@sha256:0123", "2", "example/a:2"},
	} {
		if got := retag(tc[0], tc[1]); got != tc[2] {
			t.Errorf("retag(%q, %q) = %q, want %q", tc[0], tc[1], got, tc[2])
		}
	}
}

func TestASaveThatFailsLeavesTheFile(t *testing.T) {
	store, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	file := filepath.Join(t.TempDir(), "images.tar")
	if err := os.WriteFile(file, []byte("of before"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := destination{store: store}
	if err := d.save(t.Context(), file, []built{{Image: "example/none:1"}}); err == nil {
		t.Error("an image that is not there was saved")
	}
	b, err := os.ReadFile(file)
	entries, err2 := os.ReadDir(filepath.Dir(file))
	if err != nil || err2 != nil || string(b) != "of before" || len(entries) != 1 {
		t.Errorf("%q, %v, %v, %v", b, entries, err, err2)
	}
}

func TestNothingBuiltAsJSON(t *testing.T) {
	var out strings.Builder
	if err := printBuilt(nil, true, &out); err != nil || out.String() != "[]\n" {
		t.Errorf("%v, printed %q, want an empty list", err, out.String())
	}
}

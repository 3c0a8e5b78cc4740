package image

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestCollectSharedLayers checks that a layer stays as long as an image has the layer, and that
// removing the layer frees its bytes.
func TestCollectSharedLayers(t *testing.T) {
	s, filled := store(t, t.TempDir()), 0
	l := site(t, s, "a", library, &filled)
	for _, n := range []string{"one:1", "two:1"} {
		rootOf(t, s, add(t, s, over(t, l, n), n))
	}
	collect := func() int64 {
		t.Helper()
		n, err := s.Collect(t.Context(), nil, -time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	remove := func(name string) {
		t.Helper()
		if err := s.Remove(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	remove("one:1")
	if n := collect(); n >= int64(len(library)) {
		t.Errorf("freed %d bytes, although an image has the layer", n)
	}
	if site(t, s, "a", library, &filled); filled != 1 {
		t.Error("the layer of an image was removed")
	}
	remove("two:1")
	if n := collect(); n < int64(len(library)) {
		t.Errorf("freed %d bytes, want the layer's %d", n, len(library))
	}
	for _, kind := range []string{"layers", "keys", "roots", "tmp"} {
		if left := tree(t, s.path(kind)); len(left) > 0 {
			t.Errorf("%s: left are %v", kind, left)
		}
	}
	if n, err := s.Collect(t.Context(), nil, time.Hour); n != 0 || err != nil {
		t.Errorf("freed %d, %v", n, err)
	}
	site(t, s, "a", library, &filled)
	if n, err := s.Collect(t.Context(), nil, time.Hour); n > 4096 || err != nil {
		t.Errorf("freed %d, %v of a new layer", n, err)
	}
}

// TestCollectKeepsLayersOfFolders checks an image that is a folder. It has links to a layer's
// files, and no index lists it. The folder's next build finds the layer.
func TestCollectKeepsLayersOfFolders(t *testing.T) {
	dir, filled := t.TempDir(), 0
	s := store(t, filepath.Join(dir, "store"))
	folder := filepath.Join(dir, "image")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := site(t, s, "a", library, &filled).LinkInto(t.Context(), folder); err != nil {
		t.Fatal(err)
	}
	collect := func() {
		t.Helper()
		if _, err := s.Collect(t.Context(), nil, -time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	collect()
	if site(t, s, "a", library, &filled); filled != 1 {
		t.Error("the layer of a folder was removed")
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	collect()
	if left := tree(t, s.path("layers")); len(left) > 0 {
		t.Errorf("no folder has the layer: left are %v", left)
	}
}

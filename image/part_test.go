package image

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestArchiveFromAnyOffset reads the generated archive of a layer from many offsets. It must have
// the bytes that layer.write writes.
func TestArchiveFromAnyOffset(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, size := range map[string]int{"a": 0, "b/one": 1, "b/block": 512, "c/" + strings.Repeat("long", 50) + "/x": 1300, "d": 100_000} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		b := bytes.Repeat([]byte(name[:1]), size)
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("b/one", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	l := &layer{}
	if err := walkTree(dir, func(e entry) error { l.entries = append(l.entries, e); return nil }); err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	if err := l.write(&want); err != nil {
		t.Fatal(err)
	}
	a, err := newArchived(l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if a.size() != int64(want.Len()) {
		t.Fatalf("the archive has %d bytes, want %d", a.size(), want.Len())
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		from := random.IntN(want.Len() + 1)
		if _, err := a.Seek(int64(from), io.SeekStart); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(a)
		if err != nil || !bytes.Equal(got, want.Bytes()[from:]) {
			t.Fatalf("from byte %d: %d bytes, %v, want the last %d of the archive", from, len(got), err, want.Len()-from)
		}
	}
}

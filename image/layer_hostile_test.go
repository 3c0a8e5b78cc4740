package image

import (
	"archive/tar"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// claims makes an image of archives that are each marked as a shared layer.
func claims(t *testing.T, layers ...[]byte) *Image {
	t.Helper()
	var adds []mutate.Addendum
	for _, l := range layers {
		adds = append(adds, mutate.Addendum{Layer: uncompressed{static.NewLayer(l, types.OCIUncompressedLayer)}, History: v1.History{CreatedBy: createdBy, Comment: packagesOf + " torch"}})
	}
	img, err := mutate.ConfigFile(mutate.MediaType(empty.Image, types.OCIManifestSchema1), &v1.ConfigFile{OS: "linux", Architecture: "amd64"})
	if err == nil {
		img, err = mutate.Append(img, adds...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &Image{img}
}

type uncompressed struct{ v1.Layer }

func (u uncompressed) DiffID() (v1.Hash, error)             { return u.Digest() }
func (u uncompressed) Uncompressed() (io.ReadCloser, error) { return u.Compressed() }

// ours changes a header to the form that Pack writes.
func ours(h tar.Header) tar.Header {
	h.ModTime = time.Unix(0, 0)
	return h
}

// TestLayersThatOnlyClaimToBeShared checks that layers with a false mark are stored and unpacked
// like any other layer. True shared layers are shared, also below layers with whiteouts.
func TestLayersThatOnlyClaimToBeShared(t *testing.T) {
	good := archive(t, ours(dir("p/")), ours(file("p/a", "a")), ours(file("p/b", "b")))
	hidden := archive(t, ours(dir("p/")), ours(file("p/.wh.a", "")), ours(file("p/c", "c")))
	for name, tc := range map[string]struct {
		layers [][]byte
		shared int
		want   string // files
	}{
		"what it claims":     {[][]byte{good}, 1, "p p/a p/b"},
		"a whiteout over it": {[][]byte{good, hidden}, 1, "p p/b p/c"},
		"opaque":             {[][]byte{good, archive(t, ours(file("p/.wh..wh..opq", "")), ours(file("p/c", "c")))}, 1, "p p/c"},
		// The second lacks its folder.
		"a file over it":        {[][]byte{good, archive(t, ours(file("p/a", "other")))}, 1, "p p/a p/b"},
		"a hard link":           {[][]byte{archive(t, ours(file("a", "a")), ours(hard("b", "a")))}, 0, "a b"},
		"times":                 {[][]byte{archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Mode: 0o644, ModTime: time.Unix(5, 0)})}, 0, "a"},
		"an owner":              {[][]byte{archive(t, ours(tar.Header{Typeflag: tar.TypeReg, Name: "a", Mode: 0o644, Uid: 7}))}, 0, "a"},
		"written to by anybody": {[][]byte{archive(t, ours(tar.Header{Typeflag: tar.TypeReg, Name: "a", Mode: 0o666}))}, 0, "a"},
		"another order":         {[][]byte{archive(t, ours(file("b", "b")), ours(file("a", "a")))}, 0, "a b"},
		"bytes behind its end":  {[][]byte{append(archive(t, ours(file("a", "a"))), "more"...)}, 0, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			s := store(t, t.TempDir())
			root := rootOf(t, s, add(t, s, claims(t, tc.layers...), "x:1"))
			var got []string
			if err := filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
				if rel, _ := filepath.Rel(root, p); rel != "." {
					got = append(got, rel)
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if strings.Join(got, " ") != tc.want {
				t.Errorf("unpacked %v, want %s", got, tc.want)
			}
			layers, err := os.ReadDir(s.path("layers"))
			if err != nil || len(layers) != tc.shared {
				t.Errorf("%d shared layers, %v, want %d", len(layers), err, tc.shared)
			}
			if left := tree(t, s.path("tmp")); len(left) > 0 {
				t.Errorf("left are %v", left)
			}
		})
	}
}

// TestHostileSharedLayers checks that hostile layers leave nothing behind, and reach no file
// outside.
func TestHostileSharedLayers(t *testing.T) {
	many := []tar.Header{}
	for i := range 20 {
		many = append(many, ours(file("f"+string(rune('a'+i)), "x")))
	}
	for name, tc := range map[string]struct {
		layers [][]byte
		want   string
	}{
		"a way out": {[][]byte{archive(t, ours(file("../x", "x")))}, "a name with .."},
		// The link stays inside the root.
		"through a link":         {[][]byte{archive(t, ours(link("a", "/etc")), ours(file("a/x", "x")))}, ""},
		"more files than all":    {[][]byte{archive(t, many[:8]...), archive(t, many[8:16]...)}, "more files than an image may have"},
		"more bytes than all":    {[][]byte{archive(t, ours(file("a", strings.Repeat("x", 60<<10)))), archive(t, ours(file("b", strings.Repeat("x", 60<<10))))}, "more than 100000 bytes"},
		"an archive that is not": {[][]byte{[]byte("no archive")}, "archive: "},
	} {
		t.Run(name, func(t *testing.T) {
			s := store(t, t.TempDir())
			s.limits = limits{entries: 12, bytes: 100_000}
			_, err := s.Add(t.Context(), claims(t, tc.layers...), "x:1")
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if left := tree(t, s.path("tmp")); len(left) > 0 {
				t.Errorf("left are %v", left)
			}
		})
	}
	s, filled := store(t, t.TempDir()), 0
	l := site(t, s, "a", library, &filled)
	img := over(t, l, "one")
	s.limits.bytes = int64(len(library)) // linked files count, too
	if _, err := s.Root(t.Context(), add(t, store(t, t.TempDir()), img, "one:1")); err == nil {
		t.Error("an image of another store has a root")
	}
	if _, err := s.Add(t.Context(), img, "one:1"); err == nil || !strings.Contains(err.Error(), "layers of more than") {
		t.Errorf("a shared layer over the limit: %v", err)
	}
}

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/flight"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// archive makes a layer of headers. The content of a file is its Linkname.
func archive(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		content := ""
		if e.Typeflag == tar.TypeReg {
			content, e.Linkname = e.Linkname, ""
			e.Size = int64(len(content))
		}
		if e.Mode == 0 {
			e.Mode = 0o755
		}
		if err := w.WriteHeader(&e); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func file(name, content string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Linkname: content, Mode: 0o644}
}
func dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
func link(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
}

func hard(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
}

// unpack unpacks layers into one folder, and returns its entries.
func unpack(t testing.TB, l limits, layers ...[]byte) (string, error) {
	t.Helper()
	top := t.TempDir()
	for _, d := range []string{"root", "shared"} {
		if err := os.Mkdir(filepath.Join(top, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(filepath.Join(top, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	u := newUnpacker(context.Background(), root, filepath.Join(top, "shared"), l)
	for _, b := range layers {
		if _, err := u.layer(bytes.NewReader(b)); err != nil {
			return filepath.Join(top, "root"), err
		}
	}
	return filepath.Join(top, "root"), u.finish()
}

func TestUnpack(t *testing.T) {
	for name, tc := range map[string]struct {
		layers [][]byte
		want   map[string]string
	}{
		"later layers are above": {
			[][]byte{
				archive(t, dir("./"), dir("a/"), file("a/f", "old"), file("b", "b"), dir("c"), file("c/x", "x")),
				archive(t, file("a/f", "new"), file("c", "a file now"), dir("b")),
			},
			map[string]string{"a": "drwxr-xr-x", "a/f": "-rw-r--r-- new", "b": "drwxr-xr-x", "c": "-rw-r--r-- a file now"},
		},
		"whiteouts": {
			[][]byte{
				archive(t, file("a/f", "1"), file("a/g", "1"), file("o/x", "1"), file("o/y/z", "1"), file("n", "1")),
				archive(t, file("a/.wh.f", ""), file("o/new", "2"), file("o/.wh..wh..opq", ""), file("o/y/mine", "2"), file(".wh.n", ""), file(".wh.never", ""), file("no/such/.wh.x", ""), file(".wh..wh.plnk", "")),
			},
			map[string]string{"a": "drwxr-xr-x", "a/g": "-rw-r--r-- 1", "o": "drwxr-xr-x", "o/new": "-rw-r--r-- 2", "o/y": "drwxr-xr-x", "o/y/mine": "-rw-r--r-- 2"},
		},
		"a whiteout does not hide its own layer": {
			[][]byte{archive(t, file("f", "1")), archive(t, file("f", "2"), file(".wh.f", ""))},
			map[string]string{"f": "-rw-r--r-- 2"},
		},
		"links stay in the image": {
			[][]byte{archive(t, dir("run"), link("var/run", "/run"), link("up", "../../.."), file("var/run/pid", "1"), file("up/etc/x", "2"), hard("h", "/run/pid"), link("abs", "/etc/passwd"))},
			map[string]string{
				"run": "drwxr-xr-x", "run/pid": "-rw-r--r-- 1", "var": "drwxr-xr-x", "var/run": "Lrwxrwxrwx -> /run", "up": "Lrwxrwxrwx -> ../../..",
				"etc": "drwxr-xr-x", "etc/x": "-rw-r--r-- 2", "h": "-rw-r--r-- 1", "abs": "Lrwxrwxrwx -> /etc/passwd",
			},
		},
		"a link is replaced, not followed": {
			[][]byte{archive(t, file("target", "1"), link("l", "/target")), archive(t, file("l", "2"))},
			map[string]string{"target": "-rw-r--r-- 1", "l": "-rw-r--r-- 2"},
		},
		"a link in a folder's place": {
			[][]byte{
				archive(t, dir("a"), tar.Header{Typeflag: tar.TypeDir, Name: "a/x", Mode: 0o700}, dir("b"), dir("b/x")), archive(t, link("a", "/b")),
			},
			map[string]string{"a": "Lrwxrwxrwx -> /b", "b": "drwxr-xr-x", "b/x": "drwxr-xr-x"},
		},
		"no rights, no devices": {
			[][]byte{archive(t,
				tar.Header{Typeflag: tar.TypeReg, Name: "su", Linkname: "x", Mode: 0o6755}, tar.Header{Typeflag: tar.TypeChar, Name: "dev/mem", Devmajor: 1, Devminor: 1},
				tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}, tar.Header{Typeflag: tar.TypeDir, Name: "tmp", Mode: 0o1777}, tar.Header{Typeflag: tar.TypeDir, Name: "closed", Mode: 0o50}, file("closed/f", "1"),
			)},
			map[string]string{"su": "-rwxr-xr-x x", "dev": "drwxr-xr-x", "tmp": "dtrwxrwxrwx", "closed": "drwxr-x---", "closed/f": "-rw-r--r-- 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, err := unpack(t, defaultLimits, tc.layers...)
			if err != nil {
				t.Fatal(err)
			}
			if got := tree(t, root); !maps.Equal(got, tc.want) {
				t.Errorf("got  %v\nwant %v", got, tc.want)
			}
		})
	}
}

func TestUnpackRefuses(t *testing.T) {
	small := limits{entries: 5, bytes: 100}
	whole := archive(t, file("f", strings.Repeat("x", 50)))
	for name, tc := range map[string]struct {
		layer []byte
		want  string
	}{
		"dots":               {archive(t, file("../f", "x")), "a name with .."},
		"dots inside":        {archive(t, file("a/../../f", "x")), "a name with .."},
		"a link out of it":   {archive(t, hard("f", "../../etc/passwd")), "a name with .."},
		"whiteout of dots":   {archive(t, file("a/f", "x"), file("a/.wh...", "")), "without a name"},
		"whiteout of itself": {archive(t, file("a/f", "x"), file("a/.wh..", "")), "without a name"},
		"the root":           {archive(t, file("./.", "x")), "root"},
		"a circle":           {archive(t, link("a", "b"), link("b", "a"), file("a/f", "x")), "links on the way"},
		"through a file":     {archive(t, file("f", "x"), file("f/g", "x")), "want a folder"},
		"a link to nothing":  {archive(t, hard("f", "nosuch")), "no such file"},
		"many files":         {archive(t, file("1", ""), file("2", ""), file("3", ""), file("4", ""), file("5", ""), file("6", "")), "more files"},
		"many folders":       {archive(t, file("1/2/3/4/5/6/7/8", "")), "more folders"},
		"big":                {archive(t, file("f", strings.Repeat("x", 101))), "more than an image may have"},
		"big together":       {archive(t, file("f", strings.Repeat("x", 60)), file("g", strings.Repeat("x", 60))), "more than an image may have"},
		"a long name":        {archive(t, file(strings.Repeat("a/", 3000)+"f", "")), "want at most 4096"},
		"something new":      {archive(t, tar.Header{Typeflag: tar.TypeCont, Name: "x"}), "want files, folders and links"},
		"cut off":            {whole[:530], "unexpected EOF"},
		"no archive":         {bytes.Repeat([]byte("x"), 1024), "archive: "},
		"an endless end":     {append(whole, make([]byte, 1<<20)...), ""},
	} {
		t.Run(name, func(t *testing.T) {
			root, err := unpack(t, small, tc.layer)
			if tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
			if beside := tree(t, filepath.Dir(root)); beside["f"] != "" {
				t.Errorf("it got out: %v", beside)
			}
		})
	}
}

// FuzzUnpack checks that no archive writes outside the folder, or follows a link out of it.
func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, dir("a"), file("a/f", "x"), link("l", "../outside"), file("l/x", "y")))
	f.Add(archive(f, link("a", "/../../outside"), hard("b", "a"), file("b/x", "y"), file("a/.wh..wh..opq", "")))
	f.Add(archive(f, file(".wh.a", ""), link("..a", ".."), file("..a/outside/x", "")))
	f.Fuzz(func(t *testing.T, layer []byte) {
		top := t.TempDir()
		for _, d := range []string{"root", "shared", "outside"} {
			if err := os.Mkdir(filepath.Join(top, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		root, err := os.OpenRoot(filepath.Join(top, "root"))
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		u := newUnpacker(t.Context(), root, filepath.Join(top, "shared"), limits{entries: 100, bytes: 1 << 20})
		if _, err := u.layer(bytes.NewReader(layer)); err == nil {
			_ = u.finish()
		}
		if len(tree(t, filepath.Join(top, "outside"))) > 0 {
			t.Fatal("it wrote outside")
		}
		entries, err := os.ReadDir(top)
		if err != nil || len(entries) != 3 {
			t.Fatalf("beside the root: %v, %v", entries, err)
		}
		_ = filepath.WalkDir(filepath.Join(top, "root"), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type()&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket) != 0 {
				t.Errorf("%s is a %v", path, d.Type())
			}
			return nil
		})
	})
}

// TestBigFilesAreShared compares the inodes of two images with one model.
func TestBigFilesAreShared(t *testing.T) {
	s := store(t, t.TempDir())
	inode := func(c Config) uint64 {
		t.Helper()
		r, err := s.Root(t.Context(), add(t, s, packed(t, folder(t), c), ""))
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(filepath.Join(r.Dir, "model/m.onnx"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Ino
	}
	if a, b := inode(Config{User: "1"}), inode(Config{User: "2"}); a != b {
		t.Errorf("inodes %d and %d, want one", a, b)
	}
}

// TestFailedWritesLeaveNothing checks a full disk, corrupt blobs, a closed store, and a folder that
// changes while it is packed.
func TestFailedWritesLeaveNothing(t *testing.T) {
	t.Run("disk full", func(t *testing.T) {
		small := proctest.Disk(t, "6m")
		s := store(t, small)
		// The blobs fit, but not the unpacked files.
		d := add(t, s, packed(t, folder(t), stageConfig), "fits:1")
		if _, err := s.Root(t.Context(), d); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "disk of "+small+" has ") {
			t.Errorf("unpack: %v, want the full disk", err)
		}
		big := folder(t)
		put(t, big, map[string]string{"other.onnx": model + "x"})
		if _, err := s.Add(t.Context(), packed(t, big, stageConfig), "big:1"); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("add: %v, want the full disk", err)
		}
		if _, err := s.Resolve("big:1"); !errors.Is(err, ErrNoImage) {
			t.Errorf("big:1 is there: %v", err)
		}
		for _, kind := range []string{"tmp", "roots"} {
			if left := tree(t, s.path(kind)); len(left) > 0 {
				t.Errorf("%s: %v left", kind, left)
			}
		}
	})
	t.Run("rotten blob", func(t *testing.T) {
		s := store(t, t.TempDir())
		img := packed(t, folder(t), stageConfig)
		d := add(t, s, img, "a:1")
		layers, err := img.of.Layers()
		if err != nil {
			t.Fatal(err)
		}
		h, err := layers[1].Digest()
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(s.blob(h.Hex))
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2]++
		if err := os.WriteFile(s.blob(h.Hex), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Root(t.Context(), d); !errors.Is(err, errCorrupt) {
			t.Errorf("%v, want %v", err, errCorrupt)
		}
		if left := fmt.Sprint(tree(t, s.path("roots")), tree(t, s.path("tmp"))); left != "map[] map[]" {
			t.Errorf("left: %s", left)
		}
	})
	t.Run("closed", func(t *testing.T) {
		s := store(t, t.TempDir())
		d := add(t, s, packed(t, folder(t), stageConfig), "a:1")
		s.Close()
		if _, err := s.Root(t.Context(), d); !errors.Is(err, flight.ErrClosed) {
			t.Errorf("%v, want %v", err, flight.ErrClosed)
		}
	})
	t.Run("the folder changes", func(t *testing.T) {
		s, dir := store(t, t.TempDir()), folder(t)
		img := packed(t, dir, stageConfig)
		put(t, dir, map[string]string{"labels.txt": "c\nd\n"})
		if _, err := s.Add(t.Context(), img, "a:1"); !errors.Is(err, errCorrupt) {
			t.Errorf("%v, want %v", err, errCorrupt)
		}
		put(t, dir, map[string]string{"labels.txt": "longer than before"})
		if _, err := s.Add(t.Context(), img, "a:1"); err == nil || !strings.Contains(err.Error(), "grown") {
			t.Errorf("%v, want an error that it has grown", err)
		}
	})
}

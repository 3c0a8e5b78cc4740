package image

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// bigFolder makes a folder with a program, a small file and a model.
func bigFolder(t *testing.T, model []byte) string {
	t.Helper()
	dir := t.TempDir()
	put(t, dir, map[string]string{"stage": "#!/bin/true\n", "labels.txt": "a b"})
	if err := os.MkdirAll(filepath.Join(dir, "model"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "model", "m.bin"), model, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestPackFolder packs equal folders and changed ones. A big file that has its size, time and inode
// is not read again.
func TestPackFolder(t *testing.T) {
	t.Parallel()
	model := make([]byte, bigFile+1000)
	first, equal := bigFolder(t, model), bigFolder(t, model)
	s := store(t, t.TempDir())
	pack := func(dir string) string {
		t.Helper()
		d, err := PackFolder(t.Context(), s, dir, true)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	one := pack(first)
	if two := pack(equal); two != one {
		t.Errorf("equal folders give %s and %s", one, two)
	}
	root, err := s.Root(t.Context(), one)
	if err != nil || !root.Stage || root.Config.Labels[FolderLabel] == "" {
		t.Errorf("%+v, %v, want a stage that was a folder", root, err)
	}
	if got := tree(t, root.Dir); len(got) != len(tree(t, first)) {
		t.Errorf("the root has %v", got)
	}
	file := filepath.Join(first, "model", "m.bin")
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(at time.Time) {
		t.Helper()
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte{1}, 5000); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	edit(info.ModTime())
	if same := pack(first); same != one {
		t.Error("a big file with the same size, time and inode was read again")
	}
	edit(info.ModTime().Add(time.Second))
	changed := pack(first)
	if changed == one {
		t.Error("a changed model gives the same digest")
	}
	if err := os.WriteFile(filepath.Join(first, "labels.txt"), []byte("a c"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := pack(first); got == changed {
		t.Error("a changed small file gives the same digest")
	}
	if pack(equal) != one {
		t.Error("an edit of one folder has changed what was packed of another one")
	}
}

// TestPackFolderWithLinks packs links. One that leads out of the folder becomes a file, because
// other machines lack the file that it leads to.
func TestPackFolderWithLinks(t *testing.T) {
	t.Parallel()
	dir, outside := bigFolder(t, []byte("m")), t.TempDir()
	put(t, outside, map[string]string{"far.bin": "far"})
	for link, to := range map[string]string{"near": "labels.txt", "far": filepath.Join(outside, "far.bin")} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	s := store(t, t.TempDir())
	digest, err := PackFolder(t.Context(), s, dir, false)
	if err != nil {
		t.Fatal(err)
	}
	root, err := s.Root(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(filepath.Join(root.Dir, "near")); err != nil || to != "labels.txt" {
		t.Errorf("near leads to %q, %v", to, err)
	}
	if info, err := os.Lstat(filepath.Join(root.Dir, "far")); err != nil || !info.Mode().IsRegular() || info.Size() != 3 {
		t.Errorf("far is %v, %v, want a file of 3 bytes", info, err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "folder")); err != nil {
		t.Fatal(err)
	}
	if _, err := PackFolder(t.Context(), s, dir, false); err == nil {
		t.Error("a link to a folder outside is packed")
	}
}

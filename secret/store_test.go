package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func list(t *testing.T, s *Store, namespace string) string {
	t.Helper()
	names, err := s.List(namespace)
	must(t, err)
	return strings.Join(names, " ")
}

// TestLife: secrets are files that nobody else can read, outlive their store, and are each namespace's own.
func TestLife(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	s := open(t, dir)
	if got := list(t, s, "a"); got != "" {
		t.Errorf("at first %q", got)
	}
	must(t, s.Put("a", "token", []byte("one")))
	must(t, s.Put("a", "tls.crt", bytes.Repeat([]byte{0, 255, '\n'}, 1000)))
	must(t, s.Put("b", "token", []byte("of b")))
	must(t, s.Put("a", "token", []byte("two")))
	must(t, os.WriteFile(filepath.Join(dir, valuesDir, "a", ".new"), []byte("half"), 0o400)) // as a crash leaves it
	s = open(t, dir)
	if got := list(t, s, "a"); got != "tls.crt token" {
		t.Errorf("secrets of a: %q", got)
	}
	must(t, s.Put("a", "token", []byte("three")))
	must(t, s.Mount("a", "f", []string{"token"}))
	for file, want := range map[string]string{"secrets/a/token": "three", "secrets/b/token": "of b", "secret-mounts/a/f/token": "three"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil || string(b) != want {
			t.Errorf("%s: %q (%v), want %q", file, b, err, want)
		}
	}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		must(t, err)
		info, err := d.Info()
		must(t, err)
		if want := map[bool]fs.FileMode{true: 0o700, false: 0o400}[d.IsDir()]; info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode().Perm(), want)
		}
		return nil
	}))
	must(t, s.Delete("a", "token"))
	must(t, s.Delete("a", "token")) // no error
	if got := list(t, s, "a"); got != "tls.crt" {
		t.Errorf("after the deletion %q", got)
	}
	must(t, s.Delete("a", "tls.crt"))
}

// TestMounts: a function sees what it has named, as it is now, in a folder that stays the same.
func TestMounts(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for _, name := range []string{"x", "y", "z"} {
		must(t, s.Put("ns", name, []byte(name+"1")))
	}
	folder := s.MountPath("ns", "v1.fn")
	if !filepath.IsAbs(folder) {
		t.Errorf("path %q, want an absolute one", folder)
	}
	sees := func(want string) {
		t.Helper()
		var got []string
		entries, _ := os.ReadDir(folder)
		for _, e := range entries {
			b, err := os.ReadFile(filepath.Join(folder, e.Name()))
			must(t, err)
			got = append(got, e.Name()+"="+string(b))
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("sees %q, want %q", text, want)
		}
	}
	must(t, s.Mount("ns", "v1.fn", []string{"x", "y"}))
	sees("x=x1 y=y1")
	before, err := os.Stat(folder)
	must(t, err)
	must(t, s.Put("ns", "y", []byte("y2")))
	sees("x=x1 y=y1")
	must(t, s.Mount("ns", "v1.fn", []string{"y", "z"}))
	sees("y=y2 z=z1")
	if after, err := os.Stat(folder); err != nil || !os.SameFile(before, after) {
		t.Error("the folder is another one now: who has bound it sees the old one")
	}
	if err := s.Mount("ns", "v1.fn", []string{"nosuch"}); err == nil {
		t.Error("a secret that is not there is mounted")
	}
	if err := s.Mount("other", "v1.fn", []string{"x"}); err == nil {
		t.Error("a secret of another namespace is mounted")
	}
	must(t, s.Mount("ns", "v1.fn", nil))
	sees("")
	must(t, s.Mount("ns", "v1.fn", []string{"x"}))
	s = open(t, dir)
	sees("") // an earlier owner's
	must(t, s.Mount("ns", "v1.fn", []string{"x"}))
	sees("x=x1")
}

// TestSharedMounts: the values stay this user's alone; copies are for the namespace's group to read, and for nobody else.
func TestSharedMounts(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	dir, groups := t.TempDir(), map[string]int{"a": 4001, "b": 4002}
	mounts := filepath.Join(dir, "mounts")
	must(t, os.MkdirAll(filepath.Join(dir, "s", mountsDir, "old"), 0o700))
	var s *Store
	for range 2 { // an earlier owner's are gone
		var err error
		s, err = OpenShared(filepath.Join(dir, "s"), mounts, func(ns string) (int, error) {
			if gid, ok := groups[ns]; ok {
				return gid, nil
			}
			return 0, errors.New("no group")
		})
		must(t, err)
		if _, err := os.Stat(s.MountPath("a", "f")); err == nil {
			t.Error("a mount of an earlier owner is left")
		}
		for ns := range groups {
			must(t, s.Put(ns, "key", []byte("of "+ns)))
			must(t, s.Mount(ns, "f", []string{"key"}))
		}
	}
	must(t, s.Put("c", "key", nil))
	if err := s.Mount("c", "f", []string{"key"}); err == nil || !strings.Contains(err.Error(), "no group") {
		t.Errorf("without a group: %v", err)
	}
	must(t, s.Put("a", "key", []byte("new")))
	must(t, s.Mount("a", "f", []string{"key"}))
	for path, want := range map[string]string{
		"mounts": "drwx--x--x 0", "mounts/a": "drwxr-x--- 4001", "mounts/a/f": "drwxr-x--- 4001", "mounts/a/f/key": "-r--r----- 4001",
		"mounts/b/f/key": "-r--r----- 4002", "s/secrets/a/key": "-r-------- 0", "s/secrets": "drwx------ 0",
	} {
		info, err := os.Stat(filepath.Join(dir, path))
		must(t, err)
		if got := fmt.Sprintf("%v %d", info.Mode(), info.Sys().(*syscall.Stat_t).Gid); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "s", mountsDir)); err == nil {
		t.Error("the mounts of one who shared none are left")
	}
	if b, err := os.ReadFile(filepath.Join(s.MountPath("a", "f"), "key")); err != nil || string(b) != "new" {
		t.Errorf("%q, %v", b, err)
	}
	must(t, s.Mount("a", "f", nil))
	if entries, err := os.ReadDir(mounts); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v, want b alone", entries, err)
	}
	must(t, s.Close())
	if _, err := os.Stat(mounts); err == nil {
		t.Error("the mounts outlive their owner")
	}
}

func TestBadNames(t *testing.T) {
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "s"))
	for _, name := range []string{
		"", ".", "..", "../x", "a/b", "/etc/passwd", "A", "a_b", "ä", "a\x00", "-a", "a-", ".a", "a.", "a b", "a\n", strings.Repeat("a", 254),
	} {
		if s.Put("ns", name, nil) == nil || s.Delete("ns", name) == nil || s.Mount("ns", "f", []string{name}) == nil {
			t.Errorf("%q names a secret", name)
		}
		if s.Put(name, "x", nil) == nil {
			t.Errorf("%q names a namespace", name)
		}
	}
	for _, function := range []string{"", ".", "..", "../f", "a/b", "a\x00"} {
		if s.Mount("ns", function, nil) == nil {
			t.Errorf("%q names a function", function)
		}
	}
	if err := s.Put("ns", "large", make([]byte, MaxSize+1)); err == nil || !strings.Contains(err.Error(), "1048577 bytes") {
		t.Errorf("a large secret: %v", err)
	}
	must(t, s.Put("ns", strings.Repeat("a", 253), make([]byte, MaxSize)))
	must(t, s.Mount("ns", strings.Repeat("F.", 126), []string{strings.Repeat("a", 253)}))
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("%v (%v) beside the folder, want nothing", entries, err)
	}
	must(t, os.Symlink("/etc", filepath.Join(dir, "s", valuesDir, "evil"))) // no link leads out
	if s.Put("evil", "passwd", nil) == nil || s.Mount("evil", "f", []string{"passwd"}) == nil {
		t.Error("a link leads out of the folder")
	}
}

func FuzzNames(f *testing.F) {
	f.Add("ns", "token", "fn")
	f.Add("..", "../../x", "..")
	f.Fuzz(func(t *testing.T, namespace, name, function string) {
		dir := t.TempDir()
		s := open(t, filepath.Join(dir, "s"))
		put := s.Put(namespace, name, []byte("v"))
		if mount := s.Mount(namespace, function, []string{name}); put != nil && mount == nil {
			t.Fatalf("%q of %q was mounted but never stored: %v", name, namespace, put)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Fatalf("%v (%v) beside the folder", entries, err)
		}
	})
}

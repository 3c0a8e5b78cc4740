package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
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

// TestSecretsSurviveARestart checks that secrets are files that nobody else can read, that they
// survive a restart, and that each namespace has its own.
func TestSecretsSurviveARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	s := open(t, dir)
	if got := list(t, s, "a"); got != "" {
		t.Errorf("at first %q", got)
	}
	must(t, s.Put("a", "token", []byte("one")))
	must(t, s.Put("a", "tls.crt", bytes.Repeat([]byte{0, 255, '\n'}, 1000)))
	must(t, s.Put("b", "token", []byte("of b")))
	must(t, s.Put("a", "token", []byte("two")))
	// As a crash leaves it.
	must(t, os.WriteFile(filepath.Join(dir, valuesDir, "a", ".new"), []byte("half"), 0o400))
	s = open(t, dir)
	if got := list(t, s, "a"); got != "tls.crt token" {
		t.Errorf("secrets of a: %q", got)
	}
	must(t, s.Put("a", "token", []byte("three")))
	must(t, s.Mount("a", "f", []string{"token"}))
	mounted := filepath.Join(s.MountPath("a", "f", []string{"token"}), "token")
	for file, want := range map[string]string{filepath.Join(dir, "secrets/a/token"): "three", filepath.Join(dir, "secrets/b/token"): "of b", mounted: "three"} {
		b, err := os.ReadFile(file)
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
	must(t, s.Delete("a", "token")) // no error for a missing secret
	if got := list(t, s, "a"); got != "tls.crt" {
		t.Errorf("after the deletion %q", got)
	}
	must(t, s.Delete("a", "tls.crt"))
}

// sees returns the content of a function's folder.
func sees(t *testing.T, folder string) string {
	t.Helper()
	var got []string
	entries, _ := os.ReadDir(folder)
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(folder, e.Name()))
		must(t, err)
		got = append(got, e.Name()+"="+string(b))
	}
	return strings.Join(got, " ")
}

// TestMounts checks that a function sees the present values of the secrets that it names, in a
// folder that does not change. Secrets that only an earlier deploy named stay and are updated.
func TestMounts(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for _, name := range []string{"x", "y", "z"} {
		must(t, s.Put("ns", name, []byte(name+"1")))
	}
	must(t, s.Put("other", "x", []byte("of another")))
	first, second := s.MountPath("ns", "v1.fn", []string{"y", "x", "y"}), s.MountPath("ns", "v1.fn", []string{"y", "z"})
	want := func(folder, want string) {
		t.Helper()
		if got := sees(t, folder); got != want {
			t.Errorf("sees %q, want %q", got, want)
		}
	}
	must(t, s.Mount("ns", "v1.fn", []string{"x", "y"}))
	want(first, "x=x1 y=y1")
	before, err := os.Stat(first)
	must(t, err)
	must(t, s.Mount("ns", "v1.fn", []string{"z", "y"}))
	want(second, "y=y1 z=z1")
	must(t, s.Put("ns", "y", []byte("y2")))
	must(t, s.Put("other", "y", []byte("of another")))
	want(first, "x=x1 y=y2")
	want(second, "y=y2 z=z1")
	if after, err := os.Stat(first); err != nil || !os.SameFile(before, after) {
		t.Error("the folder is another one now: who has bound it sees the old one")
	}
	if filepath.Dir(filepath.Dir(first)) != filepath.Join(dir, mountsDir, "ns") || s.MountPath("ns", "v1.fn", nil) != "" {
		t.Errorf("path %q, and %q without secrets", first, s.MountPath("ns", "v1.fn", nil))
	}
	if filepath.Base(first) != filepath.Base(s.MountPath("ns", "g", []string{"x", "y"})) || filepath.Base(first) == filepath.Base(second) {
		t.Error("the path does not tell sets of secrets apart")
	}
	if err := s.Mount("ns", "v1.fn", []string{"nosuch"}); err == nil {
		t.Error("a secret that is not there is mounted")
	}
	if err := s.Mount("other", "v1.fn", []string{"z"}); err == nil {
		t.Error("a secret of another namespace is mounted")
	}
	must(t, s.Mount("ns", "v1.fn", nil))
	want(first, "x=x1 y=y2")
	must(t, s.Unmount("ns", "v1.fn"))
	want(first, "")
	want(second, "")
	must(t, s.Mount("ns", "v1.fn", []string{"x"}))
	s = open(t, dir)
	folder := s.MountPath("ns", "v1.fn", []string{"x"})
	want(folder, "") // of an earlier owner
	must(t, s.Mount("ns", "v1.fn", []string{"x"}))
	want(folder, "x=x1")
}

// TestSweep checks that unused folders are removed after sweepAfter.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for _, name := range []string{"x", "y"} {
		must(t, s.Put("ns", name, nil))
		must(t, s.Mount("ns", "f", []string{name}))
		must(t, s.Mount("ns", "g", []string{name}))
	}
	kept := s.MountPath("ns", "f", []string{"y"})
	var asked []string
	used := func(namespace, function, folder string) bool {
		asked = append(asked, namespace+"/"+function)
		return folder == kept
	}
	must(t, s.Sweep(used))
	if len(asked) > 0 {
		t.Errorf("asked for %q, which are new", asked)
	}
	old := time.Now().Add(-2 * sweepAfter)
	for _, function := range []string{"f", "g"} {
		for _, name := range []string{"x", "y"} {
			must(t, os.Chtimes(s.MountPath("ns", function, []string{name}), old, old))
		}
	}
	must(t, s.Mount("ns", "g", []string{"x"}))
	must(t, s.Sweep(used))
	if slices.Sort(asked); strings.Join(asked, " ") != "ns/f ns/f ns/g" {
		t.Errorf("asked for %q", asked)
	}
	left, err := filepath.Glob(filepath.Join(dir, mountsDir, "*", "*", "*"))
	must(t, err)
	if want := []string{kept, s.MountPath("ns", "g", []string{"x"})}; !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
}

// TestSharedMounts checks who can read secrets that functions see as other users. Only this user
// can read the values. The group of the functions with the same secrets can read their copies.
// Nobody else can list or enter the folders above these copies.
func TestSharedMounts(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	dir, groups := t.TempDir(), map[string]int{"a [key]": 4001, "b [key]": 4002, "a [cert key]": 4003}
	mounts := filepath.Join(dir, "mounts")
	must(t, os.MkdirAll(filepath.Join(dir, "s", mountsDir, "old"), 0o700))
	key, both := []string{"key"}, []string{"key", "cert"}
	var s *Store
	for range 2 { // the second time, mounts of an earlier owner are removed
		var err error
		s, err = OpenShared(filepath.Join(dir, "s"), mounts, func(ns string, names []string) (int, error) {
			if gid, ok := groups[fmt.Sprint(ns, " ", names)]; ok {
				return gid, nil
			}
			return 0, errors.New("no group")
		})
		must(t, err)
		if _, err := os.Stat(s.MountPath("a", "f", key)); err == nil {
			t.Error("a mount of an earlier owner is left")
		}
		for _, ns := range []string{"a", "b"} {
			must(t, s.Put(ns, "key", []byte("of "+ns)))
			must(t, s.Mount(ns, "f", key))
		}
		must(t, s.Put("a", "cert", nil))
		must(t, s.Mount("a", "f", both))
	}
	must(t, s.Put("c", "key", nil))
	if err := s.Mount("c", "f", key); err == nil || !strings.Contains(err.Error(), "no group") {
		t.Errorf("without a group: %v", err)
	}
	if gid, err := s.Group("a", both); gid != 4003 || err != nil {
		t.Errorf("group %d, %v", gid, err)
	}
	if gid, err := s.Group("a", nil); gid != 0 || err != nil {
		t.Errorf("group without secrets: %d, %v", gid, err)
	}
	must(t, s.Put("a", "key", []byte("new")))
	for path, want := range map[string]string{
		mounts: "drwx------ 0", mounts + "/a": "drwx------ 0", mounts + "/a/f": "drwx------ 0",
		s.MountPath("a", "f", key): "drwxr-x--- 4001", s.MountPath("a", "f", key) + "/key": "-r--r----- 4001",
		s.MountPath("a", "f", both) + "/key": "-r--r----- 4003", s.MountPath("b", "f", key) + "/key": "-r--r----- 4002",
		dir + "/s/secrets/a/key": "-r-------- 0", dir + "/s/secrets": "drwx------ 0",
	} {
		info, err := os.Stat(path)
		must(t, err)
		if got := fmt.Sprintf("%v %d", info.Mode(), info.Sys().(*syscall.Stat_t).Gid); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "s", mountsDir)); err == nil {
		t.Error("the mounts of one who shared none are left")
	}
	if got := sees(t, s.MountPath("a", "f", key)); got != "key=new" {
		t.Errorf("sees %q", got)
	}
	must(t, s.Unmount("a", "f"))
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
		if s.Mount("ns", function, nil) == nil || s.Unmount("ns", function) == nil {
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
	// links cannot lead out of the folder.
	must(t, os.Symlink("/etc", filepath.Join(dir, "s", valuesDir, "evil")))
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

// TestAFullDisk checks that the error for a secret names the full disk and that deletions still
// work. Once the disk has room, changes work again.
func TestAFullDisk(t *testing.T) {
	small := proctest.Disk(t, "4m")
	s, err := Open(small)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, name := range []string{"a", "b"} {
		if err := s.Put("ns", name, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	free := proctest.Fill(t, small, 0)
	for name, err := range map[string]error{
		"put": s.Put("ns", "a", bytes.Repeat([]byte("x"), 1<<16)), "mount": s.Mount("ns", "f", []string{"a"}),
	} {
		if !disk.IsFull(err) || !strings.Contains(err.Error(), "the disk of "+small) {
			t.Errorf("%s: %v, want the full disk", name, err)
		}
	}
	if err := s.Delete("ns", "b"); err != nil {
		t.Error(err)
	}
	free()
	if err := s.Put("ns", "a", []byte("y")); err != nil {
		t.Error(err)
	}
	if err := s.Mount("ns", "f", []string{"a"}); err != nil {
		t.Error(err)
	}
}

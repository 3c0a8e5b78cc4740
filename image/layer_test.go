package image

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// library is the content of a large file of a shared layer.
var library = strings.Repeat("libraries.", 2*shareFrom/10)

// site makes the layer of some packages, and counts the calls of its fill.
func site(t *testing.T, s *Store, key, content string, filled *int) *Layer {
	t.Helper()
	l, err := s.MakeLayer(t.Context(), key, "words-1.0", func(dir string) error {
		*filled++
		put(t, dir, map[string]string{"site-packages/words/__init__.py": "x = 1\n", "site-packages/words/lib.so": content})
		return errors.Join(os.Symlink("lib.so", filepath.Join(dir, "site-packages/words/lib.so.1")),
			os.Chmod(filepath.Join(dir, "site-packages/words/lib.so"), 0o775))
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// over makes an image of a shared layer and the files of a stage.
func over(t *testing.T, l *Layer, own string) *Image {
	t.Helper()
	dir := t.TempDir()
	put(t, dir, map[string]string{"stage": own, "handler.py": own})
	img, err := Pack(dir, stageConfig, l)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func rootOf(t *testing.T, s *Store, digest string) string {
	t.Helper()
	r, err := s.Root(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	return r.Dir
}

func inode(t *testing.T, file string) uint64 {
	t.Helper()
	info, err := os.Lstat(file)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// onDisk returns the total size of all files below a folder in bytes. A file with several names
// counts once.
func onDisk(t *testing.T, dir string) (n int64) {
	t.Helper()
	seen := map[uint64]bool{}
	if err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil && !seen[info.Sys().(*syscall.Stat_t).Ino] {
			seen[info.Sys().(*syscall.Stat_t).Ino] = true
			n += info.Size()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

const lib = "site-packages/words/lib.so"

// TestSharedLayerIsStoredOnce checks that two images with the same layer share its files, in the
// store and in their unpacked roots, and that no archive of the layer is stored. Two keys with the
// same content give the same layer.
func TestSharedLayerIsStoredOnce(t *testing.T) {
	s, filled := store(t, t.TempDir()), 0
	l := site(t, s, "a", library, &filled)
	one := add(t, s, over(t, l, "one"), "one:1")
	two := add(t, s, over(t, site(t, s, "a", library, &filled), "two"), "two:1")
	if filled != 1 {
		t.Errorf("filled %d times, want once", filled)
	}
	if _, err := os.Stat(s.blob(l.of.hash.String())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the layer's archive: %v, want none", err)
	}
	a, b := rootOf(t, s, one), rootOf(t, s, two)
	for _, name := range []string{lib, "site-packages/words/__init__.py"} {
		if x, y, z := inode(t, filepath.Join(a, name)), inode(t, filepath.Join(b, name)), inode(t, filepath.Join(l.dir, name)); x != y || y != z {
			t.Errorf("%s: inodes %d, %d and %d, want one", name, x, y, z)
		}
	}
	if got, want := onDisk(t, s.dir), int64(len(library)); got > want+64<<10 {
		t.Errorf("%d bytes on the disk, want %d and a little", got, want)
	}
	files := tree(t, a)
	if len(files) != 7 || files[lib] != "-rwxr-xr-x "+library[:20] || files[lib+".1"] != "Lrwxrwxrwx -> lib.so" || !strings.HasSuffix(files["handler.py"], " one") {
		t.Errorf("unpacked %v", files)
	}
	if same := site(t, s, "b", library, &filled); same.of.hash != l.of.hash || filled != 2 {
		t.Errorf("the same content under another key: %v after %d fills, want %v after 2", same.of.hash, filled, l.of.hash)
	}
	if other := site(t, s, "c", library+"!", &filled); other.of.hash == l.of.hash {
		t.Error("other content is the same layer")
	}
}

// TestChangedSharedLayerIsMadeAgain checks that a layer whose files or records were changed is not
// used. It is made again, and roots get the right files.
func TestChangedSharedLayerIsMadeAgain(t *testing.T) {
	for name, spoil := range map[string]func(s *Store, l *Layer) error{
		"a file is written to": func(_ *Store, l *Layer) error {
			return os.WriteFile(filepath.Join(l.dir, lib), []byte(strings.ToUpper(library)), 0o755)
		},
		"a file is cut short":       func(_ *Store, l *Layer) error { return os.Truncate(filepath.Join(l.dir, lib), 10) },
		"a file is gone":            func(_ *Store, l *Layer) error { return os.Remove(filepath.Join(l.dir, lib)) },
		"a file more":               func(_ *Store, l *Layer) error { return os.Symlink("/", filepath.Join(l.dir, "more")) },
		"another mode":              func(_ *Store, l *Layer) error { return os.Chmod(filepath.Join(l.dir, lib), 0o600) },
		"no note":                   func(_ *Store, l *Layer) error { return os.Remove(filepath.Join(filepath.Dir(l.dir), "list")) },
		"an empty note":             func(_ *Store, l *Layer) error { return os.Truncate(filepath.Join(filepath.Dir(l.dir), "list"), 0) },
		"the key names nothing":     func(s *Store, _ *Layer) error { return spoilKeys(s, "") },
		"the key leads out of here": func(s *Store, _ *Layer) error { return spoilKeys(s, "../../../etc") },
	} {
		t.Run(name, func(t *testing.T) {
			s, filled := store(t, t.TempDir()), 0
			l := site(t, s, "a", library, &filled)
			one := add(t, s, over(t, l, "one"), "one:1")
			if err := spoil(s, l); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Root(t.Context(), one); err != nil && !strings.Contains(err.Error(), "build or fetch the image again") && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errCorrupt) {
				t.Errorf("a root meanwhile: %v", err)
			} else if err == nil && !strings.HasPrefix(name, "the key") {
				t.Error("a root was made of a changed layer")
			}
			again := site(t, s, "a", library, &filled)
			if filled != 2 || again.of.hash != l.of.hash {
				t.Errorf("filled %d times, %v; want twice, %v", filled, again.of.hash, l.of.hash)
			}
			b, err := os.ReadFile(filepath.Join(rootOf(t, s, one), lib))
			if err != nil || string(b) != library {
				t.Errorf("%.30q, %v, want what the layer has", b, err)
			}
			if site(t, s, "a", library, &filled); filled != 2 {
				t.Errorf("filled %d times, want no more", filled)
			}
		})
	}
}

func spoilKeys(s *Store, with string) error {
	keys, err := filepath.Glob(s.path("keys", "*"))
	for _, k := range keys {
		err = errors.Join(err, os.WriteFile(k, []byte(with), 0o600))
	}
	return err
}

// TestSharedLayerThatCannotBeFilled checks that nothing of such a layer stays.
func TestSharedLayerThatCannotBeFilled(t *testing.T) {
	s := store(t, t.TempDir())
	bad := errors.New("no such package")
	if _, err := s.MakeLayer(t.Context(), "a", "x", func(dir string) error { return errors.Join(os.WriteFile(dir+"/x", nil, 0o600), bad) }); !errors.Is(err, bad) {
		t.Errorf("got %v", err)
	}
	for _, kind := range []string{"layers", "keys", "tmp"} {
		if left := tree(t, s.path(kind)); len(left) > 0 {
			t.Errorf("%s: left are %v", kind, left)
		}
	}
}

// TestSharedLayerIsSavedAndPushedWhole checks that an archive and a registry get the whole layer.
// The receiving store shares its files and does not store its archive.
func TestSharedLayerIsSavedAndPushedWhole(t *testing.T) {
	noHome(t)
	from, filled := store(t, t.TempDir()), 0
	srv := serve(t)
	l := site(t, from, "a", library, &filled)
	names := []string{srv.host + "/team/one:1", srv.host + "/team/two:1"}
	var digests []string
	for _, n := range names {
		digests = append(digests, add(t, from, over(t, l, n), n))
	}
	want := tree(t, rootOf(t, from, digests[0]))
	var b bytes.Buffer
	if err := from.Save(t.Context(), &b, names...); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(archive, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	loaded, pulled := store(t, t.TempDir()), store(t, t.TempDir())
	if all, err := loaded.Load(t.Context(), archive, ""); err != nil || len(all) != 2 {
		t.Fatalf("load: %v, %v", all, err)
	}
	for i, n := range names {
		if _, err := (Registry{}).Push(t.Context(), from, n); err != nil {
			t.Fatal(err)
		}
		if got, err := (Registry{}).Pull(t.Context(), pulled, n); err != nil || got != digests[i] {
			t.Fatalf("pull: %s, %v, want %s", got, err, digests[i])
		}
	}
	for name, s := range map[string]*Store{"loaded": loaded, "pulled": pulled} {
		if _, err := os.Stat(s.blob(l.of.hash.String())); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the layer's archive: %v, want none", name, err)
		}
		got := tree(t, rootOf(t, s, digests[0]))
		for file := range want {
			if got[file] != want[file] {
				t.Errorf("%s: %s is %q, want %q", name, file, got[file], want[file])
			}
		}
		if a, b := inode(t, filepath.Join(rootOf(t, s, digests[0]), lib)), inode(t, filepath.Join(rootOf(t, s, digests[1]), lib)); a != b {
			t.Errorf("%s: two files, want one", name)
		}
		if got := onDisk(t, s.dir); got > int64(len(library))+64<<10 {
			t.Errorf("%s: %d bytes on the disk, want the library once", name, got)
		}
	}
}

// TestLoadReadsLargeLayersFromTheArchive checks that large layers are not written twice.
func TestLoadReadsLargeLayersFromTheArchive(t *testing.T) {
	from, dir := store(t, t.TempDir()), t.TempDir()
	put(t, dir, map[string]string{"stage": "x", "model.bin": strings.Repeat("parameter!", maxIndex/10+1)})
	want := add(t, from, packed(t, dir, stageConfig), "a:1")
	archive := filepath.Join(t.TempDir(), "a.tar")
	f, err := os.Create(archive)
	if err == nil {
		err = errors.Join(from.Save(t.Context(), f, "a:1"), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	to := store(t, t.TempDir())
	tmp := t.TempDir()
	found, err := to.open(t.Context(), archive, tmp)
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	if got := onDisk(t, tmp); got > 1<<20 {
		t.Errorf("%d bytes were extracted, want only the small files", got)
	}
	if all, err := to.Load(t.Context(), archive, ""); err != nil || len(all) != 1 || all[0].Digest != want {
		t.Fatalf("%v, %v, want %s", all, err, want)
	}
	if a, b := tree(t, rootOf(t, to, want)), tree(t, rootOf(t, from, want)); len(a) != 2 || a["model.bin"] != b["model.bin"] {
		t.Errorf("unpacked %v, want %v", a, b)
	}
	changed, err := os.OpenFile(archive, os.O_WRONLY, 0)
	if err == nil {
		// The byte is in the model or in another blob; both have digests.
		_, err = changed.WriteAt([]byte("P"), 1<<20)
		err = errors.Join(err, changed.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store(t, t.TempDir()).Load(t.Context(), archive, ""); !errors.Is(err, errCorrupt) {
		t.Errorf("a changed archive: %v, want it to be refused", err)
	}
}

// TestPushAsksForLayersOfOtherRepositories checks that the registry is asked to take a layer from a
// repository that has it. A registry that refuses gets all layers that it lacks.
func TestPushAsksForLayersOfOtherRepositories(t *testing.T) {
	noHome(t)
	s, filled, srv := store(t, t.TempDir()), 0, serve(t)
	l := site(t, s, "a", library, &filled)
	one, two, three := srv.host+"/team/one:1", srv.host+"/team/two:1", srv.host+"/team/three:1"
	for _, n := range []string{one, two, three} {
		add(t, s, over(t, l, n), n)
	}
	add(t, s, over(t, l, "elsewhere"), "other.example/team/one:1")
	broken := srv.host + "/team/broken:1"
	if err := os.Remove(s.blob(add(t, s, over(t, l, broken), broken))); err != nil {
		t.Fatal(err)
	}
	if _, err := (Registry{}).Push(t.Context(), s, one); err != nil {
		t.Fatalf("an image that is not pushed is broken: %v", err)
	}
	var mu sync.Mutex // layers are sent concurrently
	var mounted, sent []string
	refuse := false
	srv.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		mu.Lock()
		defer mu.Unlock()
		mount := q.URL.Query().Get("mount")
		switch {
		// This server has one set of blobs for all repositories.
		case q.Method == http.MethodHead && strings.HasSuffix(q.URL.Path, "/blobs/"+l.of.hash.String()):
			w.WriteHeader(http.StatusNotFound)
			return
		case mount == l.of.hash.String() && refuse:
			w.WriteHeader(http.StatusForbidden)
			return
		case mount == l.of.hash.String():
			mounted = append(mounted, q.URL.Query().Get("from"))
			w.Header().Set("Location", "/v2/team/two/blobs/"+mount)
			w.WriteHeader(http.StatusCreated)
			return
		case q.Method == http.MethodPatch && q.ContentLength != 0:
			sent = append(sent, q.URL.Path)
		}
		h.ServeHTTP(w, q)
	})
	if _, err := (Registry{}).Push(t.Context(), s, two); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	if len(mounted) != 1 || mounted[0] != "team/one" && mounted[0] != "team/three" {
		t.Errorf("asked to take the layer from %v, want another repository of this registry", mounted)
	}
	small := len(sent)
	refuse = true
	mu.Unlock()
	if _, err := (Registry{}).Push(t.Context(), s, three); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(sent) <= small {
		t.Error("the registry has refused, and the layer was not sent")
	}
}

// TestLinkIntoAnotherDisk checks that files that cannot be linked are copied.
func TestLinkIntoAnotherDisk(t *testing.T) {
	s, filled := store(t, t.TempDir()), 0
	l := site(t, s, "a", library, &filled)
	disk := proctest.Disk(t, "16m")
	if err := l.LinkInto(t.Context(), disk); err != nil {
		t.Fatal(err)
	}
	want := tree(t, l.dir)
	for name, got := range tree(t, disk) {
		if got != want[name] {
			t.Errorf("%s is %q, want %q", name, got, want[name])
		}
	}
	info, err := os.Stat(filepath.Join(disk, lib))
	if err != nil || !info.ModTime().Equal(time.Unix(0, 0)) || info.Size() != int64(len(library)) {
		t.Errorf("%v, %v", info, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.LinkInto(ctx, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var stageConfig = Config{
	Entrypoint: []string{"/stage"}, Env: []string{"A=b"}, WorkDir: "/", User: "7", Port: 8080,
	Labels: map[string]string{ProtocolLabel: ProtocolVersion, "z": "1", "a": "2"},
}

func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(files[name]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// model is the content of a file that is large enough for its own layer.
var model = strings.Repeat("parameters", bigFile/10+1)

// folder returns a folder with a function's files. Their times and modes differ per call.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put(t, dir, map[string]string{"stage": "#!/bin/sh\n", "model/m.onnx": model, "labels.txt": "a\nb\n"})
	if err := os.Chmod(filepath.Join(dir, "stage"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("model/m.onnx", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func packed(t *testing.T, dir string, c Config) *Image {
	t.Helper()
	img, err := Pack(dir, c)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func digestOf(t *testing.T, img *Image) string {
	t.Helper()
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func store(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func add(t *testing.T, s *Store, img *Image, name string) string {
	t.Helper()
	d, err := s.Add(t.Context(), img, name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// tree returns the entries of a folder: mode, and content of files or target of links.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text := ""
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text = " -> " + to
		case info.Mode().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text = fmt.Sprintf(" %.20s", b)
		}
		rel, err := filepath.Rel(dir, path)
		out[rel] = info.Mode().String() + text
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestPackIsReproducible packs the same files with other times and modes, and files that differ.
func TestPackIsReproducible(t *testing.T) {
	first := digestOf(t, packed(t, folder(t), stageConfig))
	again := folder(t)
	if err := os.Chmod(filepath.Join(again, "labels.txt"), 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Unix(1e9, 0)
	if err := os.Chtimes(filepath.Join(again, "stage"), old, old); err != nil {
		t.Fatal(err)
	}
	if got := digestOf(t, packed(t, again, stageConfig)); got != first {
		t.Errorf("the same files have the digests %s and %s", first, got)
	}
	if want := "sha256:0e64e249"; !strings.HasPrefix(first, want) {
		t.Errorf("digest %s, want %s…: other machines give that digest", first, want)
	}
	seen := map[string]string{first: "at first"}
	for what, change := range map[string]func(dir string, c *Config) error{
		"content": func(dir string, _ *Config) error {
			return os.WriteFile(filepath.Join(dir, "labels.txt"), []byte("a\nc\n"), 0o644)
		},
		"executable": func(dir string, _ *Config) error { return os.Chmod(filepath.Join(dir, "labels.txt"), 0o755) },
		"name": func(dir string, _ *Config) error {
			return os.Rename(filepath.Join(dir, "labels.txt"), filepath.Join(dir, "names.txt"))
		},
		"label":      func(_ string, c *Config) error { c.Labels = map[string]string{"a": "b"}; return nil },
		"entrypoint": func(_ string, c *Config) error { c.Entrypoint = []string{"/stage", "x"}; return nil },
		"platform":   func(_ string, c *Config) error { c.Platform = "linux/arm64"; return nil },
	} {
		dir, c := folder(t), stageConfig
		if err := change(dir, &c); err != nil {
			t.Fatal(err)
		}
		d := digestOf(t, packed(t, dir, c))
		if other, ok := seen[d]; ok {
			t.Errorf("with another %s, the digest is still that of %q", what, other)
		}
		seen[d] = what
	}
}

func TestPackSharesLayersOfBigFiles(t *testing.T) {
	dir := folder(t)
	a := packed(t, dir, stageConfig)
	put(t, dir, map[string]string{"labels.txt": "other"})
	b := packed(t, dir, stageConfig)
	la, err := a.of.Layers()
	if err != nil {
		t.Fatal(err)
	}
	lb, err := b.of.Layers()
	if err != nil || len(la) != 2 || len(lb) != 2 {
		t.Fatalf("%d and %d layers, %v, want 2 and 2", len(la), len(lb), err)
	}
	for i, same := range []bool{false, true} {
		x, _ := la[i].Digest()
		y, _ := lb[i].Digest()
		if (x == y) != same {
			t.Errorf("layer %d: %s and %s, want the same: %t", i, x, y, same)
		}
	}
}

func TestPackRefuses(t *testing.T) {
	if _, err := Pack("/dev", stageConfig); err == nil || !strings.Contains(err.Error(), "want files, folders and links") {
		t.Errorf("devices: %v", err)
	}
	if _, err := Pack(filepath.Join(t.TempDir(), "nosuch"), stageConfig); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	if _, err := Pack(t.TempDir(), Config{Platform: "a/b/c/d"}); err == nil || !strings.Contains(err.Error(), `platform "a/b/c/d"`) {
		t.Errorf("platform: %v", err)
	}
}

func TestStoreKeepsImagesWhenATagMoves(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	if _, err := s.Resolve("team/ocr:1"); !errors.Is(err, ErrNoImage) || !strings.Contains(err.Error(), "team/ocr:1") {
		t.Errorf("before: %v, want %v", err, ErrNoImage)
	}
	img := packed(t, folder(t), stageConfig)
	d := add(t, s, img, "team/ocr:1")
	add(t, s, img, "team/ocr") // without a tag, this means latest
	s = store(t, dir)          // as another process would open it
	for _, name := range []string{"team/ocr:1", "team/ocr", "team/ocr:latest", "team/ocr:moved@" + d} {
		if got, err := s.Resolve(name); err != nil || got != d || got != digestOf(t, img) {
			t.Errorf("%s is %s, %v, want %s", name, got, err, d)
		}
	}
	all, err := s.List()
	if err != nil || len(all) != 2 || all[0].Name != "team/ocr:1" || all[1].Name != "team/ocr:latest" || all[0].Digest != d || all[0].Size < bigFile {
		t.Errorf("list %+v, %v", all, err)
	}
	r, err := s.Root(t.Context(), d)
	if err != nil || !r.Stage || r.Digest != d || fmt.Sprintf("%v %v %s %s %d", r.Config.Entrypoint, r.Config.Env, r.Config.WorkDir, r.Config.User, r.Config.Port) != "[/stage] [A=b] / 7 8080" {
		t.Fatalf("root %+v, %v", r, err)
	}
	want := map[string]string{
		"stage": "-rwxr-xr-x #!/bin/sh\n", "labels.txt": "-rw-r--r-- a\nb\n", "model": "drwxr-xr-x",
		"model/m.onnx": "-rw-r--r-- parametersparameters", "link": "Lrwxrwxrwx -> model/m.onnx",
	}
	if got := tree(t, r.Dir); !maps.Equal(got, want) {
		t.Errorf("unpacked %v, want %v", got, want)
	}
	other := add(t, s, packed(t, folder(t), Config{}), "team/ocr:1") // the tag now names another image
	if got, err := s.Resolve("team/ocr:1"); err != nil || got != other || other == d {
		t.Errorf("moved: %s, %v, want %s", got, err, other)
	}
	if r2, err := s.Root(t.Context(), d); err != nil || r2.Dir != r.Dir {
		t.Errorf("the pinned one: %+v, %v", r2, err)
	}
	if err := s.Remove(t.Context(), "team/ocr:1"); err != nil {
		t.Error(err)
	}
	if err := s.Remove(t.Context(), "team/ocr:1"); !errors.Is(err, ErrNoImage) {
		t.Errorf("removed twice: %v", err)
	}
}

// TestOneImagePerName checks that an image is stored under one name, whatever form of Docker Hub's
// host the name has.
func TestOneImagePerName(t *testing.T) {
	s := store(t, t.TempDir())
	names := map[string][]string{
		"team/ocr:1":         {"team/ocr:1", "docker.io/team/ocr:1", "index.docker.io/team/ocr:1"},
		"redis:latest":       {"redis", "library/redis", "docker.io/redis", "docker.io/library/redis:latest", "index.docker.io/library/redis"},
		"ghcr.io/team/ocr:1": {"ghcr.io/team/ocr:1"},
	}
	for i, short := range slices.Sorted(maps.Keys(names)) {
		for j, stored := range names[short] {
			want := add(t, s, packed(t, folder(t), Config{User: fmt.Sprint(i), WorkDir: fmt.Sprint("/", j)}), stored)
			for _, name := range names[short] {
				if got, err := s.Resolve(name); err != nil || got != want {
					t.Errorf("stored as %s, %s is %s, %v, want %s", stored, name, got, err, want)
				}
			}
		}
	}
	var listed []string
	all, err := s.List()
	for _, e := range all {
		listed = append(listed, e.Name)
	}
	if want := slices.Sorted(maps.Keys(names)); err != nil || !slices.Equal(listed, want) {
		t.Errorf("listed %q, %v, want %q", listed, err, want)
	}
	if err := s.Remove(t.Context(), "docker.io/library/redis"); err != nil {
		t.Error(err)
	}
	if _, err := s.Resolve("redis"); !errors.Is(err, ErrNoImage) {
		t.Errorf("redis, after docker.io/library/redis was removed: %v", err)
	}
}

// TestStoreOfAnEarlierVersion checks that each form finds a name that an earlier version stored
// unchanged.
func TestStoreOfAnEarlierVersion(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	want := add(t, s, packed(t, folder(t), stageConfig), "team/ocr:1")
	b, err := os.ReadFile(s.path("index.json"))
	if err == nil {
		err = os.WriteFile(s.path("index.json"), bytes.Replace(b, []byte(`"team/ocr:1"`), []byte(`"docker.io/team/ocr:1"`), 1), 0o600)
	}
	if err != nil || !bytes.Contains(b, []byte(`"team/ocr:1"`)) {
		t.Fatalf("%s: %v", b, err)
	}
	for _, name := range []string{"team/ocr:1", "docker.io/team/ocr:1"} {
		if got, err := s.Resolve(name); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, want)
		}
	}
	if all, err := s.List(); err != nil || len(all) != 1 || all[0].Name != "team/ocr:1" {
		t.Errorf("listed %+v, %v", all, err)
	}
}

// TestDockerHubIsAskedOnlyByItsName checks that a name without a registry is fetched from nowhere,
// and a name with Docker Hub's host from Docker Hub.
func TestDockerHubIsAskedOnlyByItsName(t *testing.T) {
	for name, want := range map[string]string{
		"docker.io/redis": "index.docker.io/library/redis:latest", "index.docker.io/library/redis:7": "index.docker.io/library/redis:7", "docker.io/team/a:1": "index.docker.io/team/a:1",
		"redis": "", "library/redis": "", "ghcr.io/a:1": "ghcr.io/a:1",
	} {
		ref, err := (Registry{}).reference(name)
		if want == "" {
			if !errors.Is(err, ErrNoImage) {
				t.Errorf("%s: %v, %v, want %v", name, ref, err, ErrNoImage)
			}
		} else if err != nil || ref.Name() != want {
			t.Errorf("%s: %v, %v, want %s", name, ref, err, want)
		}
	}
	if ref, err := (Registry{Default: "registry.example"}).reference("team/a:1"); err != nil || ref.Name() != "registry.example/team/a:1" {
		t.Errorf("with a default registry: %v, %v", ref, err)
	}
}

func TestConcurrentAddsKeepAllNames(t *testing.T) {
	dir := t.TempDir()
	img := packed(t, folder(t), stageConfig)
	var wg sync.WaitGroup
	for i := range 8 {
		s := store(t, dir)
		wg.Go(func() {
			d, err := s.Add(t.Context(), img, fmt.Sprintf("f:%d", i))
			if err == nil {
				_, err = s.Root(t.Context(), d)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if all, err := store(t, dir).List(); err != nil || len(all) != 8 {
		t.Errorf("list %v, %v, want 8", all, err)
	}
	if left := tree(t, filepath.Join(dir, "tmp")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// TestProcessesAtOnce opens several stores of one folder, as several processes do. They build,
// load, remove and collect at the same time.
func TestProcessesAtOnce(t *testing.T) {
	dir := t.TempDir()
	same, file := packed(t, folder(t), stageConfig), filepath.Join(t.TempDir(), "same.tar")
	from := store(t, t.TempDir())
	add(t, from, same, "loaded:1")
	f, err := os.Create(file)
	if err == nil {
		err = errors.Join(from.Save(t.Context(), f, "loaded:1"), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		s, other := store(t, dir), packed(t, folder(t), Config{User: strconv.Itoa(i)})
		wg.Go(func() {
			d, err := s.Add(t.Context(), same, "same:1")
			if err == nil {
				_, err = s.Root(t.Context(), d)
			}
			if err == nil {
				_, err = s.Add(t.Context(), other, fmt.Sprintf("gone:%d", i))
			}
			if err == nil {
				_, err = s.Add(t.Context(), other, fmt.Sprintf("other:%d", i))
			}
			if err == nil {
				err = s.Remove(t.Context(), fmt.Sprintf("gone:%d", i))
			}
			if err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if _, err := store(t, dir).Load(t.Context(), file, ""); err != nil {
				t.Errorf("load: %v", err)
			}
		})
		wg.Go(func() {
			c := store(t, dir)
			for range 20 {
				if _, err := c.Collect(t.Context(), nil, time.Hour); err != nil {
					t.Errorf("collect: %v", err)
				}
			}
		})
	}
	wg.Wait()
	all, err := store(t, dir).List()
	if err != nil || len(all) != 6 { // loaded:1, other:0 to 3, same:1
		t.Fatalf("list %v, %v, want 6", all, err)
	}
	for _, e := range all {
		if _, err := store(t, dir).Root(t.Context(), e.Digest); err != nil {
			t.Errorf("%s: %v", e.Name, err)
		}
	}
}

// TestAddingAgainStoresNothing adds the same image twice. The second time stores nothing, and the
// image's idle time starts again. Collect keeps an image with a name, however old it is, even if no
// function uses it.
func TestAddingAgainStoresNothing(t *testing.T) {
	s := store(t, t.TempDir())
	src := folder(t)
	d := add(t, s, packed(t, src, stageConfig), "built:1")
	blobs := len(tree(t, s.path("blobs/sha256")))
	long := time.Now().Add(-48 * time.Hour)
	for name := range tree(t, s.path("blobs/sha256")) {
		if err := os.Chtimes(s.path("blobs/sha256", name), long, long); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.Collect(t.Context(), nil, time.Hour); n != 0 || err != nil {
		t.Errorf("freed %d, %v of an old image with a name, want nothing", n, err)
	}
	if again := add(t, s, packed(t, src, stageConfig), "built:1"); again != d {
		t.Errorf("digest %s, then %s", d, again)
	}
	if got := len(tree(t, s.path("blobs/sha256"))); got != blobs {
		t.Errorf("%d blobs, then %d", blobs, got)
	}
	if err := s.Remove(t.Context(), "built:1"); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Collect(t.Context(), nil, time.Hour); n != 0 || err != nil {
		t.Errorf("freed %d, %v of a new image, want nothing", n, err)
	}
}

func TestCollect(t *testing.T) {
	s := store(t, t.TempDir())
	named := add(t, s, packed(t, folder(t), Config{User: "1"}), "named:1")
	used := add(t, s, packed(t, folder(t), Config{User: "2"}), "")
	idle := add(t, s, packed(t, folder(t), Config{User: "3"}), "")
	for _, d := range []string{named, used, idle} {
		if _, err := s.Root(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	there := func(d string) bool { _, err := s.Image(d); return err == nil }
	if n, err := s.Collect(t.Context(), []string{used}, time.Hour); n != 0 || err != nil || !there(idle) {
		t.Errorf("freed %d, %v of a used image, want nothing", n, err)
	}
	if err := os.WriteFile(s.path("tmp", "of-a-crash"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Collect(t.Context(), []string{used, "sha256:" + strings.Repeat("0", 64)}, -time.Minute); n == 0 || err != nil {
		t.Errorf("freed %d, %v, want something", n, err)
	}
	if !there(named) || !there(used) || there(idle) {
		t.Errorf("named %t, used %t, idle %t, want true, true, false", there(named), there(used), there(idle))
	}
	for _, d := range []string{named, used} {
		if r, err := s.Root(t.Context(), d); err != nil || len(tree(t, r.Dir)) != 5 {
			t.Errorf("kept: %+v, %v", r, err)
		}
	}
	if files := tree(t, s.path("files")); len(files) != 1 { // one model for all images
		t.Errorf("%d shared files, want 1", len(files))
	}
	if err := s.Remove(t.Context(), "named:1"); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Collect(t.Context(), nil, -time.Minute); n < bigFile || err != nil {
		t.Errorf("freed %d, %v, want all", n, err)
	}
	for _, kind := range []string{"blobs/sha256", "roots", "files", "tmp"} {
		if left := tree(t, s.path(kind)); len(left) > 0 {
			t.Errorf("%s: %v left", kind, slices.Collect(maps.Keys(left)))
		}
	}
}

// TestCollectKeepsImagesOfStarts collects just after a function of an old image without a name has
// started. The image's blobs and root stay.
func TestCollectKeepsImagesOfStarts(t *testing.T) {
	s := store(t, t.TempDir())
	d := add(t, s, packed(t, folder(t), stageConfig), "")
	if _, err := s.Root(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	long := time.Now().Add(-48 * time.Hour)
	for _, kind := range []string{"blobs/sha256", "roots"} {
		entries, err := os.ReadDir(s.path(kind))
		for _, e := range entries {
			err = errors.Join(err, os.Chtimes(s.path(kind, e.Name()), long, long))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Root(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Collect(t.Context(), nil, time.Hour); n != 0 || err != nil {
		t.Errorf("freed %d, %v of a used image, want nothing", n, err)
	}
	if r, err := s.Root(t.Context(), d); err != nil || len(tree(t, r.Dir)) != 5 {
		t.Errorf("kept: %+v, %v", r, err)
	}
}

func TestSaveAndLoad(t *testing.T) {
	from, to := store(t, t.TempDir()), store(t, t.TempDir())
	d := add(t, from, packed(t, folder(t), stageConfig), "team/ocr:1")
	e := add(t, from, packed(t, folder(t), Config{User: "x"}), "registry.example:5000/two:2")
	file := filepath.Join(t.TempDir(), "images.tar")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(from.Save(t.Context(), f, "team/ocr:1", "registry.example:5000/two:2"), f.Close()); err != nil {
		t.Fatal(err)
	}
	got, err := to.Load(t.Context(), file, "")
	if want := fmt.Sprint([]Entry{{Name: "team/ocr:1", Digest: d}, {Name: "registry.example:5000/two:2", Digest: e}}); err != nil || fmt.Sprint(got) != want {
		t.Errorf("loaded %v, %v, want %s", got, err, want)
	}
	if _, err := to.Root(t.Context(), d); err != nil {
		t.Error(err)
	}
	if err := from.Save(t.Context(), io.Discard, "nosuch"); !errors.Is(err, ErrNoImage) {
		t.Errorf("save: %v, want %v", err, ErrNoImage)
	}
}

// TestLoadOfOldArchives loads archives from versions of docker save that wrote no layouts, and
// invalid archives.
func TestLoadOfOldArchives(t *testing.T) {
	from, s := store(t, t.TempDir()), store(t, t.TempDir())
	add(t, from, packed(t, folder(t), stageConfig), "team/ocr:1")
	add(t, from, packed(t, folder(t), Config{Platform: "linux/arm64"}), "arm:1")
	file := filepath.Join(t.TempDir(), "images.tar")
	save := func(keep func(name string) bool, rename func([]byte) []byte, names ...string) {
		t.Helper()
		var b, out bytes.Buffer
		if err := from.Save(t.Context(), &b, names...); err != nil {
			t.Fatal(err)
		}
		r, w := tar.NewReader(&b), tar.NewWriter(&out)
		for e, err := r.Next(); err == nil; e, err = r.Next() {
			content, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if !keep(e.Name) {
				continue
			}
			if strings.HasSuffix(e.Name, ".json") {
				content = rename(content)
				e.Size = int64(len(content))
			}
			if err := w.WriteHeader(e); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(content); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(w.Close(), os.WriteFile(file, out.Bytes(), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	docker := func(name string) bool { return name != "oci-layout" && name != "index.json" }
	oci := func(name string) bool { return name != "manifest.json" }
	same := func(b []byte) []byte { return b }
	nameless := func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(`"team/ocr:1"`), []byte(`""`)) }
	for name, tc := range map[string]struct {
		keep   func(string) bool
		rename func([]byte) []byte
		image  string
		as     string
		want   string // part of the error, or the name
	}{
		"docker":              {docker, same, "team/ocr:1", "", "team/ocr:1"},
		"layout":              {oci, same, "team/ocr:1", "", "team/ocr:1"},
		"layout without name": {oci, nameless, "team/ocr:1", "", "--name"},
		"layout and name":     {oci, nameless, "team/ocr:1", "x:2", "x:2"},
		"another platform":    {oci, same, "arm:1", "", "it is for linux/arm64, want linux/amd64"},
		"neither":             {func(n string) bool { return strings.HasPrefix(n, "blobs") }, same, "team/ocr:1", "", "neither index.json nor manifest.json"},
		"blobs are missing":   {func(n string) bool { return !strings.HasPrefix(n, "blobs") }, same, "team/ocr:1", "", "no such file"},
		"other bytes":         {oci, func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("{"), []byte("[")) }, "team/ocr:1", "", "archive"},
	} {
		t.Run(name, func(t *testing.T) {
			save(tc.keep, tc.rename, tc.image)
			got, err := s.Load(t.Context(), file, tc.as)
			// An error may contain its name, too.
			named := slices.Contains([]string{tc.image, tc.as}, tc.want)
			if err != nil && (named || !strings.Contains(err.Error(), tc.want)) || err == nil && (len(got) != 1 || got[0].Name != tc.want) {
				t.Fatalf("%v, %v, want %s", got, err, tc.want)
			}
			if err == nil {
				if r, err := s.Root(t.Context(), got[0].Digest); err != nil || len(tree(t, r.Dir)) != 5 {
					t.Errorf("%+v, %v, want the image", r, err)
				}
			}
		})
	}
	if err := os.WriteFile(file, []byte("\x1f\x8b no tar"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(t.Context(), file, ""); err == nil || !strings.Contains(err.Error(), "want an uncompressed tar") {
		t.Errorf("no tar: %v", err)
	}
}

func TestParseRef(t *testing.T) {
	pin := "sha256:" + strings.Repeat("a", 64)
	for in, want := range map[string]Ref{
		"a": {"a:latest", "", ""}, "team/ocr:1": {"team/ocr:1", "", ""}, "localhost/x": {"localhost/x:latest", "localhost", ""},
		"r.example/a/b:1@" + pin: {"r.example/a/b:1", "r.example", pin}, "127.0.0.1:5000/a": {"127.0.0.1:5000/a:latest", "127.0.0.1:5000", ""},
		"r:5000/a@" + pin:      {"r:5000/a:latest", "r:5000", pin},
		"docker.io/team/ocr:1": {"team/ocr:1", "docker.io", ""}, "index.docker.io/team/ocr:1": {"team/ocr:1", "docker.io", ""}, "docker.io/redis": {"redis:latest", "docker.io", ""},
		"docker.io/library/redis@" + pin: {"redis:latest", "docker.io", pin}, "index.docker.io/library/redis:7": {"redis:7", "docker.io", ""}, "library/redis:7": {"redis:7", "", ""},
		"ghcr.io/library/redis": {"ghcr.io/library/redis:latest", "ghcr.io", ""}, "docker.io/library/a/b": {"library/a/b:latest", "docker.io", ""},
		"docker.io/ghcr.io/a": {"docker.io/ghcr.io/a:latest", "docker.io", ""}, "docker.io/localhost/a": {"docker.io/localhost/a:latest", "docker.io", ""},
		"my.docker.io/a": {"my.docker.io/a:latest", "my.docker.io", ""}, "docker.io": {"docker.io:latest", "", ""},
	} {
		if got, err := ParseRef(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"", ":", "a:", "A:1", "../a", "a:..", "a@sha256:1", "a@" + pin + "0", "a b", "a:1:2", "/a", "a//b", "docker.io/", "docker.io/library/", "docker.io//a", "docker.io/A"} {
		if got, err := ParseRef(in); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", in)) {
			t.Errorf("%q: %+v, %v, want an error with it", in, got, err)
		}
	}
}

func FuzzParseRef(f *testing.F) {
	f.Add("team/ocr:1")
	f.Add("docker.io/library/a:1")
	f.Add("index.docker.io/b.c/a")
	f.Add("r.example:5000/a@sha256:" + strings.Repeat("0", 64))
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRef(s)
		if err != nil {
			return
		}
		if again, err := ParseRef(r.String()); err != nil || again != r {
			t.Fatalf("%q is %+v, that is %+v, %v", s, r, again, err)
		}
	})
}

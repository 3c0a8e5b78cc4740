package builder

import (
	"archive/zip"
	"bytes"
	"crypto/rand"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// large returns the content of a file that makes its wheel large, because it cannot be compressed.
func large(t *testing.T) string {
	t.Helper()
	b := make([]byte, bigWheel+1<<10)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// inodes returns the files below a folder with their inodes, and the total size of the large files
// in bytes. A file with several names counts once.
func inodes(t *testing.T, dir string) (of map[string]uint64, size int64) {
	t.Helper()
	of = map[string]uint64{}
	seen := map[uint64]bool{}
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		rel, err := filepath.Rel(dir, path)
		of[rel] = st.Ino
		if !seen[st.Ino] && info.Size() >= 1<<20 {
			seen[st.Ino] = true
			size += info.Size()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return of, size
}

// stages writes stages that import packages, each with its requirements.txt.
func stages(t *testing.T, dir string, requirements map[string]string) map[string]stack.Function {
	t.Helper()
	py := proctest.Pip(t)
	out := map[string]stack.Function{}
	for name, text := range requirements {
		tree(t, dir, map[string]string{
			name + "/handler.py":       "import tensors, words\n\ndef infer(state, calls):\n    return [words.said for _ in calls]\n",
			name + "/requirements.txt": text, name + "/own.txt": name,
		})
		out[name] = stack.Function{Lang: python3Stage, Handler: name, FProcess: py + " ./stage"}
	}
	return out
}

// index makes a folder with a large wheel and two versions of a small one, and lets pip use it as
// its index.
func index(t *testing.T) (folder, content string) {
	t.Helper()
	folder, content = t.TempDir(), large(t)
	proctest.Wheel(t, folder, "tensors", "2.0", map[string]string{"tensors/__init__.py": "", "tensors/lib/libtensors.so": content, "shared_names/a.py": ""})
	for _, version := range []string{"1.0", "1.1"} {
		proctest.Wheel(t, folder, "words", version, map[string]string{"words/__init__.py": "said = '" + version + "'\n", "shared_names/b.py": ""})
	}
	t.Setenv("PIP_CONFIG_FILE", os.DevNull)
	t.Setenv("PIP_NO_INDEX", "1")
	t.Setenv("PIP_FIND_LINKS", folder)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	return folder, content
}

func build(t *testing.T, b *Builder, name string) (r Result, digest, said string) {
	t.Helper()
	var shown bytes.Buffer
	b.Output = &shown
	r, err := b.Build(t.Context(), name)
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, &shown)
	}
	if digest, err = b.store.Add(t.Context(), r.Image, name+":1"); err != nil {
		t.Fatal(err)
	}
	return r, digest, shown.String()
}

const library = "site-packages/tensors/lib/libtensors.so"

// TestStagesShareTheirPackages builds two stages with the same requirements, and a third that
// requires another version of a small package. All three share one copy of the large package in the
// build, in the store and in the unpacked roots. No package is installed twice.
func TestStagesShareTheirPackages(t *testing.T) {
	_, content := index(t)
	dir, at := t.TempDir(), t.TempDir()
	const same = "tensors==2.0\nwords==1.0\n"
	b := openIn(t, at, dir, stages(t, dir, map[string]string{"one": same, "two": same, "three": "tensors==2.0\nwords==1.1\n", "open": "tensors\nwords\n"}))
	roots := map[string]map[string]uint64{}
	layers := func() int {
		t.Helper()
		all, err := os.ReadDir(filepath.Join(at, "layers"))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	for _, tc := range []struct {
		name         string
		layers       int    // in the store after it
		asks, fills  bool   // pip chooses wheels; pip installs some
		installs, no string // parts of pip's output: expected, and not expected
	}{
		{"one", 2, true, true, "Successfully installed tensors-2.0", ""},
		{"two", 2, false, false, "", ""},
		{"three", 3, true, true, "Successfully installed words-1.1", "Successfully installed tensors"},
		{"open", 3, true, false, "", ""}, // the index has version 1.1
	} {
		r, digest, said := build(t, b, tc.name)
		if asked, filled := strings.Contains(said, "words-1"), strings.Contains(said, "Successfully installed"); asked != tc.asks || filled != tc.fills {
			t.Errorf("%s: pip was asked %t, installed %t, want %t, %t:\n%s", tc.name, asked, filled, tc.asks, tc.fills, said)
		}
		if !strings.Contains(said, tc.installs) || tc.no != "" && strings.Contains(said, tc.no) {
			t.Errorf("%s: pip said %s, want %q and not %q", tc.name, said, tc.installs, tc.no)
		}
		if got := layers(); got != tc.layers {
			t.Errorf("%s: %d layers, want %d", tc.name, got, tc.layers)
		}
		root, err := b.store.Root(t.Context(), digest)
		if err != nil {
			t.Fatal(err)
		}
		of, _ := inodes(t, root.Dir)
		built, _ := inodes(t, r.Dir)
		if !slices.Equal(slices.Sorted(maps.Keys(of)), slices.Sorted(maps.Keys(built))) {
			t.Errorf("%s: the image has %v, built were %v", tc.name, slices.Sorted(maps.Keys(of)), slices.Sorted(maps.Keys(built)))
		}
		if of[library] != built[library] {
			t.Errorf("%s: the built library is another file than the unpacked one", tc.name)
		}
		roots[tc.name] = of
		runsPackages(t, r.Dir, map[string]string{"one": "1.0", "two": "1.0"}[tc.name])
	}
	for name, of := range roots {
		if of[library] == 0 || of[library] != roots["one"][library] {
			t.Errorf("%s has another file of the library", name)
		}
	}
	if roots["one"]["site-packages/words/__init__.py"] == roots["three"]["site-packages/words/__init__.py"] {
		t.Error("another version of a package is the same file")
	}
	if _, size := inodes(t, at); size != int64(len(content)) {
		t.Errorf("%d bytes of large files in the store, want the library's %d once", size, len(content))
	}
}

// runsPackages checks that the image has all names of all layers. An empty said stands for the
// newest version.
func runsPackages(t *testing.T, dir, said string) {
	t.Helper()
	files := list(t, dir)
	for _, name := range []string{"site-packages/shared_names/a.py", "site-packages/shared_names/b.py", "stagecoach/__init__.py", "own.txt"} {
		if !slices.Contains(files, name) {
			t.Errorf("no %s in the image", name)
		}
	}
	if said == "" {
		said = "1.1"
	}
	if b, err := os.ReadFile(filepath.Join(dir, "site-packages/words/__init__.py")); err != nil || string(b) != "said = '"+said+"'\n" {
		t.Errorf("words say %q, %v, want %s", b, err, said)
	}
}

// TestPackagesOfFoldersAreShared checks that the folders of two stages have links to the same
// packages, and copies of the files that their authors may edit.
func TestPackagesOfFoldersAreShared(t *testing.T) {
	index(t)
	dir, images := t.TempDir(), t.TempDir()
	const same = "tensors==2.0\nwords==1.0\n"
	b := openIn(t, filepath.Join(images, ".oci"), dir, stages(t, dir, map[string]string{"one": same, "two": same}))
	for _, name := range []string{"one", "two", "one"} {
		r, err := b.Build(t.Context(), name)
		if err == nil {
			err = PutFolder(images, "team/"+name+":1", r.Dir)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	one, _ := inodes(t, filepath.Join(images, "team/one/1"))
	two, _ := inodes(t, filepath.Join(images, "team/two/1"))
	if one[library] == 0 || one[library] != two[library] {
		t.Errorf("inodes %d and %d of the library, want one", one[library], two[library])
	}
	if one["handler.py"] == two["handler.py"] || one["stagecoach/__init__.py"] == two["stagecoach/__init__.py"] {
		t.Error("an edit of one stage's files would change another stage's")
	}
}

// TestDamagedPackagesAreMadeAgain changes layers and kept wheels. The build does not use them and
// makes them again.
func TestDamagedPackagesAreMadeAgain(t *testing.T) {
	folder, content := index(t)
	dir, at := t.TempDir(), t.TempDir()
	b := openIn(t, at, dir, stages(t, dir, map[string]string{"one": "tensors==2.0\nwords==1.0\n"}))
	b.SkipImports = true
	_, first, _ := build(t, b, "one")
	glob := func(pattern string) string {
		t.Helper()
		all, err := filepath.Glob(pattern)
		if err != nil || len(all) != 1 {
			t.Fatalf("%s: %v, %v", pattern, all, err)
		}
		return all[0]
	}
	spoil := func(file string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(strings.Repeat("x", len(content))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	layer := filepath.Join(at, "layers/*/fs", library)
	kept := filepath.Join(os.Getenv("XDG_CACHE_HOME"), "stagecoach/wheels/*")
	for name, spoilt := range map[string]func(){
		"an installed file":  func() { spoil(glob(layer)) },
		"a file and a wheel": func() { spoil(glob(layer)); spoil(glob(filepath.Join(kept, "tensors-*.whl"))) },
		"all of it": func() {
			must(t, os.RemoveAll(filepath.Join(at, "layers")))
			must(t, os.Mkdir(filepath.Join(at, "layers"), 0o700))
			must(t, os.Remove(glob(filepath.Join(kept, "tensors-*.whl"))))
			must(t, os.WriteFile(glob(filepath.Join(kept, "*"+chosenSuffix)), []byte(`[{"File":"../x.whl"}]`), 0o600))
		},
	} {
		spoilt()
		_, again, said := build(t, b, "one")
		if again != first {
			t.Errorf("%s: image %s, want %s", name, again, first)
		}
		if got, err := os.ReadFile(glob(layer)); err != nil || string(got) != content {
			t.Errorf("%s: the library is %.20q, %v", name, got, err)
		}
		if _, err := zip.OpenReader(glob(filepath.Join(kept, "tensors-*.whl"))); err != nil {
			t.Errorf("%s: the kept wheel: %v", name, err)
		}
		if _, _, said := build(t, b, "one"); said != "" {
			t.Errorf("%s: the next build does it again: %s", name, said)
		}
		if said == "" {
			t.Errorf("%s: nothing was done", name)
		}
	}
	if len(list(t, folder)) != 3 {
		t.Error("the index has changed")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestPipIsAskedAgain checks when pip asks the index. For an open version, pip asks at each build
// and gets new versions. For a requirements.txt with exact versions, it asks once a day.
func TestPipIsAskedAgain(t *testing.T) {
	folder, _ := index(t)
	dir := t.TempDir()
	b := open(t, dir, stages(t, dir, map[string]string{"exact": "tensors==2.0\nwords==1.1\n", "open": "tensors==2.0\nwords>=1\n"}))
	b.SkipImports = true
	build(t, b, "exact")
	build(t, b, "open")
	proctest.Wheel(t, folder, "words", "1.2", map[string]string{"words/__init__.py": "said = '1.2'\n"})
	r, _, said := build(t, b, "open")
	if got, err := os.ReadFile(filepath.Join(r.Dir, "site-packages/words/__init__.py")); err != nil || !strings.Contains(string(got), "1.2") {
		t.Errorf("an open version is %q, %v, want the newest, 1.2", got, err)
	}
	if strings.Contains(said, "installed tensors") {
		t.Error("the large package was installed again")
	}
	if _, _, said := build(t, b, "exact"); said != "" {
		t.Errorf("exact versions were asked for again: %s", said)
	}
	all, err := filepath.Glob(filepath.Join(os.Getenv("XDG_CACHE_HOME"), "stagecoach/wheels/*/*"+chosenSuffix))
	if err != nil || len(all) != 2 {
		t.Fatalf("choices %v, %v", all, err)
	}
	for _, file := range all {
		old := time.Now().Add(-askAgain)
		must(t, os.Chtimes(file, old, old))
	}
	if _, _, said := build(t, b, "exact"); !strings.Contains(said, "tensors-2.0") || strings.Contains(said, "Successfully installed") {
		t.Errorf("a day later pip said %q, want it to be asked and to install nothing", said)
	}
	for _, file := range all {
		old := time.Now().Add(-chosenAge - time.Hour)
		must(t, os.Chtimes(file, old, old))
	}
	build(t, b, "open")
	if left, _ := filepath.Glob(all[0][:len(all[0])-len(filepath.Base(all[0]))] + "*" + chosenSuffix); len(left) != 1 {
		t.Errorf("choices %v, want the one that was made now", left)
	}
}

func TestExact(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"torch==2.11.0\n# x\n\nnumpy == 2.4.6  # y\n": true, "torch[opt]==2.11.0; python_version == '3.11'\n": true,
		"--index-url http://x/simple\na==1\n": true, "a==1 \\\n  --hash=sha256:00\n": true, "a===1\n": true, "a==1 --hash=sha256:00\n": true,
		"a\n": false, "a>=1\n": false, "a==1.*\n": false, "a==1,>0\n": false, "a~=1.0\n": false, "a==1\nb\n": false, "b; python_version == '3.11'\n": false,
	} {
		if got := exact(text); got != want {
			t.Errorf("%q: %t, want %t", text, got, want)
		}
	}
}

func TestSplit(t *testing.T) {
	t.Parallel()
	var all []wheel
	for i := range maxOwn + 3 {
		all = append(all, wheel{File: string(rune('A'+i%26)) + string(rune('a'+i/26)), Size: bigWheel + int64(i)})
	}
	all = append(all, wheel{File: "small", Size: bigWheel - 1})
	own, rest := split(all)
	if len(own) != maxOwn || len(rest) != 4 {
		t.Fatalf("%d own, %d together, want %d and 4", len(own), len(rest), maxOwn)
	}
	if slices.ContainsFunc(own, func(w wheel) bool { return w.Size < bigWheel+3 }) {
		t.Error("a larger wheel has no layer of its own")
	}
	slices.Reverse(all)
	if again, _ := split(all); !slices.Equal(again, own) {
		t.Error("the order of the wheels makes a difference")
	}
}

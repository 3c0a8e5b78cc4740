package builder

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestKeptWheelsByIndex checks that requirements with the same indexes share a folder, and others
// do not. Requirements that name files or URLs have no folder.
func TestKeptWheelsByIndex(t *testing.T) {
	py := proctest.Pip(t)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("PIP_CONFIG_FILE", os.DevNull)
	b := open(t, t.TempDir(), nil)
	folder := func(requirements string) string {
		t.Helper()
		p, err := b.python(t.Context(), stack.Function{FProcess: py + " ./stage"})
		if err != nil {
			t.Fatal(err)
		}
		w, err := p.keptWheels(t.Context(), t.TempDir(), requirements)
		if err != nil {
			t.Fatal(err)
		}
		if w == nil {
			return ""
		}
		return w.folder
	}
	usual := folder("# ours\nnumpy==2.0\n")
	if usual == "" || folder("torch==2.4 --hash=sha256:00\n\nwords>=1 # https://example.com\n") != usual {
		t.Error("requirements without options have no folder, or different ones")
	}
	other := folder("--index-url http://127.0.0.1:1/simple\nnumpy==2.0\n")
	if other == "" || other == usual || folder("words\n--index-url http://127.0.0.1:1/simple\n") != other {
		t.Errorf("of another index: %q, and %q of none", other, usual)
	}
	t.Setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:2/simple")
	if extra := folder("numpy==2.0\n"); extra == "" || extra == usual || extra == other {
		t.Errorf("with another index in pip's own configuration: %q", extra)
	}
	for _, requirements := range []string{"./a.whl\n", "a @ https://example.com/a.whl\n", "-r others.txt\n", "--no-index\na\n", "--find-links .\na\n", "-e lib\n"} {
		if got := folder(requirements); got != "" {
			t.Errorf("%q: kept in %s, want nowhere", requirements, got)
		}
	}
}

// TestKeptWheelsAreThisUsersOwn checks that a build takes no packages from a folder that other
// users can write to.
func TestKeptWheelsAreThisUsersOwn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for mode, good := range map[os.FileMode]bool{0o700: true, 0o755: true, 0o775: false, 0o757: false} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		if err := checkOwner(dir); (err == nil) != good {
			t.Errorf("mode %v: %v", mode, err)
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if checkOwner(link) == nil {
		t.Error("a link counts as a folder")
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if checkOwner(dir) == nil {
			t.Error("another user's folder is taken")
		}
	}
}

// TestWheelsShrink checks that the least recently used wheels are removed, and that a wheel that is
// used again stays. Folders with parts of wheels are removed once they are too old to belong to a
// running build.
func TestWheelsShrink(t *testing.T) {
	t.Parallel()
	all := t.TempDir()
	w := &wheels{all: all, folder: filepath.Join(all, "a")}
	from := t.TempDir()
	for i, name := range []string{"a/one.whl", "b/two.whl", "a/three.whl"} {
		file := filepath.Join(all, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000+i), 0)
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"one.whl", "four.whl"} {
		if err := os.WriteFile(filepath.Join(from, name), make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.add(chosen{from, []wheel{{File: "one.whl", Size: 100}, {File: "four.whl", Size: 100}}}); err != nil {
		t.Fatal(err)
	}
	for part, age := range map[string]time.Duration{"a/.new-1": 2 * partAge, "b/.new-2": 0} {
		file := filepath.Join(all, part, "wheel")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(filepath.Dir(file), at, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.shrink(250); err != nil {
		t.Fatal(err)
	}
	if got := list(t, all); !slices.Equal(got, []string{"a/four.whl", "a/one.whl", "b/.new-2/wheel"}) {
		t.Errorf("kept are %v, want those that were used last", got)
	}
}

package safetensors_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// folder returns a folder with these files.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// shard returns a file with a tensor of three bytes.
func shard(name, data string) string {
	return string(file(`{"`+name+`":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}`, data))
}

const index = "model.safetensors.index.json"

func TestInspect(t *testing.T) {
	whole := map[string]string{"1.safetensors": shard("a", "abc"), "2.safetensors": shard("b", "def"), "config.json": "{}", ".x.safetensors": "no"}
	dir := folder(t, whole)
	check := func(path string, parts, tensors int) {
		t.Helper()
		m, err := safetensors.Inspect(path)
		if err != nil {
			t.Error(err)
			return
		}
		size := int64(len(whole["1.safetensors"]))
		if len(m.Parts) != parts || m.Tensors != tensors || m.Bytes != int64(parts)*size || m.Data != int64(3*tensors) || m.Parts[0].Name != "1.safetensors" || len(m.Parts[0].Tensors) != 1 {
			t.Errorf("%s: %+v, want %d files with %d tensors", path, m, parts, tensors)
		}
	}
	check(dir, 2, 2)
	check(filepath.Join(dir, "1.safetensors"), 1, 1)
	whole[index] = `{"metadata":{"total_size":6},"weight_map":{"a":"1.safetensors"}}`
	whole["3.safetensors"] = "not of the index"
	dir = folder(t, whole)
	check(dir, 1, 1)
	check(filepath.Join(dir, index), 1, 1)
}

func TestInspectRefuses(t *testing.T) {
	one, two := shard("a", "abc"), shard("b", "abc")
	for name, tc := range map[string]struct {
		files map[string]string
		want  string
	}{
		"a broken file":         {map[string]string{"1.safetensors": one, "2.safetensors": two[:20]}, "2.safetensors: safetensors: a header of"},
		"a tensor in two":       {map[string]string{"1.safetensors": one, "2.safetensors": one}, `"a": it is in 1.safetensors and 2.safetensors`},
		"two indexes":           {map[string]string{"1.safetensors": one, index: "{}", "b" + index: "{}"}, "want one"},
		"no index":              {map[string]string{index: "[]"}, "cannot unmarshal array"},
		"no weight_map":         {map[string]string{index: `{"Weight_Map":{"a":"1.safetensors"}}`}, "weight_map"},
		"an empty one":          {map[string]string{index: `{"weight_map":{}}`}, "weight_map"},
		"names of other kinds":  {map[string]string{index: `{"weight_map":{"a":1}}`}, "weight_map"},
		"a file that is absent": {map[string]string{"1.safetensors": one, index: `{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}`}, "2.safetensors: no such file"},
		"a tensor elsewhere":    {map[string]string{"1.safetensors": one, "2.safetensors": two, index: `{"weight_map":{"a":"2.safetensors","b":"1.safetensors"}}`}, `"a": the index has it in 2.safetensors, the files in "1.safetensors"`},
		"a tensor nowhere":      {map[string]string{"1.safetensors": one, index: `{"weight_map":{"a":"1.safetensors","c":"1.safetensors"}}`}, `"c": the index has it in 1.safetensors, the files in ""`},
		"a tensor not in it":    {map[string]string{"1.safetensors": string(file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, "")), index: `{"weight_map":{"a":"1.safetensors"}}`}, `"b": it is in 1.safetensors, and not in the index`},
		"a way out":             {map[string]string{index: `{"weight_map":{"a":"../1.safetensors"}}`}, `file "../1.safetensors", want the name`},
		"a folder":              {map[string]string{index: `{"weight_map":{"a":"b/1.safetensors"}}`}, `file "b/1.safetensors", want the name`},
		"another file":          {map[string]string{index: `{"weight_map":{"a":"passwd"}}`}, `file "passwd", want the name`},
		"a name without end":    {map[string]string{index: `{"weight_map":{"a":"` + strings.Repeat("a", 1<<16) + `.safetensors"}}`}, `aaaa", want the name`},
		"a large index":         {map[string]string{index: strings.Repeat(" ", 1<<25+1)}, "33554433 bytes, want at most 33554432"},
		"a long name, elsewhere": {
			map[string]string{"1.safetensors": one, index: `{"weight_map":{"` + strings.Repeat("a", 1<<16) + `":"1.safetensors"}}`},
			`aaaa": the index has it in 1.safetensors, the files in ""`,
		},
		"large headers": {
			map[string]string{"1.safetensors": string(file("{}"+strings.Repeat(" ", 60e6), "")), "2.safetensors": string(file("{}"+strings.Repeat(" ", 60e6), ""))},
			"headers of 120000020 bytes up to 2.safetensors, want at most 100000000",
		},
	} {
		m, err := safetensors.Inspect(folder(t, tc.files))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %+v, error %.400v, want %q in it", name, m, err, tc.want)
		} else if len(err.Error()) > 1000 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
	}
	for name, path := range map[string]string{"an empty folder": t.TempDir(), "another file": filepath.Join(folder(t, map[string]string{"model.onnx": "x"}), "model.onnx")} {
		if _, err := safetensors.Inspect(path); !errors.Is(err, safetensors.ErrNone) {
			t.Errorf("%s: error %v, want ErrNone", name, err)
		}
	}
	if _, err := safetensors.Inspect(filepath.Join(t.TempDir(), "model")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing there: error %v", err)
	}
	pipe := filepath.Join(t.TempDir(), "model.safetensors")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := safetensors.Inspect(pipe); done <- err }()
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "want a regular file") {
			t.Errorf("a pipe: error %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("a pipe: Inspect waits for a writer")
	}
}

func TestDigest(t *testing.T) {
	digest := func(dir string) string {
		t.Helper()
		m, err := safetensors.Inspect(dir)
		if err != nil {
			t.Fatal(err)
		}
		d, err := m.Digest(t.Context())
		if err != nil || !strings.HasPrefix(d, "sha256:") || len(d) != 71 {
			t.Fatal(d, err)
		}
		return d
	}
	dir := folder(t, map[string]string{"1.safetensors": shard("a", "abc")})
	first := digest(dir)
	if d := digest(folder(t, map[string]string{"1.safetensors": shard("a", "abc"), "README": ""})); d != first {
		t.Errorf("the same elsewhere: %s, want %s", d, first)
	}
	for what, files := range map[string]map[string]string{"data": {"1.safetensors": shard("a", "abd")}, "name": {"2.safetensors": shard("a", "abc")}} {
		if d := digest(folder(t, files)); d == first {
			t.Errorf("other %s: the same digest", what)
		}
	}
	m, err := safetensors.Inspect(dir)
	if err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := m.Digest(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: error %v", err)
	}
	for content, want := range map[string]string{shard("a", "ab"): "1 bytes less than before", shard("a", "abcd"): "more than the"} {
		if err := os.WriteFile(filepath.Join(dir, "1.safetensors"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Digest(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a file that changes: error %v, want %q in it", err, want)
		}
	}
}

func TestMapped(t *testing.T) {
	dir := folder(t, map[string]string{"model.safetensors": string(file(two, "abcdefghijkl")), "short.safetensors": "1234567"})
	m, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a": "ab", "b": "cdefghij", "scalar": "kl", "none": ""} {
		v, err := m.View(name)
		if err != nil || string(v) != want || cap(v) != len(v) {
			t.Errorf("%s: %q, %v, want %q", name, v, err, want)
		}
		if got, err := m.Tensor(name); err != nil || string(got.Data) != want {
			t.Errorf("%s: %q, %v, want %q", name, got.Data, err, want)
		}
	}
	if _, err := m.View("c"); err == nil || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("a tensor that is not there: error %v", err)
	}
	for _, off := range []int64{-1, int64(len(two)) + 19, 1 << 62} {
		if n, err := m.ReadAt(make([]byte, 2), off); err == nil || n > 1 {
			t.Errorf("two bytes at %d: %d, %v, want an error", off, n, err)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"short.safetensors", "none.safetensors"} {
		if _, err := safetensors.Open(filepath.Join(dir, name)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v, want its name", name, err)
		}
	}
}

// TestOpenDoesNotCopy checks that Open takes no memory for the data, whatever the file's size is.
func TestOpenDoesNotCopy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large.safetensors")
	const size = 1 << 30
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	header := file(`{"a":{"dtype":"U8","shape":[1073741824],"data_offsets":[0,1073741824]}}`, "")
	if _, err := f.Write(header); err != nil {
		t.Fatal(err)
	}
	// A hole takes no space on disk.
	if err := errors.Join(f.Truncate(int64(len(header))+size), f.Close()); err != nil {
		t.Fatal(err)
	}
	allocated := testing.AllocsPerRun(1, func() {
		m, err := safetensors.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := m.View("a"); err != nil || len(v) != size || v[size-1] != 0 {
			t.Fatal(len(v), err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
	if allocated > 100 {
		t.Errorf("%.0f allocations", allocated)
	}
}

var _ io.ReaderAt = (*safetensors.Mapped)(nil)

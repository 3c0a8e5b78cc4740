package safetensors_test

import (
	"errors"
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

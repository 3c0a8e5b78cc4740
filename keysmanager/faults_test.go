package keysmanager

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

func containsAll(s string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}

// bad makes an image of the function wait with a folder of its own for its model, and returns both.
func bad(t *testing.T, images sandbox.Images, name string) (node.Spec, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "bad", name, "1")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"stage", "talk", "stubborn"} {
		if err := os.Link(filepath.Join(images.Dir, "test", "wait", "1", file), filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
	s := withModel
	s.Function, s.Image, s.Env = name+".ns", "bad/"+name+":1", maps.Clone(s.Env)
	return s, dir
}

// twoFolders finds images in either of two folders.
type twoFolders struct{ a, b sandbox.Images }

func (f twoFolders) Resolve(image string) (sandbox.Image, error) {
	if strings.HasPrefix(image, "bad/") {
		return f.b.Resolve(image)
	}
	return f.a.Resolve(image)
}

// TestBadModelsAreRefusedWithACause checks that the error says what is wrong with a model, and that
// nothing of the load is left.
func TestBadModelsAreRefusedWithACause(t *testing.T) {
	good, err := os.ReadFile(proctest.Built(t, "models", "ocr", "rec.onnx"))
	if err != nil {
		t.Fatal(err)
	}
	synthetic := func(t *testing.T, dir string) (weights string) {
		if _, _, err := onnx.Synthetic(dir, onnx.Encoder{Layers: 1, Width: 128, Heads: 2}, 1); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, "weights.bin")
	}
	for name, tc := range map[string]struct {
		make func(t *testing.T, dir string) error
		want []string
	}{
		"truncated": {func(_ *testing.T, dir string) error {
			return os.WriteFile(filepath.Join(dir, "model.onnx"), good[:len(good)/2], 0o600)
		}, []string{"model model.onnx", "not a whole ONNX model", "build the image again"}},
		"empty": {func(_ *testing.T, dir string) error {
			return os.WriteFile(filepath.Join(dir, "model.onnx"), nil, 0o600)
		}, []string{"there is no graph in 0 bytes"}},
		"corrupt": {func(_ *testing.T, dir string) error {
			b, err := proto.Marshal(&onnxpb.ModelProto{
				IrVersion: proto.Int64(8), OpsetImport: []*onnxpb.OperatorSetIdProto{{Version: proto.Int64(17)}},
				Graph: &onnxpb.GraphProto{Name: proto.String("g"), Node: []*onnxpb.NodeProto{{OpType: proto.String("NoSuchOperator"), Output: []string{"y"}}}},
			})
			return errors.Join(err, os.WriteFile(filepath.Join(dir, "model.onnx"), b, 0o600))
		}, []string{"NoSuchOperator"}},
		"a pipe": {func(_ *testing.T, dir string) error {
			return syscall.Mkfifo(filepath.Join(dir, "model.onnx"), 0o600)
		}, []string{"model model.onnx", "want a file or folder"}},
		"weights missing":   {func(t *testing.T, dir string) error { return os.Remove(synthetic(t, dir)) }, []string{"its external data weights.bin are missing"}},
		"weights too short": {func(t *testing.T, dir string) error { return os.Truncate(synthetic(t, dir), 1000) }, []string{"weights.bin have 1000 bytes, want at least"}},
		"too large": {func(t *testing.T, dir string) error { return os.Truncate(synthetic(t, dir), 1<<40) }, []string{
			"needs about", "1024 GiB of external data", "it can never fit here", "machine",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			all := images(t)
			s, dir := bad(t, all, strings.ReplaceAll(name, " ", "-"))
			if err := tc.make(t, dir); err != nil {
				t.Fatal(err)
			}
			n := newNode(t, func(c *Config) {
				c.Images = twoFolders{all, sandbox.Images{Dir: filepath.Dir(filepath.Dir(filepath.Dir(dir)))}}
			})
			_, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: s})
			if err == nil || !containsAll(err.Error(), tc.want...) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
			inv := n.Inventory()
			if len(inv.Zygotes)+len(inv.Replicas) != 0 {
				t.Errorf("left are %+v and %+v", inv.Zygotes, inv.Replicas)
			}
			if refused := name == "too large"; refused != (inv.Refused == 1) || refused == (len(inv.Failures) == 1) {
				t.Errorf("%d refused, failures %+v", inv.Refused, inv.Failures)
			}
			n.start("good", withModel) // other functions still start
		})
	}
}

// TestFailingLoadsLeaveNoZygote has one zygote that never finishes its load, and one that exits.
func TestFailingLoadsLeaveNoZygote(t *testing.T) {
	for process, tc := range map[string]struct {
		limit time.Duration
		want  string
	}{
		"./stubborn": {200 * time.Millisecond, "it has not loaded after 200ms"},
		"./talk":     {time.Minute, "exit status 3: err of"},
	} {
		n := newNode(t, func(c *Config) { c.loadTimeout = tc.limit })
		s := withModel
		s.Process = process
		if _, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: s}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want an error with %q", process, err, tc.want)
		}
		if inv := n.Inventory(); len(inv.Zygotes) != 0 || len(inv.Failures) != 1 || !strings.Contains(inv.Failures[0].Cause, tc.want) {
			t.Errorf("%s: left are %+v, %+v", process, inv.Zygotes, inv.Failures)
		}
	}
}

// TestAKilledZygoteLeavesNoPackedFiles kills a zygote while it packs. The files that it has written
// must be removed.
func TestAKilledZygoteLeavesNoPackedFiles(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Cache = t.TempDir() })
	s := withModel
	s.Process = "./packs-some"
	if _, err := n.Start(t.Context(), node.Order{Replica: "x", Spec: s}); err == nil || !strings.Contains(err.Error(), "killed by SIGKILL") {
		t.Errorf("got %v, want that it was killed", err)
	}
	if left, err := filepath.Glob(filepath.Join(n.cfg.Cache, "*", "*")); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v, want nothing", left, err)
	}
}

// TestALoadMayTakeAsLongAsItsStart checks that a start with a longer deadline gives its load more
// time.
func TestALoadMayTakeAsLongAsItsStart(t *testing.T) {
	n := newNode(t, func(c *Config) { c.loadTimeout = time.Nanosecond })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := n.Load(ctx, withModel); err != nil {
		t.Error(err)
	}
}

// disk mounts a small file system.
func disk(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("mount: %v; the tests of a full disk need root", err)
		}
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestAFullDiskDoesNotFailALoad checks that the model is loaded although the disk is too full to
// pack it, and that a log line says so.
func TestAFullDiskDoesNotFailALoad(t *testing.T) {
	dir := disk(t, "1m")
	n := newNode(t, func(c *Config) { c.Cache = dir })
	n.answers(n.start("a", withModel))
	n.printing.Lock()
	lines := strings.Join(n.lines["zygote"], "\n")
	n.printing.Unlock()
	if !strings.Contains(lines, "pre-packed weights") {
		t.Errorf("the zygote says %q, want why nothing is pre-packed", lines)
	}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			t.Errorf("%s is left on the full disk", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	n.Close() // before the disk is unmounted
}

// TestADiskThatFillsUpIsTrimmed checks that unused parameters are removed, least recently used
// first, and only while the disk is nearly full.
func TestADiskThatFillsUpIsTrimmed(t *testing.T) {
	dir := disk(t, "12m")
	n := newNode(t, func(c *Config) { c.Cache = dir })
	put := func(name string, bytes int, age time.Duration) {
		t.Helper()
		folder := filepath.Join(dir, name, "ns")
		at := time.Now().Add(-age)
		if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, "weights.bin"), make([]byte, bytes), 0o600),
			os.Chtimes(filepath.Join(dir, name), at, at)); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (names []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	used := zygote.Key{Digest: "in-use", Model: "model.onnx"}
	put(folderOf(used), 2<<20, 9*time.Hour)
	put("older", 2<<20, 3*time.Hour)
	put("newer", 2<<20, time.Hour)
	n.store.mu.Lock()
	n.store.uses["f.ns"] = used
	n.store.mu.Unlock()
	if n.loader.disk.trim(); len(left()) != 3 {
		t.Errorf("left are %v, want all while there is room", left())
	}
	put(removed+"half", 1<<20, 0)
	put("newest", 49<<20/10, 0)
	if n.loader.disk.trim(); strings.Join(left(), " ") != folderOf(used)+" newer newest" {
		t.Errorf("left are %v, want what is used and the newer ones", left())
	}
	n.Close()
}

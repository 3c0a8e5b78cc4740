package keysmanager

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// accountsIn opens accounts that no Stagecoach on this machine uses.
func accountsIn(t *testing.T, dir string) *sandbox.Accounts {
	t.Helper()
	first, last := proctest.Numbers()
	a, err := sandbox.OpenAccounts(filepath.Join(dir, "run"), sandbox.Range{First: first, Last: last})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

func openDir(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	dir, err := os.MkdirTemp("", "accounts-") //nolint:usetesting // a folder that others pass
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

func userOf(t *testing.T, pid int) int {
	t.Helper()
	info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		t.Fatal(err)
	}
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

// TestProcessesRunAsSeparateUsers checks that a zygote and its replicas run as one user, and that
// each other process here has its own user. Pre-packed files are kept per namespace, and only root
// can change them. A later daemon adopts the accounts, so it gives none of them to another process.
func TestProcessesRunAsSeparateUsers(t *testing.T) {
	dir, cache, w := openDir(t), t.TempDir(), wardenOf(t)
	first := accountsIn(t, dir)
	with := func(a *sandbox.Accounts) func(*Config) {
		return func(c *Config) { c.Accounts, c.Cache, c.Warden = a, cache, w }
	}
	old := newNode(t, with(first))
	group, err := first.Group("ns")
	if err != nil {
		t.Fatal(err)
	}
	mine, others, plain := withModel, withModel, node.Spec{Function: "p.ns", Namespace: "ns", Group: group, Image: "test/wait:1"}
	mine.Group = group
	others.Function, others.Namespace = "f.other", "other"
	a, b, c, p := old.start("a", mine), old.start("b", mine), old.start("c", others), old.start("p", plain)
	for _, r := range []*startedReplica{a, b, c, p} {
		old.answers(r)
	}
	users := map[int]bool{userOf(t, a.PID): true, userOf(t, c.PID): true, userOf(t, p.PID): true}
	if len(users) != 3 || userOf(t, b.PID) != userOf(t, a.PID) || users[0] {
		t.Errorf("users %v, and %d of a's sibling", slices.Sorted(maps.Keys(users)), userOf(t, b.PID))
	}
	var packed []string
	if err := filepath.WalkDir(cache, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 0 || info.Mode().Perm()&0o222 != 0 && !d.IsDir() || info.Mode().Perm()&0o022 != 0 {
			t.Errorf("%s: %v of user %d", path, info.Mode(), st.Uid)
		}
		if d.Name() == "weights.bin" {
			packed = append(packed, filepath.Base(filepath.Dir(filepath.Dir(path))))
		}
		return nil
	}); err != nil || !slices.Equal(packed, []string{"ns", "other"}) {
		t.Errorf("packed are %q (%v), want ns and other", packed, err)
	}
	second := mine
	// ./model.onnx is the same model file as model.onnx.
	second.Function, second.Env = "g.ns", map[string]string{"STAGECOACH_MODEL": "./model.onnx", "wait_mean": "1ms"}
	if r := old.start("d", second); r.Path != "cold" && !strings.HasPrefix(r.Path, "fork") {
		t.Errorf("path %q", r.Path)
	}
	if left, err := filepath.Glob(filepath.Join(cache, "*", "*.*")); err != nil || len(left) > 0 {
		t.Errorf("half packed: %q, %v", left, err)
	}
	old.Detach()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	later := accountsIn(t, dir)
	n := newNode(t, with(later))
	for range 50 { // only accounts that are not in use
		l, err := later.Take(0)
		if err != nil || users[l.UID] {
			t.Fatalf("%+v, %v, in use are %v", l, err, users)
		}
		if err := l.Release(); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Stop(t.Context(), "p", time.Minute); err != nil {
		t.Fatal(err)
	}
	n.Close()
}

// TestModelsOfOneNameArePackedSeparately checks that each model is packed separately, also if two
// models of one image have one name.
func TestModelsOfOneNameArePackedSeparately(t *testing.T) {
	dir := openDir(t)
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // an image
		t.Fatal(err)
	}
	image := filepath.Join(dir, "images", "test", "two", "1")
	for _, model := range []string{"det", "rec"} {
		if err := errors.Join(
			os.MkdirAll(filepath.Join(image, model), 0o755),
			os.Link(filepath.Join(images(t).Dir, "stage"), filepath.Join(image, "stage")),
			proctest.Copy(proctest.Built(t, "models", "ocr", model+".onnx"), filepath.Join(image, model, "model.onnx")),
		); err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	for name, accounts := range map[string]Accounts{"of the same user": nil, "of users of their own": accountsIn(t, dir)} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(c *Config) {
				c.Images, c.Accounts, c.Cache = sandbox.Images{Dir: filepath.Join(dir, "images")}, accounts, t.TempDir()
			})
			for _, model := range []string{"det", "rec"} {
				s := withModel
				s.Function, s.Image, s.Start, s.Env = model+".ns", "test/two:1", "fork", map[string]string{"STAGECOACH_MODEL": model + "/model.onnx"}
				n.answers(n.start(model, s))
			}
			packed := map[int64]bool{}
			if err := filepath.WalkDir(n.cfg.Cache, func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.Name() != "model.onnx" {
					return err
				}
				info, err := d.Info()
				if err == nil {
					packed[info.Size()] = true
				}
				return err
			}); err != nil || len(packed) != 2 {
				t.Errorf("packed models of sizes %v (%v), want those of two models", packed, err)
			}
			n.Close()
		})
	}
}

// TestAWatchdogHasNothingOfTheFunction checks that a watchdog, which may be root, gets the
// variables of its function only under other names. So the function cannot change how its watchdog
// runs.
func TestAWatchdogHasNothingOfTheFunction(t *testing.T) {
	m := &starter{cfg: &Config{Watchdog: []string{"stagecoach", "watchdog"}}}
	c := sandbox.Command{Env: map[string]string{"LD_PRELOAD": "/x.so", "PATH": "/x", "STAGECOACH_STAGE_FD": "3", "mode": "http"}}
	if err := m.shim(&c, node.Spec{Process: "cat"}, sandbox.Image{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"STAGECOACH_ENV_LD_PRELOAD", "STAGECOACH_ENV_PATH", "STAGECOACH_ENV_fprocess", "STAGECOACH_ENV_mode",
		"STAGECOACH_HEALTH", "STAGECOACH_IMAGE", "STAGECOACH_READY_PATH", "STAGECOACH_STAGE_FD",
	}
	if got := slices.Sorted(maps.Keys(c.Env)); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

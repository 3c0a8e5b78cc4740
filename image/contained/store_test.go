package contained

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/image"
)

func TestPulledImagesAreReadOnlyViewsUntilTheyAreCollected(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	root := r.pull(name)
	if root.Digest != digest || !root.Stage || root.Config.User != "7:8" || root.Config.WorkDir != "/data" || fmt.Sprint(root.Config.Entrypoint) != "[/stage -v]" || fmt.Sprint(root.Config.Env) != "[A=1]" {
		t.Errorf("root %+v, want that of %s", root, digest)
	}
	if got := content1(t, root, "data/a"); got != "second" {
		t.Errorf("data/a has %q, want that of the last layer", got)
	}
	if _, err := os.Stat(filepath.Join(root.Dir, "data/gone")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("data/gone: %v, want no such file", err)
	}
	if err := os.WriteFile(filepath.Join(root.Dir, "new"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write into the root: %v, want %v", err, syscall.EROFS)
	}
	all, err := r.client.LeasesService().List(t.Context())
	if err != nil || len(all) != 1 || all[0].Labels[labelNode] != "here" || all[0].Labels[labelDigest] != digest {
		t.Errorf("leases %+v, %v, want one of node here", all, err)
	}
	for _, used := range [][]string{{digest}, nil} {
		idle := -time.Minute
		if used == nil {
			idle = time.Hour
		}
		if n, err := r.Collect(t.Context(), used, idle); n != 0 || err != nil || !mounted(root.Dir) {
			t.Errorf("used %q, idle %v: freed %d, %v, want nothing", used, idle, n, err)
		}
	}
	if n, err := r.Collect(t.Context(), nil, -time.Minute); n == 0 || err != nil {
		t.Errorf("freed %d, %v, want the image", n, err)
	}
	r.wantNothingLeft()
}

func TestImagesThatABuildHasStoredAreImportedOnce(t *testing.T) {
	dir := t.TempDir()
	built, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(built.Close)
	r := newRig(t, func(c *Config) { c.Built = built })
	big := strings.Repeat("parameters", 1<<19) // it gets a layer of its own
	for file, content := range map[string]string{"stage": "#!/bin/sh\n", "model.onnx": big} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var roots []image.Root
	for _, user := range []string{"1", "2"} {
		img, err := image.Pack(dir, image.Config{User: user})
		if err != nil {
			t.Fatal(err)
		}
		digest, err := built.Add(t.Context(), img, "team/built:"+user)
		if err != nil {
			t.Fatal(err)
		}
		root, err := r.Root(within(t), "team/built:"+user+"@"+digest)
		if err != nil {
			t.Fatal(err)
		}
		if got := content1(t, root, "model.onnx"); got != big || root.Config.User != user {
			t.Errorf("%d bytes of user %s, want %d of %s", len(got), root.Config.User, len(big), user)
		}
		roots = append(roots, root)
	}
	// Both images have the same layers, so they are the same files.
	if a, b := inode(t, roots[0], "model.onnx"), inode(t, roots[1], "model.onnx"); a != b {
		t.Errorf("inodes %d and %d, want one", a, b)
	}
	if n, err := r.Collect(t.Context(), []string{roots[1].Digest}, -time.Minute); n == 0 || n > int64(len(big)) || err != nil {
		t.Errorf("freed %d, %v, want the configuration alone", n, err)
	}
	if got := content1(t, roots[1], "model.onnx"); got != big {
		t.Errorf("%d bytes after the other image was collected, want %d", len(got), len(big))
	}
	if _, err := r.Root(within(t), "team/built:1@sha256:"+strings.Repeat("0", 64)); !errors.Is(err, image.ErrNoImage) {
		t.Errorf("unknown digest: %v, want %v", err, image.ErrNoImage)
	}
}

func inode(t *testing.T, root image.Root, file string) uint64 {
	t.Helper()
	info, err := os.Stat(filepath.Join(root.Dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestTheNextProcessMountsTheViewsAgain checks that views are there again after a restart of the
// daemon, and after one of the machine, which also ends containerd.
func TestTheNextProcessMountsTheViewsAgain(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	first := r.pull(name)
	dir, fetched := r.cfg.Dir, r.fetched.Load()
	check := func(after string) {
		t.Helper()
		r.open(dir, nil)
		if !mounted(first.Dir) {
			t.Errorf("%s: the view is not mounted before the first start", after)
		}
		root, err := r.Root(within(t), name+"@"+digest)
		if err != nil || root.Dir != first.Dir || content1(t, root, "data/a") != "second" || fmt.Sprint(root.Config) != fmt.Sprint(first.Config) {
			t.Errorf("%s: %+v, %v, want %+v", after, root, err, first)
		}
		if n := r.fetched.Load() - fetched; n != 0 {
			t.Errorf("%s: %d parts were fetched again", after, n)
		}
		if n := len(r.mounts()); n != 1 {
			t.Errorf("%s: %d mounts, want 1", after, n)
		}
	}
	check("kill -9 of the daemon")
	if err := r.Close(); err != nil || len(r.mounts()) != 0 {
		t.Errorf("close: %v, %d mounts, want none", err, len(r.mounts()))
	}
	check("end of the daemon")
	if err := unix.Unmount(first.Dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	r.server.Kill()
	r.back()
	check("restart of the machine")
	if err := unix.Unmount(first.Dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if root, err := r.Root(within(t), name+"@"+digest); err != nil || content1(t, root, "data/a") != "second" {
		t.Errorf("after somebody has unmounted it: %+v, %v", root, err)
	}
	// containerd is away while the daemon starts: what is mounted can still start.
	r.server.Kill()
	check("start while containerd is away")
	r.server.Run()
}

// TestLeftoversOfAnEarlierRunAreRemoved checks that a start of the daemon removes what a run that
// was killed had not completed, and nothing of other nodes.
func TestLeftoversOfAnEarlierRunAreRemoved(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	root := r.pull(name)
	others, err := r.client.LeasesService().Create(t.Context(), leases.WithID("others"), leases.WithLabels(map[string]string{LabelFolder: "/elsewhere", labelDigest: digest}))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(r.recordFile(digest)); err != nil { // as if the view was mounted a moment ago
		t.Fatal(err)
	}
	if _, err := r.lease(t.Context(), "sha256:"+strings.Repeat("a", 64)); err != nil {
		t.Fatal(err)
	}
	r.open(r.cfg.Dir, nil)
	if mounted(root.Dir) {
		t.Errorf("%s is mounted", root.Dir)
	}
	if got := r.left(); len(got) != 1 || got[0] != "lease "+others.ID {
		t.Errorf("left over: %q, want only the lease of another node", got)
	}
}

func TestMirrorsAndCredentialsOfTheOperatorAreUsed(t *testing.T) {
	r := newRig(t, nil)
	mirror := r.serve()
	r.pushedTo(mirror, "a:1", plain(t))
	auth := t.TempDir() + "/config.json"
	if err := os.WriteFile(auth, fmt.Appendf(nil, `{"auths":{%q:{"username":"reader","password":"s3cret"}}}`, mirror), 0o600); err != nil {
		t.Fatal(err)
	}
	r.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if user, password, _ := q.BasicAuth(); user != "reader" || password != "s3cret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, q)
	})
	const name = "registry.invalid/team/a:1"
	hosts := t.TempDir()
	if err := os.MkdirAll(hosts+"/registry.invalid", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hosts+"/registry.invalid/hosts.toml", fmt.Appendf(nil, "server = \"http://%[1]s\"\n[host.\"http://%[1]s\"]\n  capabilities = [\"pull\", \"resolve\"]\n", mirror), 0o600); err != nil {
		t.Fatal(err)
	}
	r.open(t.TempDir(), func(c *Config) { c.HostsDir = hosts })
	if _, err := r.Pull(within(t), name); !errors.Is(err, image.ErrNoImage) || !strings.Contains(err.Error(), "docker login registry.invalid") {
		t.Errorf("without credentials: %v, want the command that logs in", err)
	}
	r.wantNothingLeft()
	r.open(t.TempDir(), func(c *Config) { c.HostsDir, c.Registry.Auth = hosts, auth })
	if root := r.pull(name); content1(t, root, "data/a") != "second" {
		t.Errorf("root %+v", root)
	}
}

func TestConcurrentStartsMakeAnImageReadyOnce(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	var starts sync.WaitGroup
	for i := range 16 {
		starts.Go(func() {
			var err error
			if i%2 == 0 {
				_, err = r.Pull(within(t), name)
			} else {
				_, err = r.Root(within(t), name+"@"+digest)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	starts.Go(func() {
		for range 10 {
			if _, err := r.Collect(within(t), nil, time.Hour); err != nil {
				t.Error(err)
			}
		}
	})
	starts.Wait()
	if n := r.fetched.Load(); n != 3 {
		t.Errorf("%d blobs were fetched, want a configuration and two layers", n)
	}
	if n := len(r.mounts()); n != 1 {
		t.Errorf("%d mounts, want 1", n)
	}
}

// TestCollectionWaitsForStarts makes an image ready and collects it at the same time, many times.
// Starts succeed, and nothing is left at the end.
func TestCollectionWaitsForStarts(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	var works sync.WaitGroup
	for range 4 {
		works.Go(func() {
			for range 10 {
				if _, err := r.Root(within(t), name+"@"+digest); err != nil {
					t.Error(err)
				}
				if _, err := r.Collect(within(t), nil, -time.Minute); err != nil {
					t.Error(err)
				}
			}
		})
	}
	works.Wait()
	r.wantNothingLeft()
}

// TestFormsOfImagesThatRun pulls images that other tools make.
func TestFormsOfImagesThatRun(t *testing.T) {
	r := newRig(t, nil)
	many := []file{text("stage", "one")}
	for i := range 10_000 {
		many = append(many, text(fmt.Sprintf("many/%05d", i), "x"))
	}
	two := indexOf(t, imageOf(t, "linux/arm64", layerOf(t, []file{text("stage", "arm")})), plain(t))
	zstd := layerOf(t, []file{text("stage", "one")}, tarball.WithMediaType(types.OCILayerZStd), zstdCompression)
	for tag, what := range map[string]taggable{
		"index:1": two, "zstd:1": imageOf(t, image.Platform, zstd), "many:1": imageOf(t, image.Platform, layerOf(t, many)), "empty:1": imageOf(t, image.Platform),
		"twice:1": imageOf(t, image.Platform, layerOf(t, []file{text("stage", "one")}), layerOf(t, []file{text("stage", "one")})),
	} {
		t.Run(tag, func(t *testing.T) {
			name, _ := r.pushed(tag, what)
			root := r.pull(name)
			if tag == "empty:1" {
				return
			}
			if got := content1(t, root, "stage"); got != "one" {
				t.Errorf("stage has %q", got)
			}
			if found, err := os.ReadDir(filepath.Join(root.Dir, "many")); tag == "many:1" && (err != nil || len(found) != 10_000) {
				t.Errorf("%d files, %v", len(found), err)
			}
		})
	}
	if _, err := r.Collect(t.Context(), nil, -time.Minute); err != nil {
		t.Error(err)
	}
	r.wantNothingLeft()
}

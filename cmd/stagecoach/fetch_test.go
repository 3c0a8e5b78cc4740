package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// apart starts a node with a folder of images of its own, as on another machine.
func (n *nodesRig) apart(name string, flags ...string) (d *keysDaemon, images string) {
	n.t.Helper()
	images = n.t.TempDir()
	return n.daemon(name, append([]string{"--images", images}, flags...)...), images
}

// logs returns when a daemon's log has all of these texts.
func (n *nodesRig) logs(d *keysDaemon, texts ...string) {
	n.t.Helper()
	for _, text := range texts {
		n.until(soon, fmt.Sprintf("%s to log %q", d.name, text), func() bool { return strings.Contains(d.log.String(), text) })
	}
}

// TestNodesFetchImages deploys functions whose images are folders of up, to nodes without these
// folders. The first node gets them from up, the second one from the first. Parameters come with
// them, and are packed once.
func TestNodesFetchImages(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	d1, images1 := n.apart("n1")
	labels := map[string]string{"min": "1", "max": "1"}
	n.deployAll(fn{"echo", "noop", labels, nil, nil}, waitFn("hold", "1ms", labels, nil))
	n.steady("echo", 1, "n1")
	n.steady("hold", 1, "n1")
	if a := n.must(http.StatusOK, http.MethodPost, "/function/echo", "hello"); string(a.Body) != "hello" {
		t.Errorf("echo answers %q", a.Body)
	}
	n.logs(d1, `sources="[the control plane]"`, "image has arrived")
	if !slices.ContainsFunc(n.line("echo").Events, func(e schema.Event) bool { return e.Phases["image"] != "" }) {
		t.Errorf("no start has the phase image: %+v", n.line("echo").Events)
	}
	if got := n.described("echo"); !regexp.MustCompile(`image \d`).MatchString(got) {
		t.Errorf("describe has no phase image:\n%s", got)
	}
	n.until(soon, "n1 to announce two images", func() bool { i, _ := n.inventory("n1"); return len(i.Images) == 2 })

	t.Log("a second node asks the first one")
	d2, images2 := n.apart("n2")
	n.deployAll(waitFn("hold2", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold2", 2, "n1", "n2")
	n.logs(d2, `sources="[node \"n1\" the control plane]"`, `from="[node \"n1\"]"`)

	t.Log("a restart of the daemon fetches and packs nothing again")
	cache := folders(t, filepath.Join(d1.state, "cache"))
	if len(cache) == 0 {
		t.Error("n1 has packed no parameters")
	}
	fetched := strings.Count(d1.log.String(), "image has arrived")
	kill9(t, d1.Cmd.Process.Pid)
	<-d1.Done
	n.restartDaemon(d1)
	n.steady("hold", 1, "n1", "n2")
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	if again := strings.Count(d1.log.String(), "image has arrived"); again != fetched {
		t.Errorf("n1 has fetched %d images, and %d after its restart", fetched, again)
	}
	if now := folders(t, filepath.Join(d1.state, "cache")); fmt.Sprint(now) != fmt.Sprint(cache) {
		t.Errorf("n1 has packed parameters in %v, and in %v after its restart", cache, now)
	}
	for _, dir := range []string{images1, images2} {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("%v, %v, want only the store", entries, err)
		}
	}
}

// folders returns the names of the folders in a folder.
func folders(t *testing.T, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && path != dir {
			names = append(names, d.Name())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestFolderChanges edits the folder of an image. The next start on a node without the folder has
// the new content.
func TestFolderChanges(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	folder := filepath.Join(dir, "team", "echo", "1")
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(proctest.Built(t, "images"), "stagecoach", "noop", "0.1.0"))); err != nil {
		t.Fatal(err)
	}
	n := startNodes(t, "--no-node", "--images", dir)
	d, _ := n.apart("n1")
	echo := client.Deployment{Service: "echo", Image: "team/echo:1", Labels: map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"}}
	deploy := func() {
		t.Helper()
		if err := n.Deploy(t.Context(), echo); err != nil {
			t.Fatal(err)
		}
		n.steady("echo", 1, "n1")
	}
	deploy()
	first := strings.Count(d.log.String(), "image has arrived")
	if err := os.WriteFile(filepath.Join(folder, "more"), []byte("more"), 0o600); err != nil {
		t.Fatal(err)
	}
	echo.EnvVars = map[string]string{"X": "1"}
	deploy()
	n.until(soon, "the changed folder to arrive", func() bool { return strings.Count(d.log.String(), "image has arrived") == first+1 })
	if first != 1 {
		t.Errorf("%d images have arrived before the change, want 1", first)
	}
	n.until(soon, "n1 to announce two images", func() bool { i, _ := n.inventory("n1"); return len(i.Images) == 2 })
}

// TestNodesFetchBuiltImages deploys a stage that a build has stored. The node fetches it by digest.
func TestNodesFetchBuiltImages(t *testing.T) {
	t.Parallel()
	images, _ := builtStage(t)
	n := startNodes(t, "--no-node", "--images", images)
	d, _ := n.apart("n1")
	hold := waitFn("hold", "1ms", nil, nil)
	hold.image = "team/wait:1"
	n.deployAll(hold)
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	n.logs(d, "image has arrived")
	if err := os.RemoveAll(images); err != nil {
		t.Fatal(err)
	}
	kill9(t, d.Cmd.Process.Pid)
	<-d.Done
	n.restartDaemon(d)
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
}

// TestUnknownImagesOnANode removes images of up after their deploy: one by digest, and a folder.
// The starts on a node fail, and both sides say why.
func TestUnknownImagesOnANode(t *testing.T) {
	t.Parallel()
	images, store := builtStage(t)
	digest, err := store.Resolve("team/wait:1")
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(images, "team", "echo", "1")
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(proctest.Built(t, "images"), "stagecoach", "noop", "0.1.0"))); err != nil {
		t.Fatal(err)
	}
	n := startNodes(t, "--no-node", "--images", images)
	n.deployAll(fn{"echo", "team/echo:1", nil, nil, nil}, fn{"hold", "team/wait:1", nil, nil, nil})
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(images, ".oci", "blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))); err != nil {
		t.Fatal(err)
	}
	d, _ := n.apart("n1")
	n.logs(d, "folder of images is not on this node", "image is not on this node", digest)
	for function, want := range map[string]string{"echo": "no folder", "hold": digest} {
		n.until(soon, "the status of "+function+" to say why", func() bool {
			got := n.described(function)
			return strings.Contains(got, "no such image") && strings.Contains(got, `node "n1"`) && strings.Contains(got, want)
		})
	}
}

// described returns what `stagecoach describe` prints about a function.
func (n *nodesRig) described(function string) string {
	var out strings.Builder
	// The caller looks at what was printed so far.
	_ = run(n.t.Context(), []string{"describe", "--gateway", n.Base, function}, &out)
	return out.String()
}

// TestNodesRemoveUnusedImages tells a node's images which of two is in use. The other one goes, but
// not before the control plane has said so, nor when that was long ago.
func TestNodesRemoveUnusedImages(t *testing.T) {
	t.Parallel()
	dir, store := builtStage(t)
	used, err := store.Resolve("team/wait:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Remove(t.Context(), "team/wait:1"); err != nil {
		t.Fatal(err)
	}
	other, err := image.PackFolder(t.Context(), store, proctest.Built(t, "images", "stagecoach", "noop", "0.1.0"), true)
	if err != nil {
		t.Fatal(err)
	}
	n := newNodeImages(&images{folders: sandbox.Images{Dir: dir}, store: store}, 0, "node-n1", slog.New(slog.DiscardHandler))
	defer n.close()
	for _, digest := range []string{used, other} {
		if _, err := store.Root(t.Context(), digest); err != nil {
			t.Fatal(err)
		}
	}
	has := func(digests ...string) {
		t.Helper()
		got := n.list()
		slices.Sort(got)
		slices.Sort(digests)
		if !slices.Equal(got, digests) {
			t.Errorf("the node has %v, want %v", got, digests)
		}
	}
	clean := func(idle time.Duration) {
		t.Helper()
		if _, err := n.clean(t.Context(), idle); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-3 * time.Hour)
	age := func() {
		t.Helper()
		err := filepath.WalkDir(image.Dir(store), func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Chtimes(path, old, old))
		})
		if err != nil {
			t.Fatal(err)
		}
		n.forgetLook()
	}
	age()
	clean(2 * time.Hour)
	has(used, other)
	if err := n.use(t.Context(), []string{used}); err != nil {
		t.Fatal(err)
	}
	n.noted = old
	clean(2 * time.Hour)
	has(used, other)
	n.noted = time.Now()
	clean(4 * time.Hour)
	has(used, other)
	age()
	if err := n.use(t.Context(), []string{used}); err != nil {
		t.Fatal(err)
	}
	clean(2 * time.Hour)
	has(used)
}

// TestAFetchedFolderRunsAsAFolder checks that a program that does not speak the stage protocol runs
// among the machine's files, as from the folder itself.
func TestAFetchedFolderRunsAsAFolder(t *testing.T) {
	t.Parallel()
	dir, folder := t.TempDir(), t.TempDir()
	store, err := image.OpenStore(image.Folder(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := os.WriteFile(filepath.Join(folder, "serve"), []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	i := &images{folders: sandbox.Images{Dir: dir}, store: store}
	for _, stage := range []bool{false, true} {
		digest, err := image.PackFolder(t.Context(), store, folder, stage)
		if err != nil {
			t.Fatal(err)
		}
		i.packed.set("Team/Serve:1", digest) // a name that no registry accepts
		got, err := i.Resolve("Team/Serve:1")
		if err != nil || got.Stage != stage || got.Rootfs || "sha256:"+got.Digest != digest {
			t.Errorf("stage %v: %+v, %v, want no root of its own and the digest %s", stage, got, err, digest)
		}
	}
}

// TestFarNodesFetchImages runs nodes that share no files with up. The first one gets images over
// the tunnel from up, and the second one from the first.
func TestFarNodesFetchImages(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	d1 := n.farDaemon("n1", "--images", t.TempDir())
	one := map[string]string{"min": "1", "max": "1"}
	n.deployAll(fn{"echo", "noop", one, nil, nil}, waitFn("hold", "1ms", one, nil))
	n.steady("echo", 1, "n1")
	n.steady("hold", 1, "n1")
	n.must(http.StatusOK, http.MethodPost, "/function/hold", "x")
	n.logs(d1, `sources="[the control plane]"`, "image has arrived")
	n.until(soon, "n1 to announce two images", func() bool { i, _ := n.inventory("n1"); return len(i.Images) == 2 })
	d2 := n.farDaemon("n2", "--images", t.TempDir())
	n.deployAll(waitFn("hold2", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold2", 2, "n1", "n2")
	n.logs(d2, `sources="[node \"n1\" the control plane]"`, `from="[node \"n1\"]"`)
	if log := d2.log.String(); strings.Contains(log, "broke off") {
		t.Errorf("a transfer between nodes broke off:\n%s", log)
	}
}

// TestFarNodesPassOverADarkOne has a node announce an image, and then an address that answers
// nothing, as behind a firewall that lets only up through. Another node gets the image from up.
func TestFarNodesPassOverADarkOne(t *testing.T) {
	t.Parallel()
	n := startNodes(t, "--no-node")
	between := newCutter(t, "127.0.0.1:"+freePort(t))
	n.daemon("n1", "--listen", between.to, "--advertise", between.Addr().String(), "--remote", "--images", t.TempDir())
	n.deployAll(waitFn("hold", "1ms", map[string]string{"min": "1", "max": "1"}, nil))
	n.steady("hold", 1, "n1")
	n.until(soon, "n1 to announce an image", func() bool { i, _ := n.inventory("n1"); return len(i.Images) == 1 })
	dark, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts
	if err != nil {
		t.Fatal(err)
	}
	defer dark.Close()
	between.mu.Lock()
	between.to = dark.Addr().String()
	between.mu.Unlock()
	d2 := n.farDaemon("n2", "--images", t.TempDir())
	n.deployAll(waitFn("hold2", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold2", 2, "n1", "n2")
	n.logs(d2, `sources="[node \"n1\" the control plane]"`, "is not reached", `from="[the control plane]"`)
}

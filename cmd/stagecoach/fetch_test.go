package main

import (
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
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
	var out strings.Builder
	if err := run(t.Context(), []string{"describe", "--gateway", n.Base, "echo"}, &out); err != nil || !strings.Contains(out.String(), "image ") {
		t.Errorf("%v; describe has no phase image:\n%s", err, out.String())
	}
	n.until(soon, "n1 to announce two images", func() bool { i, _ := n.inventory("n1"); return len(i.Images) == 2 })

	t.Log("a second node asks the first one")
	d2, images2 := n.apart("n2")
	n.deployAll(waitFn("hold2", "1ms", map[string]string{"min": "2", "max": "2"}, nil))
	n.steady("hold2", 2, "n1", "n2")
	n.logs(d2, `sources="[node \"n1\" the control plane]"`, "image has arrived")

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
	i, _ := n.inventory("n1")
	if first != 1 || len(i.Images) != 2 {
		t.Errorf("%d images have arrived before the change, and n1 has %v after it, want 1 and 2", first, i.Images)
	}
}

// TestUnknownImageOnANode removes an image from the store of up after its deploy. The node's start
// fails, and both sides say why.
func TestUnknownImageOnANode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	folder := filepath.Join(dir, "team", "echo", "1")
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(proctest.Built(t, "images"), "stagecoach", "noop", "0.1.0"))); err != nil {
		t.Fatal(err)
	}
	n := startNodes(t, "--no-node", "--images", dir)
	if err := n.Deploy(t.Context(), client.Deployment{Service: "echo", Image: "team/echo:1"}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "team")); err != nil {
		t.Fatal(err)
	}
	d, _ := n.apart("n1")
	n.logs(d, "cannot be fetched", "no such image")
	n.until(soon, "the status to say why", func() bool {
		return strings.Contains(n.status("echo"), "no such image") && strings.Contains(n.status("echo"), "n1")
	})
}

// status returns what `stagecoach describe` prints about a function.
func (n *nodesRig) status(function string) string {
	var out strings.Builder
	_ = run(n.t.Context(), []string{"describe", "--gateway", n.Base, function}, &out) // the text has what is wanted
	return out.String()
}

package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// viewsBelow returns what is mounted below a folder.
func viewsBelow(t *testing.T, dir string) (all []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if at := strings.Fields(line)[1]; strings.HasPrefix(at, dir+"/") {
			all = append(all, at)
		}
	}
	return all
}

// builtStage makes a folder of images whose store has the stage team/wait:1.
func builtStage(t *testing.T) (images string, store *image.Store) {
	t.Helper()
	images = t.TempDir()
	store, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	stage, err := image.Pack(proctest.Built(t, "images", "stagecoach", "wait", "0.1.0"), image.Config{
		Entrypoint: []string{"/stage"}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion},
	})
	if err == nil {
		_, err = store.Add(t.Context(), stage, "team/wait:1")
	}
	if err != nil {
		t.Fatal(err)
	}
	return images, store
}

// TestFunctionsRunFromImagesInContainerd deploys a stage that a build has stored, and an image of
// another kind from a registry. Both run from views of containerd's snapshots, also after a kill -9
// of `up` without the registry. A deploy of an image that cannot run changes nothing.
func TestFunctionsRunFromImagesInContainerd(t *testing.T) {
	_, flags := containerFlags(t)
	images, store := builtStage(t)
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer reg.Close()
	repository := strings.TrimPrefix(reg.URL, "http://") + "/team/who:"
	files, build := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(build, "main.go"), []byte(rootProgram), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", filepath.Join(files, "who"), filepath.Join(build, "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for version, platform := range map[string]string{"1": "", "2": "linux/arm64"} {
		who, err := image.Pack(files, image.Config{Entrypoint: []string{"/who"}, Env: []string{"VERSION=one", "fprocess=/who"}, User: "1000", Platform: platform})
		if err == nil {
			_, err = store.Add(t.Context(), who, repository+version)
		}
		if err == nil {
			_, err = image.Registry{}.Push(t.Context(), store, repository+version)
		}
		if err == nil {
			err = store.Remove(t.Context(), repository+version)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Collect(t.Context(), nil, -time.Minute); err != nil { // so that both are pulled
		t.Fatal(err)
	}
	r := start(t, append(flags, "--images", images)...)
	for service, image := range map[string]string{"wait": "team/wait:1", "who": repository + "1"} {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(`{"service":%q,"image":%q}`, service, image), "Content-Type", "application/json")
	}
	answer := func(when string) {
		t.Helper()
		r.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
		if got := string(r.must(http.StatusOK, http.MethodPost, "/function/who", "x").Body); !strings.HasPrefix(got, "one uid=1000 pid=") {
			t.Errorf("%s: got %q, want the image's program", when, got)
		}
		if got := viewsBelow(t, filepath.Join(r.state, "containerd", "images")); len(got) != 2 {
			t.Errorf("%s: views %q, want 2", when, got)
		}
	}
	answer("after the deploy")
	refused := r.must(http.StatusBadRequest, http.MethodPut, "/system/functions", fmt.Sprintf(`{"service":"who","image":"%s2"}`, repository), "Content-Type", "application/json")
	if !strings.Contains(string(refused.Body), "it is for linux/arm64, want linux/amd64") {
		t.Errorf("an image of another platform: %s", refused.Body)
	}
	answer("after a deploy that was refused")
	reg.Close()
	r.kill()
	r.restart()
	answer("after kill -9")
	r.stop()
	if got := viewsBelow(t, r.state); len(got) != 0 {
		t.Errorf("after the end: %q are mounted", got)
	}
}

// TestNodesImportImagesIntoContainerd deploys a stage to an `up` that is no node. The node imports
// the stage by digest, and a second daemon of the node has it at once.
func TestNodesImportImagesIntoContainerd(t *testing.T) {
	_, flags := containerFlags(t)
	images, _ := builtStage(t)
	n := startNodes(t, "--no-node", "--images", images)
	var d *keysDaemon
	t.Cleanup(func() { // after the daemon's end
		if got := viewsBelow(t, d.state); len(got) != 0 {
			t.Errorf("after the end: %q are mounted", got)
		}
	})
	d = n.daemon("node-a", append(flags, "--images", images)...)
	n.must(http.StatusAccepted, http.MethodPost, "/system/functions", `{"service":"wait","image":"team/wait:1"}`, "Content-Type", "application/json")
	n.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
	if err := d.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.Done
	n.restartDaemon(d)
	n.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
	if got := viewsBelow(t, filepath.Join(d.state, "containerd", "images")); len(got) != 1 {
		t.Errorf("views %q, want 1", got)
	}
}

// TestNodesImportFetchedImages runs a node with containers and with a folder of images of its own.
// It fetches a built stage and a folder of images from `up`, and imports both into containerd.
func TestNodesImportFetchedImages(t *testing.T) {
	_, flags := containerFlags(t)
	images, _ := builtStage(t)
	noop := filepath.Join(images, "team", "noop", "1")
	if err := os.CopyFS(noop, os.DirFS(proctest.Built(t, "images", "stagecoach", "noop", "0.1.0"))); err != nil {
		t.Fatal(err)
	}
	n := startNodes(t, "--no-node", "--images", images)
	d, _ := n.apart("node-a", flags...)
	for _, service := range []string{"wait", "noop"} {
		n.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(`{"service":%q,"image":"team/%s:1"}`, service, service), "Content-Type", "application/json")
		n.must(http.StatusOK, http.MethodPost, "/function/"+service, "x")
	}
	n.logs(d, "image has arrived")
	if got := viewsBelow(t, filepath.Join(d.state, "containerd", "images")); len(got) != 2 {
		t.Errorf("views %q, want 2", got)
	}
}

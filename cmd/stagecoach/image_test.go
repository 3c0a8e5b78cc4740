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

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// rootProgram answers like a CGI program, with its argument, its user, the content of its root and
// its secret.
const rootProgram = `package main

import ("fmt"; "os")

func main() {
	if os.Getenv("WRITES") != "" {
		fmt.Print(os.WriteFile("/home", nil, 0o600), ", ", os.WriteFile("/tmp/x", nil, 0o600))
		return
	}
	entries, _ := os.ReadDir("/")
	names := ""
	for _, e := range entries { names += " " + e.Name() }
	secret, err := os.ReadFile(os.Getenv("secret_mount_path") + "/key")
	fmt.Printf("%s uid=%d pid=%d root=%s secret=%s %v", os.Getenv("VERSION"), os.Getuid(), os.Getpid(), names, secret, err)
}
`

// throughAFile saves the built images, removes them, and loads them again, beside an up on the same
// store.
func (c *operator) throughAFile(images string) {
	c.t.Helper()
	const name = "example/double:latest"
	c.run(`IMAGE +SIZE +DIGEST +ADDED\n`+name+` +2\.\d MiB +sha256:[0-9a-f]{12} +20\S+Z\n`, "", "image", "list", "--images", images)
	c.run("", "", "image", "save", "double.tar", name, "--images", images)
	c.run(name+": removed", "", "image", "remove", name, "--images", images)
	c.refuse("stagecoach build.*stagecoach image load.*stagecoach image pull", "", "deploy", "--filter", "double")
	c.refuse("no such image", "", "image", "remove", name, "--images", images)
	c.run(name+": loaded, sha256:", "", "image", "load", "double.tar", "--images", images)
}

// closed deploys an image with and without a root that it may write to.
func closed(r *rig, name string) {
	r.t.Helper()
	for readOnly, want := range map[bool]string{
		true:  "open /home: read-only file system, <nil>",
		false: "open /home: permission denied, <nil>", // the root's folder is not the user's
	} {
		service := fmt.Sprintf("writes-%t", readOnly)
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", fmt.Sprintf(
			`{"service":%q,"image":%q,"envVars":{"WRITES":"1"},"readOnlyRootFilesystem":%t}`, service, name, readOnly), "Content-Type", "application/json")
		if got := string(r.must(http.StatusOK, http.MethodPost, "/function/"+service, "x").Body); got != want {
			r.t.Errorf("read-only %t: got %q, want %q", readOnly, got, want)
		}
	}
}

// stored pulls an image into a store, where its name stands for it from then on.
func stored(t *testing.T, name string) {
	t.Helper()
	images := t.TempDir()
	var out strings.Builder
	if err := run(t.Context(), []string{"image", "pull", name, "--images", images}, &out); err != nil || !strings.Contains(out.String(), name+": pulled, sha256:") {
		t.Errorf("pull: %v, %q", err, out.String())
	}
	out.Reset()
	if err := run(t.Context(), []string{"image", "list", "--json", "--images", images}, &out); err != nil || !strings.Contains(out.String(), `[{"image":"`+name+`","digest":"sha256:`) {
		t.Errorf("list: %v, %q", err, out.String())
	}
}

// TestImagesFromARegistry deploys an image of a registry, moves its tag, and shuts the registry
// down.
func TestImagesFromARegistry(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the image is no stage")
	}
	t.Parallel()
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer reg.Close()
	name := strings.TrimPrefix(reg.URL, "http://") + "/team/who:1"
	build := t.TempDir()
	if err := os.WriteFile(filepath.Join(build, "main.go"), []byte(rootProgram), 0o644); err != nil {
		t.Fatal(err)
	}
	files := t.TempDir()
	cmd := exec.Command("go", "build", "-o", filepath.Join(files, "who"), filepath.Join(build, "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	push := func(version string) {
		t.Helper()
		s, err := image.OpenStore(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		img, err := image.Pack(files, image.Config{Entrypoint: []string{"/who"}, Env: []string{"VERSION=" + version, "fprocess=/who"}, User: "1000"})
		if err == nil {
			_, err = s.Add(t.Context(), img, name)
		}
		if err == nil {
			_, err = (image.Registry{}).Push(t.Context(), s, name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r := start(t)
	r.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"key","value":"s3cret"}`, "Content-Type", "application/json")
	put := func(method string, status int) client.Answer {
		t.Helper()
		return r.must(status, method, "/system/functions", fmt.Sprintf(`{"service":"who","image":%q,"secrets":["key"]}`, name), "Content-Type", "application/json")
	}
	says := func(version string) {
		t.Helper()
		got := string(r.must(http.StatusOK, http.MethodPost, "/function/who", "x").Body)
		if want := version + " uid=1000 pid=1 root= dev etc proc tmp var who secret=s3cret <nil>"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	put(http.MethodPost, http.StatusBadRequest) // nothing of this name there yet
	push("one")
	put(http.MethodPost, http.StatusAccepted)
	says("one")
	push("two") // the tag moves: nothing changes until the next deploy
	r.stop()
	r.restart()
	says("one")
	put(http.MethodPut, http.StatusAccepted)
	r.until(soon, "the new image to answer", func() bool {
		return strings.HasPrefix(string(r.send(http.MethodPost, "/function/who", "x").Body), "two ")
	})
	says("two")
	closed(r, name)
	stored(t, name)
	reg.Close()
	if a := put(http.MethodPut, http.StatusBadGateway); a.Header.Get("X-OpenFaaS-Internal") == "" || !strings.Contains(string(a.Body), "connection refused") {
		t.Errorf("without its registry: %v %s", a.Header, a.Body)
	}
	says("two")
}

// TestADigestThatIsNotThere checks the error of an order for an image that a node's store does not
// have, or whose digest is invalid.
func TestADigestThatIsNotThere(t *testing.T) {
	store, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	i := &images{folders: sandbox.Images{Dir: t.TempDir()}, store: store}
	digest := "sha256:" + strings.Repeat("0", 64)
	for name, want := range map[string]string{
		"team/ocr:1@" + digest: "deploy the function again",
		"team/ocr:1@sha256:12": "64 hexadecimal",
		"team/ocr:1":           `"team/ocr:1"`,
	} {
		if _, err := i.Resolve(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}

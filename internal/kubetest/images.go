package kubetest

import (
	"archive/tar"
	"bytes"
	"io"
	"log"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// serveImages starts the registry, with the image of all pods' pause container.
func (c *Cluster) serveImages() {
	c.t.Helper()
	l := c.net.Clients.Listen(5000)
	c.Registry = l.Addr().String()
	//nolint:gosec // without limits, for a test
	s := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	go func() { _ = s.Serve(l) }() // until the test ends
	c.t.Cleanup(func() { _ = s.Close() })
	program := filepath.Join(c.dir, "pod")
	build := exec.Command("go", "build", "-o", program, "github.com/stagecoach-serving/stagecoach/internal/kubetest/pod")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		c.t.Fatalf("%v: %v\n%s", build, err, out)
	}
	c.Image("pod:1", map[string]string{"/pod": program}, "/pod", "pause")
}

// Image pushes an image that has only some files of this machine, by their paths in the image. It
// returns the name for pods.
func (c *Cluster) Image(ref string, files map[string]string, entrypoint ...string) string {
	c.t.Helper()
	return c.image(ref, files, v1.Config{Entrypoint: entrypoint})
}

// Stage is Image for a stage, whose program is /stage.
func (c *Cluster) Stage(ref string, files map[string]string, env ...string) string {
	c.t.Helper()
	return c.image(ref, files, v1.Config{Entrypoint: []string{"/stage"}, Env: env, Labels: map[string]string{"dev.stagecoach.protocol": "1"}})
}

func (c *Cluster) image(ref string, files map[string]string, runs v1.Config) string {
	c.t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, to := range slices.Sorted(maps.Keys(files)) {
		b, err := os.ReadFile(files[to])
		if err == nil {
			err = w.WriteHeader(&tar.Header{Name: strings.TrimPrefix(path.Clean(to), "/"), Mode: 0o755, Size: int64(len(b)), Typeflag: tar.TypeReg})
		}
		if err == nil {
			_, err = w.Write(b)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		c.t.Fatal(err)
	}
	image, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), static.NewLayer(layer.Bytes(), types.OCIUncompressedLayer))
	if err != nil {
		c.t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		c.t.Fatal(err)
	}
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = runs
	if image, err = mutate.ConfigFile(image, config); err != nil {
		c.t.Fatal(err)
	}
	return c.Push(ref, image)
}

// Push puts an image into the registry, and returns the name for pods.
func (c *Cluster) Push(ref string, image v1.Image) string {
	c.t.Helper()
	full := c.Registry + "/" + ref
	at, err := name.ParseReference(full, name.Insecure)
	if err != nil {
		c.t.Fatal(err)
	}
	way := &http.Transport{DialContext: c.net.Clients.Dial}
	defer way.CloseIdleConnections()
	if err := remote.Write(at, image, remote.WithTransport(way)); err != nil {
		c.t.Fatal(err)
	}
	return full
}

package contained

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
)

// namespace is the namespace of containerd in tests.
const namespace = "stagecoach-images"

// rig is a containerd, a registry, and the images of a node.
type rig struct {
	*Store

	t       *testing.T
	server  *containerdtest.Server
	client  *containerd.Client // past any proxy
	log     *bytes.Buffer
	host    string // of the registry
	front   atomic.Pointer[func(http.ResponseWriter, *http.Request, http.Handler)]
	fetched atomic.Int64 // blobs that the registry was asked for
}

// newRig opens a node's images. change may change the configuration.
func newRig(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := &rig{t: t, server: containerdtest.Start(t)}
	r.client = r.server.Client(namespace)
	r.host = r.serve()
	r.open(t.TempDir(), change)
	return r
}

// serve starts a registry and returns its host.
func (r *rig) serve() string {
	all := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
			r.fetched.Add(1)
		}
		if f := r.front.Load(); f != nil {
			(*f)(w, q, all)
			return
		}
		all.ServeHTTP(w, q)
	}))
	r.t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// behind puts a handler before the registry.
func (r *rig) behind(f func(http.ResponseWriter, *http.Request, http.Handler)) { r.front.Store(&f) }

// open opens the node's images in a folder, as a new process does.
func (r *rig) open(dir string, change func(*Config)) {
	r.t.Helper()
	r.log = &bytes.Buffer{}
	c := Config{Address: r.server.Address, Namespace: namespace, Node: "here", Dir: dir, HostsDir: r.t.TempDir(), Log: slog.New(slog.NewTextHandler(r.log, nil))}
	if change != nil {
		change(&c)
	}
	s, err := Open(r.t.Context(), c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Store = s
	r.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			r.t.Error(err)
		}
	})
}

// file is an entry of a layer.
type file struct {
	tar.Header

	content string
}

func text(name, content string) file {
	return file{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(content))}, content}
}

func link(name, to string) file {
	return file{tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}, ""}
}

// layerOf makes a layer, compressed with gzip unless options say otherwise.
func layerOf(t *testing.T, files []file, options ...tarball.LayerOption) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		if err := w.WriteHeader(&f.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }, options...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// imageOf makes an image for a platform, such as linux/amd64.
func imageOf(t *testing.T, platform string, layers ...v1.Layer) v1.Image {
	t.Helper()
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	var adds []mutate.Addendum
	for _, l := range layers {
		kind, err := l.MediaType()
		if err != nil {
			t.Fatal(err)
		}
		adds = append(adds, mutate.Addendum{Layer: l, MediaType: kind})
	}
	img, err := mutate.Append(base, adds...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture, _ = strings.Cut(platform, "/")
	c.Config = v1.Config{Entrypoint: []string{"/stage"}, Cmd: []string{"-v"}, Env: []string{"A=1"}, User: "7:8", WorkingDir: "/data", Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion}}
	img, err = mutate.ConfigFile(img, c)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// pushed pushes an image or an index to the registry. It returns the name and the digest.
func (r *rig) pushed(tag string, what remote.Taggable) (name, digest string) {
	r.t.Helper()
	return r.pushedTo(r.host, tag, what)
}

func (r *rig) pushedTo(host, tag string, what remote.Taggable) (ref, digest string) {
	r.t.Helper()
	ref = host + "/team/" + tag
	at, err := name.ParseReference(ref)
	if err == nil {
		err = remote.Push(at, what)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	d, err := what.(interface{ Digest() (v1.Hash, error) }).Digest()
	if err != nil {
		r.t.Fatal(err)
	}
	return ref, d.String()
}

// plain is a small image of two layers.
func plain(t *testing.T) v1.Image {
	t.Helper()
	return imageOf(t, image.Platform, layerOf(t, []file{text("stage", "one"), text("data/a", "first"), text("data/gone", "x")}),
		layerOf(t, []file{text("data/a", "second"), text("data/.wh.gone", "")}))
}

// pull pulls an image that has to be good, and returns its root.
func (r *rig) pull(name string) image.Root {
	r.t.Helper()
	digest, err := r.Pull(r.t.Context(), name)
	if err != nil {
		r.t.Fatal(err)
	}
	root, err := r.Root(r.t.Context(), name+"@"+digest)
	if err != nil {
		r.t.Fatal(err)
	}
	return root
}

// left returns all that containerd and the machine have of this test's images.
func (r *rig) left() (all []string) {
	r.t.Helper()
	ctx := r.t.Context()
	leases, err := r.client.LeasesService().List(ctx)
	for _, l := range leases {
		all = append(all, "lease "+l.ID)
	}
	if err == nil {
		err = r.client.ContentStore().Walk(ctx, func(i content.Info) error { all = append(all, "content "+i.Digest.String()); return nil })
	}
	if err == nil {
		err = r.client.SnapshotService(r.cfg.Snapshotter).Walk(ctx, func(_ context.Context, i snapshots.Info) error {
			all = append(all, "snapshot "+i.Name)
			return nil
		})
	}
	var writes []content.Status
	if err == nil {
		writes, err = r.client.ContentStore().ListStatuses(ctx)
	}
	for _, w := range writes {
		all = append(all, "unfinished "+w.Ref)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	for _, at := range r.mounts() {
		all = append(all, "mount "+at)
	}
	files, err := os.ReadDir(r.cfg.Dir)
	for _, f := range files {
		all = append(all, "file "+f.Name())
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// mounts returns what is mounted below the folder of the views.
func (r *rig) mounts() (all []string) {
	r.t.Helper()
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(fields[1], r.cfg.Dir+"/") {
			all = append(all, fields[1])
		}
	}
	return all
}

// wantNothingLeft checks that no part of an image is anywhere.
func (r *rig) wantNothingLeft() {
	r.t.Helper()
	if all := r.left(); len(all) > 0 {
		r.t.Errorf("left over:\n%s", strings.Join(all, "\n"))
	}
	if strings.Contains(r.log.String(), "may be left in containerd") {
		r.t.Errorf("log: %s", r.log)
	}
}

// back starts containerd again, and waits until the node's connection works.
func (r *rig) back() {
	r.t.Helper()
	r.server.Run()
	ctx := within(r.t)
	for r.probe(ctx) != nil {
		select {
		case <-time.After(10 * time.Millisecond): // the connection sends no event
		case <-ctx.Done():
			r.t.Fatal(ctx.Err())
		}
	}
	r.log.Reset()
}

// within returns a context with a deadline that is never reached unless something hangs.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func content1(t *testing.T, root image.Root, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root.Dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

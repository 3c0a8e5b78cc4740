package image

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// compressed makes an image for an architecture, with compressed layers as other tools make them.
func compressed(t *testing.T, arch string, how compression.Compression, kind types.MediaType, content []byte) v1.Image {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil },
		tarball.WithCompression(how), tarball.WithMediaType(kind))
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.ConfigFile(mutate.MediaType(empty.Image, types.OCIManifestSchema1), &v1.ConfigFile{OS: "linux", Architecture: arch})
	if err == nil {
		img, err = mutate.AppendLayers(img, l)
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestPullFromIndexesWithCompressedLayers pulls from indexes of several platforms.
func TestPullFromIndexesWithCompressedLayers(t *testing.T) {
	noHome(t)
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	host := strings.TrimPrefix(srv.URL, "http://")
	arm := compressed(t, "arm64", compression.GZip, types.OCILayer, archive(t, file("arm64", "x")))
	push := func(to string, all map[string]v1.Image) string {
		t.Helper()
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for arch, img := range all {
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
		}
		ref, err := name.ParseReference(host + "/" + to)
		if err == nil {
			err = remote.WriteIndex(ref, index)
		}
		if err != nil {
			t.Fatal(err)
		}
		return host + "/" + to
	}
	for tag, kind := range map[string]types.MediaType{"gzip": types.OCILayer, "zstd": types.OCILayerZStd} {
		t.Run(tag, func(t *testing.T) {
			img := compressed(t, "amd64", compression.Compression(tag), kind, archive(t, dir("d"), file("d/amd64", tag)))
			s := store(t, t.TempDir())
			d, err := Registry{}.Pull(t.Context(), s, push("f:"+tag, map[string]v1.Image{"arm64": arm, "amd64": img}))
			if err != nil {
				t.Fatal(err)
			}
			root, err := s.Root(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			if got := tree(t, root.Dir); len(got) != 2 || !strings.HasSuffix(got["d/amd64"], tag) {
				t.Errorf("unpacked %v", got)
			}
		})
	}
	_, err := Registry{}.Pull(t.Context(), store(t, t.TempDir()), push("f:arm", map[string]v1.Image{"arm64": arm}))
	if !errors.Is(err, ErrNoImage) || !strings.Contains(err.Error(), "for linux/amd64 in its index") {
		t.Errorf("no image for this platform: %v", err)
	}
}

// TestCollectWaitsForALoad collects in another process while an archive is loaded. The unfinished
// image stays.
func TestCollectWaitsForALoad(t *testing.T) {
	from, to := store(t, t.TempDir()), t.TempDir()
	add(t, from, packed(t, folder(t), stageConfig), "a:1")
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	loaded := make(chan error, 1)
	loader := store(t, to)
	go func() {
		_, err := loader.Load(context.WithoutCancel(t.Context()), pipe, "")
		loaded <- err
	}()
	w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // waits for the reader
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := store(t, to).Collect(ctx, nil, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("collect: %v, want it to wait", err)
	}
	if err := errors.Join(from.Save(t.Context(), w, "a:1"), w.Close(), <-loaded); err != nil {
		t.Error(err)
	}
}

package contained

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/image"
)

type taggable = remote.Taggable

var zstdCompression = tarball.WithCompression(compression.ZStd)

// indexOf makes an index of images.
func indexOf(t *testing.T, images ...v1.Image) v1.ImageIndex {
	t.Helper()
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, img := range images {
		c, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: c.Platform()}})
	}
	return index
}

// TestImagesThatAreRefused deploys images that cannot run. The error names the image, what is wrong
// and what to do, and nothing of the image is left.
func TestImagesThatAreRefused(t *testing.T) {
	r := newRig(t, nil)
	one := layerOf(t, []file{text("stage", "one")})
	other := layerOf(t, []file{text("stage", "other")})
	lies := func() v1.Image { // whose configuration names other files than its layer has
		img := imageOf(t, image.Platform, one)
		c, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		if c.RootFS.DiffIDs[0], err = other.DiffID(); err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.ConfigFile(img, c); err != nil {
			t.Fatal(err)
		}
		return img
	}()
	device := file{tar.Header{Typeflag: 'Z', Name: "odd"}, ""}
	for tag, tc := range map[string]struct {
		what taggable
		want []string
	}{
		"arm:1":      {imageOf(t, "linux/arm64", one), []string{"it is for linux/arm64, want linux/amd64", "build it for this platform"}},
		"arms:1":     {indexOf(t, imageOf(t, "linux/arm64", one), imageOf(t, "linux/s390x", one)), []string{"linux/arm64", "linux/s390x", "want linux/amd64", "build it for this platform"}},
		"lies:1":     {lies, []string{"layer 1 of 1", "wrong diff id", "push the image again"}},
		"nolayer:1":  {imageOf(t, image.Platform, layerOf(t, []file{text("stage", "one")}, tarball.WithMediaType("application/odd"))), []string{"application/odd", "want only layers"}},
		"whiteout:1": {imageOf(t, image.Platform, one, layerOf(t, []file{text(".wh.", "")})), []string{"layer 2 of 2", "whiteout", "correct the layer"}},
		"out:1":      {imageOf(t, image.Platform, layerOf(t, []file{text("../../../escaped", "x"), device})), []string{"layer 1 of 1", "correct the layer"}},
	} {
		t.Run(tag, func(t *testing.T) {
			name, _ := r.pushed(tag, tc.what)
			_, err := r.Pull(within(t), name)
			if err == nil {
				t.Fatal("no error")
			}
			t.Log(err)
			for _, want := range append(tc.want, name) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q in it", err, want)
				}
			}
			if !errors.Is(err, image.ErrNoImage) {
				t.Errorf("%v, want %v", err, image.ErrNoImage)
			}
			r.wantNothingLeft()
		})
	}
	t.Run("missing", func(t *testing.T) {
		_, err := r.Pull(within(t), r.host+"/team/missing:1")
		if !errors.Is(err, image.ErrNoImage) || !strings.Contains(err.Error(), "push it to "+r.host) {
			t.Errorf("%v, want %v and what to do", err, image.ErrNoImage)
		}
	})
	r.wantNothingLeft()
}

// TestLayersThatDoNotMatchTheirDigest gets other bytes from the registry than the manifest names.
func TestLayersThatDoNotMatchTheirDigest(t *testing.T) {
	r := newRig(t, nil)
	img := plain(t)
	name, _ := r.pushed("a:1", img)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	bad, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	r.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if q.Method == http.MethodGet && strings.HasSuffix(q.URL.Path, bad.String()) {
			size, err := layers[1].Size()
			if err == nil {
				_, err = w.Write(bytes.Repeat([]byte("x"), int(size)))
			}
			if err != nil {
				t.Error(err)
			}
			return
		}
		h.ServeHTTP(w, q)
	})
	_, err = r.Pull(within(t), name)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{name, "layer 2 of 2", bad.String(), "push the image again"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	r.wantNothingLeft()
	r.front.Store(nil)
	if root := r.pull(name); content1(t, root, "data/a") != "second" {
		t.Errorf("afterwards: %+v", root)
	}
}

// TestTransfersThatBreakOffContinue breaks off the transfer of a layer once.
func TestTransfersThatBreakOffContinue(t *testing.T) {
	r := newRig(t, nil)
	noise := make([]byte, 4<<20)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	name, _ := r.pushed("a:1", imageOf(t, image.Platform, layerOf(t, []file{text("stage", string(noise))})))
	var broken atomic.Bool
	r.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		h.ServeHTTP(&half{w, &broken}, q)
	})
	if root := r.pull(name); content1(t, root, "stage") != string(noise) || !broken.Load() {
		t.Errorf("broken off: %t", broken.Load())
	}
}

// half breaks off one large answer in its middle.
type half struct {
	http.ResponseWriter

	done *atomic.Bool
}

func (h *half) Write(p []byte) (int, error) {
	if len(p) > 1<<20 && h.done.CompareAndSwap(false, true) {
		_, _ = h.ResponseWriter.Write(p[:len(p)/2])
		panic(http.ErrAbortHandler)
	}
	return h.ResponseWriter.Write(p)
}

// TestLinksLeadNoFurtherThanTheRoot unpacks a layer that writes through a link to a folder of this
// machine.
func TestLinksLeadNoFurtherThanTheRoot(t *testing.T) {
	r := newRig(t, nil)
	outside := t.TempDir()
	name, _ := r.pushed("links:1", imageOf(t, image.Platform,
		layerOf(t, []file{link("out", outside), link("up", "../../../../../.."+outside)}),
		layerOf(t, []file{text("out/a", "x"), text("up/b", "x"), text("stage", "one")})))
	root := r.pull(name)
	if found, err := os.ReadDir(outside); err != nil || len(found) != 0 {
		t.Errorf("outside: %v, %v, want nothing", found, err)
	}
	if got := content1(t, root, "stage"); got != "one" {
		t.Errorf("stage has %q", got)
	}
	found := map[string]bool{}
	err := filepath.WalkDir(root.Dir, func(_ string, d os.DirEntry, err error) error {
		found[d.Name()] = true
		return err
	})
	if err != nil || !found["a"] || !found["b"] {
		t.Errorf("inside: %v, %v, want a and b", found, err)
	}
}

func TestAFullDiskOfContainerd(t *testing.T) {
	r := newRig(t, nil)
	r.server.Kill()
	if err := unix.Mount("tmpfs", r.server.Root, "tmpfs", 0, "size=24m"); err != nil {
		t.Fatal(err)
	}
	r.server.Run()
	small, _ := r.pushed("small:1", plain(t))
	kept := r.pull(small)
	zeros := strings.Repeat("\x00", 64<<20) // small while it is compressed
	noise := make([]byte, 32<<20)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	for tag, layer := range map[string]string{"unpack:1": zeros, "fetch:1": string(noise)} {
		name, _ := r.pushed(tag, imageOf(t, image.Platform, layerOf(t, []file{text("stage", layer)})))
		before := len(r.left())
		_, err := r.Pull(within(t), name)
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("%s: %v, want %v", tag, err, syscall.ENOSPC)
		}
		t.Log(err)
		for _, want := range []string{name, r.server.Root, "free some space"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", tag, err, want)
			}
		}
		if all := r.left(); len(all) != before {
			t.Errorf("%s: left over: %q", tag, all)
		}
	}
	if got := content1(t, kept, "data/a"); got != "second" {
		t.Errorf("an image that was there has %q", got)
	}
	if _, err := r.Collect(t.Context(), nil, -time.Minute); err != nil {
		t.Error(err)
	}
	r.wantNothingLeft()
}

func TestContainerdIsAway(t *testing.T) {
	r := newRig(t, nil)
	name, digest := r.pushed("a:1", plain(t))
	r.server.Kill()
	_, err := r.Root(within(t), name+"@"+digest)
	r.back()
	if !errors.Is(err, image.ErrUnavailable) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "containerd at "+r.server.Address+" does not answer") {
		t.Errorf("%v, want %v and the address", err, image.ErrUnavailable)
	}
	r.wantNothingLeft()
	if root := r.pull(name); root.Digest != digest {
		t.Errorf("afterwards: %+v", root)
	}
}

// TestContainerdEndsDuringAPull kills containerd while a layer arrives. What it has kept is removed
// once it is back.
func TestContainerdEndsDuringAPull(t *testing.T) {
	r := newRig(t, nil)
	name, _ := r.pushed("a:1", plain(t))
	var once sync.Once
	r.behind(func(w http.ResponseWriter, q *http.Request, h http.Handler) {
		if strings.Contains(q.URL.Path, "/blobs/") {
			once.Do(r.server.Kill)
		}
		h.ServeHTTP(w, q)
	})
	_, err := r.Pull(within(t), name)
	if !errors.Is(err, image.ErrUnavailable) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("%v, want %v", err, image.ErrUnavailable)
	}
	r.back()
	if len(r.left()) == 0 {
		t.Error("nothing was left when containerd ended, want something to remove")
	}
	if _, err := r.Collect(within(t), nil, time.Hour); err != nil {
		t.Error(err)
	}
	r.wantNothingLeft()
	if root := r.pull(name); content1(t, root, "data/a") != "second" {
		t.Errorf("afterwards: %+v", root)
	}
}

// TestContainerdIsSlow pulls while each answer of containerd takes 5 s. The caller is told, and
// nothing is left.
func TestContainerdIsSlow(t *testing.T) {
	var slow *proxy
	r := newRig(t, func(c *Config) {
		slow = delay(t, c.Address)
		c.Address, c.Registry.Timeout = slow.address, time.Second
	})
	name, digest := r.pushed("a:1", plain(t))
	slow.by.Store(int64(5 * time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := r.Root(ctx, name+"@"+digest); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "try again") {
		t.Errorf("%v, want %v, and to try again", err, context.DeadlineExceeded)
	}
	_, err := r.Root(within(t), name+"@"+digest)
	if !errors.Is(err, image.ErrUnavailable) || !strings.Contains(err.Error(), "containerd at "+slow.address+" does not answer (no answer in 2s)") {
		t.Errorf("%v, want %v and that it is slow", err, image.ErrUnavailable)
	}
	r.wantNothingLeft()
	slow.by.Store(0)
	if root := r.pull(name); root.Digest != digest {
		t.Errorf("afterwards: %+v", root)
	}
}

// proxy delays what a server answers.
type proxy struct {
	address string
	by      atomic.Int64 // a time.Duration
}

// delay starts a proxy of a unix socket.
func delay(t *testing.T, to string) *proxy {
	t.Helper()
	p := &proxy{address: filepath.Join(filepath.Dir(to), "slow.sock")}
	l, err := net.Listen("unix", p.address)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.forward(c, to) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return p
}

func (p *proxy) forward(c net.Conn, to string) {
	defer c.Close()
	s, err := net.Dial("unix", to)
	if err != nil {
		return
	}
	defer s.Close()
	go func() { _, _ = io.Copy(s, c); _ = s.Close() }() // ends with c
	type chunk struct {
		due  time.Time
		data []byte
	}
	chunks := make(chan chunk, 1<<10)
	go func() { // ends with s
		defer close(chunks)
		for {
			b := make([]byte, 32<<10)
			n, err := s.Read(b)
			if n > 0 {
				chunks <- chunk{time.Now().Add(time.Duration(p.by.Load())), b[:n]}
			}
			if err != nil {
				return
			}
		}
	}()
	for next := range chunks {
		<-time.After(time.Until(next.due))
		if _, err := c.Write(next.data); err != nil {
			_ = s.Close()
		}
	}
}

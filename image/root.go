package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// Root is an unpacked image.
type Root struct {
	Digest string
	Dir    string // root file system; processes must not change it
	Stage  bool   // its entrypoint speaks the stage protocol
	Config Config
}

// unpackTimeout bounds how long unpacking an image may take.
const unpackTimeout = 10 * time.Minute

// Root returns the folder from which the image with a digest can run. It unpacks the image if
// necessary.
func (s *Store) Root(ctx context.Context, digest string) (Root, error) {
	img, err := s.Image(digest)
	if err != nil {
		return Root{}, err
	}
	file, err := img.of.ConfigFile()
	if err != nil {
		return Root{}, fmt.Errorf("image %s: %w", digest, err)
	}
	r := Root{Digest: digest, Dir: s.root(digest, "fs"), Config: configOf(file)}
	r.Stage = r.Config.Labels[ProtocolLabel] == ProtocolVersion
	// This marks the root as used. A root exists completely or not at all.
	if err := touch(s.root(digest)); err == nil {
		return r, nil
	}
	return s.roots.Do(ctx, digest, unpackTimeout, func(ctx context.Context) (Root, error) {
		release, err := s.use(ctx)
		if err != nil {
			return Root{}, err
		}
		defer release()
		return r, s.explain(digest, s.unpack(ctx, img, file, digest))
	})
}

func (s *Store) root(digest string, more ...string) string {
	return s.path(append([]string{"roots", strings.TrimPrefix(digest, "sha256:")}, more...)...)
}

func touch(file string) error {
	now := time.Now()
	return os.Chtimes(file, now, now)
}

// unpack makes the root of an image in a temporary folder, syncs it, and moves it to its place.
func (s *Store) unpack(ctx context.Context, img *Image, file *v1.ConfigFile, digest string) error {
	if _, err := os.Stat(s.root(digest)); err == nil {
		return nil
	}
	layers, err := img.of.Layers()
	if err != nil {
		return err
	}
	if got, want := len(layers), len(file.RootFS.DiffIDs); got != want {
		return fmt.Errorf("%w: %d layers, its configuration names %d", errCorrupt, got, want)
	}
	tmp, err := os.MkdirTemp(s.path("tmp"), "root")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp) // if it has not become the root
	if err := os.Mkdir(tmp+"/fs", 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(tmp + "/fs")
	if err != nil {
		return err
	}
	defer root.Close()
	u := newUnpacker(ctx, root, s.path("files"), s.limits)
	for i, l := range layers {
		if err := s.addLayer(u, l, file.RootFS.DiffIDs[i]); err != nil {
			return fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
	}
	if err := u.finish(); err != nil {
		return err
	}
	if err := syncFolder(tmp); err != nil {
		return err
	}
	err = os.Rename(tmp, s.root(digest))
	if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil // another process was faster
	}
	return err
}

// addLayer adds a layer to the root. If the store has the layer's files, it links them.
func (s *Store) addLayer(u *unpacker, l v1.Layer, want v1.Hash) error {
	if hexForm.MatchString(want.Hex) {
		shared, err := s.openLayer(want.Hex)
		if err == nil {
			return u.tree(shared)
		}
		if _, lost := os.Stat(s.blob(want.Hex)); lost != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return unpackLayer(u, l, want)
}

func unpackLayer(u *unpacker, l v1.Layer, want v1.Hash) error {
	r, err := l.Uncompressed()
	if err != nil {
		return err
	}
	defer r.Close()
	got, err := u.layer(r)
	if err != nil {
		return err
	}
	if got != want.String() {
		return fmt.Errorf("%w: files with digest %s, its configuration says %s", errCorrupt, got, want)
	}
	return nil
}

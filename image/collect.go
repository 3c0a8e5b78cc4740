package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Collect removes an image if all of these apply:
//
//   - It has no name.
//   - The list used does not have its digest.
//   - It was last touched longer ago than the duration idle.
//
// This spares images that were just fetched and will be used soon, and images that were just
// replaced and may still have replicas. Collect returns the number of bytes that it has freed on
// the disk.
func (s *Store) Collect(ctx context.Context, used []string, idle time.Duration) (freed int64, err error) {
	release, err := s.lock(ctx, "lock", unix.LOCK_EX)
	if err != nil {
		return 0, err
	}
	defer release()
	m, err := s.index()
	if err != nil {
		return 0, err
	}
	roots := used
	for _, d := range m.Manifests {
		roots = append(roots[:len(roots):len(roots)], d.Digest.String())
	}
	before := time.Now().Add(-idle)
	if recent, err := filepath.Glob(s.path("roots", "*")); err == nil {
		for _, r := range recent {
			if info, err := os.Stat(r); err == nil && info.ModTime().After(before) {
				roots = append(roots, "sha256:"+filepath.Base(r))
			}
		}
	}
	keep, err := s.mark(roots)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, kind := range []string{"blobs/sha256", "roots", "received", "layers", "keys", "files", "tmp"} {
		n, err := s.sweep(kind, keep, before)
		freed += n
		errs = append(errs, err)
	}
	return freed, errors.Join(errs...)
}

// mark returns the names of the blobs and roots that these images need.
func (s *Store) mark(digests []string) (map[string]bool, error) {
	keep := map[string]bool{}
	for _, d := range digests {
		img, err := s.Image(d)
		if errors.Is(err, ErrNoImage) {
			continue // of a function that will not start; its start reports the error
		}
		if err != nil {
			return nil, err
		}
		m, err := img.of.Manifest()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", d, err)
		}
		keep[strings.TrimPrefix(d, "sha256:")] = true
		keep[m.Config.Digest.Hex] = true
		for _, l := range m.Layers {
			keep[l.Digest.Hex] = true
		}
	}
	return keep, nil
}

// sweep removes entries of a folder that are not in keep. It removes shared files that no root has,
// and all unfinished files, because no other process uses the store now.
func (s *Store) sweep(kind string, keep map[string]bool, before time.Time) (freed int64, err error) {
	entries, err := os.ReadDir(s.path(kind))
	if err != nil {
		return 0, fmt.Errorf("image store: %w", err)
	}
	var errs []error
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // it was removed meanwhile
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		switch {
		case !ok, keep[e.Name()]:
			continue
		case kind == "files" && st.Nlink > 1, kind == "keys" && s.namesLayer(e.Name()), kind == "layers" && s.linked(e.Name()):
			continue
		case (kind == "roots" || kind == "received" || kind == "layers" || kind == "blobs/sha256") && info.ModTime().After(before):
			continue
		}
		at := s.path(kind, e.Name())
		// A root or layer disappears in one step, because a start that finds it takes no lock.
		if kind == "roots" || kind == "layers" {
			gone := s.path("tmp", "gone-"+e.Name())
			if err := os.Rename(at, gone); err != nil {
				errs = append(errs, err)
				continue
			}
			at = gone
		}
		size := usage(at)
		if err := os.RemoveAll(at); err != nil {
			errs = append(errs, err)
			continue
		}
		freed += size
	}
	return freed, errors.Join(errs...)
}

// namesLayer reports whether the store has the layer of a key.
func (s *Store) namesLayer(key string) bool {
	name, err := os.ReadFile(s.path("keys", key))
	if err != nil || !hexForm.Match(name) {
		return false
	}
	_, err = os.Stat(s.path("layers", string(name)))
	return err == nil
}

// linked reports whether files of a layer have other hard links, from an image that is a folder. No
// index lists such an image, but its next build needs the layer. Besides, removing the layer would
// free no bytes.
func (s *Store) linked(layer string) (yes bool) {
	// A folder that cannot be read has none.
	_ = filepath.WalkDir(s.path("layers", layer, "fs"), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // see above
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
				yes = true
				return fs.SkipAll
			}
		}
		return nil
	})
	return yes
}

// usage returns the bytes on the disk that removing a file or folder would free. Files with other
// names do not count.
func usage(at string) (bytes int64) {
	// Files that cannot be read are not counted.
	_ = filepath.WalkDir(at, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // not counted
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok && (d.IsDir() || st.Nlink == 1) {
				bytes += st.Blocks * 512
			}
		}
		return nil
	})
	return bytes
}

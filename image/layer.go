package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Layer is a layer whose files a store has once. The roots of all images with the layer have hard
// links to the files. The layer's archive is generated from the files whenever it is read.
type Layer struct {
	of  *layer
	dir string
}

// Bytes returns the total size of the layer's files in bytes.
func (l *Layer) Bytes() (n int64) {
	for _, e := range l.of.entries {
		n += e.head.Size
	}
	return n
}

// LinkInto links the layer's files into a folder. It replaces files that have the same names.
func (l *Layer) LinkInto(ctx context.Context, folder string) error {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	u := newUnpacker(ctx, root, "", defaultLimits)
	if err := u.tree(l); err != nil {
		return fmt.Errorf("%s: %w", l.of.what, err)
	}
	return u.finish()
}

// packagesOf begins the comment of each shared layer in the history of an image.
const packagesOf = "packages"

var hexForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// MakeLayer returns the layer of a key. It calls fill to write the layer's files into a folder if
// the store does not have the layer, or if its files were changed. The same key must always give
// the same files. what names the layer in the history of images.
func (s *Store) MakeLayer(ctx context.Context, key, what string, fill func(folder string) error) (*Layer, error) {
	release, err := s.use(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	sum := sha256.Sum256([]byte(key))
	at := filepath.Join("keys", hex.EncodeToString(sum[:]))
	l, err := s.layerOf(at)
	if err != nil {
		if l, err = s.fillLayer(ctx, fill); err == nil {
			err = s.replace(at, []byte(l.of.hash.Hex))
		}
		if disk.IsFull(err) {
			return nil, s.explain(what, err)
		}
		if err != nil {
			return nil, err
		}
	}
	l.of.what = packagesOf + " " + what
	return l, nil
}

// layerOf returns the layer that the key's file names.
func (s *Store) layerOf(key string) (*Layer, error) {
	name, err := os.ReadFile(s.path(key))
	if err != nil {
		return nil, err
	}
	if !hexForm.Match(name) {
		return nil, fmt.Errorf("%w: %s names the layer %.80q", errCorrupt, s.path(key), name)
	}
	return s.openLayer(string(name))
}

func (s *Store) fillLayer(ctx context.Context, fill func(folder string) error) (*Layer, error) {
	tmp, err := os.MkdirTemp(s.path("tmp"), "layer")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp) // if it has not become the layer
	if err := os.Mkdir(filepath.Join(tmp, "fs"), 0o755); err != nil {
		return nil, err
	}
	if err := fill(filepath.Join(tmp, "fs")); err != nil {
		return nil, err
	}
	return s.keepLayer(ctx, tmp, "", "")
}

// listed is the store's record of a layer's files. It shows later whether the files were changed.
type listed struct {
	Size    int64  // of the archive, in bytes
	Listing string // names, kinds, modes, sizes and links, as layer.listing gives them
}

// errOther means that the files of an archive do not give the same archive again.
var errOther = errors.New("not an archive as this store writes it")

// keepLayer moves the folder tmp into the store as a layer. The layer's files are in tmp's folder
// fs. If want is set, the files come from an archive with this digest and frame. If they do not
// give the same archive again, keepLayer returns errOther and stores nothing.
// If the store already has the layer intact, it keeps that copy, because other processes may be
// linking its files.
func (s *Store) keepLayer(ctx context.Context, tmp, want, frame string) (*Layer, error) {
	dir := filepath.Join(tmp, "fs")
	if err := seal(dir); err != nil {
		return nil, err
	}
	l, err := readTree(dir)
	if err != nil {
		return nil, err
	}
	if err := l.identify(want, frame); err != nil {
		return nil, err
	}
	if there, err := s.openLayer(l.hash.Hex); err == nil {
		return there, nil
	}
	note, err := json.Marshal(listed{l.size, l.listing()})
	if err == nil {
		err = os.WriteFile(filepath.Join(tmp, "list"), note, 0o600)
	}
	if err == nil {
		err = syncLayer(tmp, l)
	}
	if err != nil {
		return nil, err
	}
	release, err := s.lock(ctx, "layers.lock", unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	defer release()
	if there, err := s.openLayer(l.hash.Hex); err == nil {
		return there, nil // another process was faster
	}
	if err := s.discard("layers", l.hash.Hex); err != nil { // its files were changed
		return nil, err
	}
	if err := os.Rename(tmp, s.path("layers", l.hash.Hex)); err != nil {
		return nil, err
	}
	return s.openLayer(l.hash.Hex)
}

// identify sets the digest and the size of a layer. If the files were read from an archive, it does
// not read them again: want is the archive's digest, and frame that of its headers and padding. If
// the layer has other ones, the error is errOther.
func (l *layer) identify(want, frame string) error {
	if want == "" {
		return l.measure()
	}
	got, err := l.frame()
	if err != nil {
		return err
	}
	if got != frame {
		return errOther
	}
	l.hash = v1.Hash{Algorithm: "sha256", Hex: want}
	return nil
}

// openLayer returns a layer of the store, or an error if its files were changed.
func (s *Store) openLayer(name string) (*Layer, error) {
	note, err := os.ReadFile(s.path("layers", name, "list"))
	if err != nil {
		return nil, err
	}
	var want listed
	if err := json.Unmarshal(note, &want); err != nil {
		return nil, fmt.Errorf("%w: layer %s: %w", errCorrupt, name, err)
	}
	dir := s.path("layers", name, "fs")
	l, err := readTree(dir)
	if err != nil {
		return nil, err
	}
	if l.listing() != want.Listing {
		return nil, fmt.Errorf("%w: somebody has changed files in %s; build or fetch the image again", errCorrupt, dir)
	}
	l.hash, l.size = v1.Hash{Algorithm: "sha256", Hex: name}, want.Size
	return &Layer{l, dir}, touch(s.path("layers", name))
}

// discard moves a file or folder out of the store in one step, and then removes it.
func (s *Store) discard(kind, name string) error {
	tmp, err := os.MkdirTemp(s.path("tmp"), "gone")
	if err != nil {
		return err
	}
	err = os.Rename(s.path(kind, name), filepath.Join(tmp, name))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(tmp))
}

// seal sets owner, modes and times of a folder's files to those in its archive. So a later write to
// a file can be seen, because it changes the time.
func seal(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		e, err := describe(path, path, d)
		if err != nil {
			return err
		}
		if os.Geteuid() == 0 {
			if err := os.Lchown(path, 0, 0); err != nil {
				return err
			}
		}
		if e.head.Typeflag == tar.TypeSymlink {
			return nil
		}
		if err := os.Chmod(path, fs.FileMode(e.head.Mode)); err != nil || e.head.Typeflag == tar.TypeDir {
			return err
		}
		return os.Chtimes(path, e.head.ModTime, e.head.ModTime)
	})
}

// readTree returns a layer with all files of a folder. Its digest and size are not set.
func readTree(dir string) (*layer, error) {
	l := &layer{}
	err := walkTree(dir, func(e entry) error {
		if e.head.Typeflag == tar.TypeReg && !e.changed.Equal(e.head.ModTime) {
			return fmt.Errorf("%w: %s was changed at %v; build or fetch the image again", errCorrupt, e.path, e.changed.Format(time.RFC3339))
		}
		l.entries = append(l.entries, e)
		return nil
	})
	return l, err
}

// listing returns a digest of the archive's headers: names, kinds, modes, sizes and links of the
// files, without their content.
func (l *layer) listing() string {
	h := sha256.New()
	for _, e := range l.entries {
		fmt.Fprintf(h, "%q %c %o %d %q\n", e.head.Name, e.head.Typeflag, e.head.Mode, e.head.Size, e.head.Linkname)
	}
	return sum(h)
}

// maxTree bounds the number of entries of a shared layer that comes from a registry or an archive,
// because all entries are held in memory. If a layer has more, its archive is stored.
const maxTree = 200_000

// sharable returns which layers of an image are marked as shared layers of a store. If all is true,
// these are all layers that `stagecoach build` has made. takeLayer checks whether a mark is true.
func sharable(m *v1.Manifest, f *v1.ConfigFile, all bool) []bool {
	out := make([]bool, len(m.Layers))
	if len(f.History) != len(m.Layers) || len(f.RootFS.DiffIDs) != len(m.Layers) {
		return out
	}
	for i, h := range f.History {
		out[i] = h.CreatedBy == createdBy && (all || strings.HasPrefix(h.Comment, packagesOf)) && m.Layers[i].MediaType == types.OCIUncompressedLayer &&
			m.Layers[i].Digest == f.RootFS.DiffIDs[i]
	}
	return out
}

// takeLayer unpacks a shared layer from its archive. The store keeps only the files, so they must
// give the same archive again; otherwise the error is errOther. left is what remains of the image's
// limits; takeLayer reduces it.
func (s *Store) takeLayer(ctx context.Context, d v1.Descriptor, open func() (io.ReadCloser, error), left *limits) error {
	r, err := open()
	if err != nil {
		return err
	}
	defer r.Close()
	defer context.AfterFunc(ctx, func() { _ = r.Close() })() // ends a read that hangs
	tmp, err := os.MkdirTemp(s.path("tmp"), "layer")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp) // if it has not become the layer
	if err := os.Mkdir(filepath.Join(tmp, "fs"), 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(filepath.Join(tmp, "fs"))
	if err != nil {
		return err
	}
	defer root.Close()
	u := newUnpacker(ctx, root, "", limits{min(left.entries, maxTree), left.bytes})
	in := readAhead(limited(u.limited(r), d.Size+1), d.Size)
	defer in.Close()
	got, frame, err := u.archive(in)
	left.entries -= min(left.entries, maxTree) - u.left.entries
	left.bytes = u.left.bytes
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errTooMany) && left.entries > 0:
		return errOther
	case err != nil:
		return in.suspect(d, err)
	}
	if got != d.Digest.String() {
		return fmt.Errorf("%w: an archive with digest %s, want %s", errCorrupt, got, d.Digest)
	}
	if err := u.finish(); err != nil {
		return err
	}
	_, err = s.keepLayer(ctx, tmp, d.Digest.Hex, frame)
	return err
}

// openBlob opens a blob, or the archive of a layer whose files the store has.
func (s *Store) openBlob(name string) (io.ReadCloser, error) {
	f, err := os.Open(s.blob(name))
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	l, lost := s.openLayer(strings.TrimPrefix(name, "sha256:"))
	if errors.Is(lost, fs.ErrNotExist) {
		return nil, err
	}
	if lost != nil {
		return nil, lost
	}
	return l.of.Compressed()
}

// syncFolder syncs the file system of a folder to its disk.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// ErrCorrupt means that something does not match its digest.
var ErrCorrupt = errCorrupt

// Dir returns the folder of a store.
func Dir(s *Store) string { return s.dir }

// MaxManifest bounds a manifest, in bytes. Registries allow 4 MiB.
const MaxManifest = 4 << 20

// Part is the configuration or a layer of an image.
type Part struct {
	Digest string
	Size   int64 // in bytes, as it is sent
}

// Receive stores the image with this manifest. It calls open for each part that the store lacks,
// one after the other. Each part is checked against its digest while it is read. If a part has
// other bytes, the error wraps [ErrCorrupt], and the parts before it stay in the store.
//
// Layers that `stagecoach build` has made are unpacked while they arrive, and the store keeps only
// their files, so the disk gets each byte once.
func Receive(ctx context.Context, s *Store, manifest []byte, open func(Part) (io.ReadCloser, error)) error {
	var m v1.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	img, err := partial.CompressedToImage(&received{store: s, of: m, raw: manifest, open: open})
	if err != nil {
		return err
	}
	release, err := s.use(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := checkRoom(s, &m); err != nil {
		return err
	}
	if m.Config.Size > maxConfig {
		return fmt.Errorf("%w: a configuration of %d bytes, want at most %d", ErrNoImage, m.Config.Size, maxConfig)
	}
	if err := runsHere(img, Platform); err != nil {
		return err
	}
	_, err = s.write(ctx, &Image{img}, true)
	return err
}

// Missing returns the parts of an image that a store lacks, and the size of all parts in bytes.
func Missing(s *Store, manifest []byte) (parts []Part, all int64, err error) {
	var m v1.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, 0, fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	parts, all = missing(s, &m)
	return parts, all, nil
}

func missing(s *Store, m *v1.Manifest) (parts []Part, all int64) {
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		all += d.Size
		if !hasPart(s, d) {
			parts = append(parts, Part{d.Digest.String(), d.Size})
		}
	}
	return parts, all
}

// hasPart reports whether a store has a blob, or the files of a layer. It does not read the files.
func hasPart(s *Store, d v1.Descriptor) bool {
	if info, err := os.Stat(s.blob(d.Digest.String())); err == nil && info.Size() == d.Size {
		return true
	}
	_, err := os.Stat(s.path("layers", d.Digest.Hex, "list"))
	return err == nil && hexForm.MatchString(d.Digest.Hex)
}

// checkRoom returns a *disk.FullError if the parts that a store lacks do not fit on its disk.
func checkRoom(s *Store, m *v1.Manifest) error {
	parts, _ := missing(s, m)
	var want int64
	for _, p := range parts {
		if p.Size < 0 || p.Size > s.limits.bytes-want {
			return fmt.Errorf("%w: layers of more than %d bytes", ErrNoImage, s.limits.bytes)
		}
		want += p.Size
	}
	if want == 0 {
		return nil
	}
	return disk.Room(s.dir, want)
}

// Has reports whether a store has all parts of an image.
func Has(s *Store, digest string) bool {
	if !digestForm.MatchString(digest) {
		return false
	}
	raw, err := os.ReadFile(s.blob(digest))
	if err != nil {
		return false
	}
	lacks, _, err := Missing(s, raw)
	return err == nil && len(lacks) == 0
}

// Complete returns at most n digests of images that a store has completely and that are unpacked,
// the latest used first.
func Complete(s *Store, n int) []string {
	roots, err := os.ReadDir(s.path("roots"))
	if err != nil {
		return nil
	}
	type root struct {
		digest string
		used   int64
	}
	var all []root
	for _, r := range roots {
		if info, err := r.Info(); err == nil && hexForm.MatchString(r.Name()) {
			all = append(all, root{"sha256:" + r.Name(), info.ModTime().UnixNano()})
		}
	}
	slices.SortFunc(all, func(a, b root) int { return cmp.Compare(b.used, a.used) })
	var out []string
	for _, r := range all {
		if len(out) == n {
			break
		}
		if Has(s, r.digest) {
			out = append(out, r.digest)
		}
	}
	return out
}

// received is an image whose parts come from somewhere else, unless the store has them.
type received struct {
	store *Store
	of    v1.Manifest
	raw   []byte
	open  func(Part) (io.ReadCloser, error)

	config []byte // nil: not read yet
}

// MediaType implements partial.CompressedImageCore.
func (r *received) MediaType() (types.MediaType, error) {
	if r.of.MediaType == "" {
		return types.OCIManifestSchema1, nil // whose field is optional
	}
	return r.of.MediaType, nil
}

// RawManifest implements partial.CompressedImageCore.
func (r *received) RawManifest() ([]byte, error) { return r.raw, nil }

// RawConfigFile implements partial.CompressedImageCore. It checks the digest.
func (r *received) RawConfigFile() ([]byte, error) {
	if r.config != nil {
		return r.config, nil
	}
	d := r.of.Config
	if !digestForm.MatchString(d.Digest.String()) || d.Size < 0 || d.Size > maxConfig {
		return nil, fmt.Errorf("%w: a configuration of %d bytes with digest %q", ErrNoImage, d.Size, d.Digest)
	}
	if b, err := os.ReadFile(r.store.blob(d.Digest.String())); err == nil && int64(len(b)) == d.Size {
		r.config = b
		return b, nil
	}
	in, err := r.open(Part{d.Digest.String(), d.Size})
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, d.Size+1))
	if err != nil {
		return nil, err
	}
	got, size, err := v1.SHA256(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	if got != d.Digest {
		return nil, fmt.Errorf("configuration: %w", mismatch(size, got.String(), d))
	}
	r.config = b
	return b, nil
}

// LayerByDigest implements partial.CompressedImageCore.
func (r *received) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, d := range append(r.of.Layers, r.of.Config) {
		if d.Digest == h {
			return &receivedLayer{storedLayer{r.store, d}, r.open}, nil
		}
	}
	return nil, fmt.Errorf("no layer %s", h)
}

// receivedLayer is a layer that comes from somewhere else.
type receivedLayer struct {
	storedLayer

	open func(Part) (io.ReadCloser, error)
}

// Compressed implements partial.CompressedLayer.
func (l *receivedLayer) Compressed() (io.ReadCloser, error) {
	return l.open(Part{l.desc.Digest.String(), l.desc.Size})
}

// mismatch is the error of a part that does not have the digest or the size that was wanted.
func mismatch(n int64, got string, want v1.Descriptor) error {
	return fmt.Errorf("%w: %d bytes with digest %s, want %d with %s", errCorrupt, n, got, want.Size, want.Digest)
}

// FolderLabel is the label of an image that was packed from a folder of images. Its program runs as
// it does from the folder: among the machine's files, also if it does not speak the stage protocol.
const FolderLabel = "dev.stagecoach.folder"

// PackFolder stores the content of a folder as an image without a name, and returns its digest. The
// same content gives the same digest. Each big file is a layer that is hashed and copied once: it is
// known by its device, inode, size and time. stage says that the folder's program speaks the stage
// protocol. The folder must not change meanwhile.
func PackFolder(ctx context.Context, s *Store, folder string, stage bool) (digest string, err error) {
	small := &layer{what: "files"}
	var big []*Layer
	err = walkTree(folder, func(e entry) error {
		if e, err = inside(folder, e); err != nil {
			return err
		}
		if e.head.Typeflag != tar.TypeReg || e.head.Size < bigFile || len(big) == maxBig {
			small.entries = append(small.entries, e)
			return nil
		}
		l, err := packBig(ctx, s, e)
		big = append(big, l)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	if err := small.measure(); err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	layers := []*layer{small}
	for _, l := range big {
		layers = append(layers, l.of)
	}
	c := Config{Labels: map[string]string{FolderLabel: "1"}}
	if stage {
		c.Labels[ProtocolLabel] = ProtocolVersion
	}
	img, err := compose(c, layers)
	if err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	return s.Add(ctx, img, "")
}

// packBig returns the layer with one file of a folder.
func packBig(ctx context.Context, s *Store, e entry) (*Layer, error) {
	info, err := os.Stat(e.path)
	if err != nil {
		return nil, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	key := fmt.Sprintf("file %q %o %d %d %d %d", e.head.Name, e.head.Mode, st.Dev, st.Ino, st.Size, info.ModTime().UnixNano())
	return s.MakeLayer(ctx, key, e.head.Name, func(root string) error {
		to := filepath.Join(root, filepath.FromSlash(e.head.Name))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		return copyTo(to, e)
	})
}

func copyTo(to string, e entry) error {
	in, err := os.Open(e.path)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, os.FileMode(e.head.Mode))
	if err != nil {
		return err
	}
	n, err := io.Copy(out, in) // which the kernel does
	if err == nil && n != e.head.Size {
		err = fmt.Errorf("%s has %d bytes, want %d: it was changed meanwhile", e.path, n, e.head.Size)
	}
	return errors.Join(err, out.Close())
}

// inside returns an entry of a folder. If the entry is a link that leads out of the folder, the file
// that it leads to takes its place, because other machines do not have that file.
func inside(folder string, e entry) (entry, error) {
	if e.head.Typeflag != tar.TypeSymlink {
		return e, nil
	}
	root, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return e, err
	}
	to, err := filepath.EvalSymlinks(e.path)
	if err != nil {
		return e, err
	}
	if strings.HasPrefix(to, root+string(filepath.Separator)) && !filepath.IsAbs(e.head.Linkname) {
		return e, nil
	}
	info, err := os.Stat(to)
	if err != nil {
		return e, err
	}
	if !info.Mode().IsRegular() {
		return e, fmt.Errorf("%s is a link to %s, want a link to a file, or to something in %s", e.path, to, folder)
	}
	e.path, e.changed = to, info.ModTime()
	e.head.Typeflag, e.head.Linkname, e.head.Size, e.head.Mode = tar.TypeReg, "", info.Size(), 0o644
	if info.Mode()&0o111 != 0 {
		e.head.Mode = 0o755
	}
	return e, nil
}

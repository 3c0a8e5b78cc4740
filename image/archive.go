package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// fullName is the annotation with an image's whole name. Other tools use it, because their refName
// is often only the tag.
const fullName = "io.containerd.image.name"

// saved is the part of an archive that docker load reads, beside the OCI layout.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// Save writes images into an archive that both [Store.Load] and docker load can read.
func (s *Store) Save(ctx context.Context, w io.Writer, names ...string) error {
	release, err := s.use(ctx)
	if err != nil {
		return err
	}
	defer release()
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	var docker []saved
	blobs := map[string]int64{}
	for _, n := range names {
		digest, err := s.Resolve(n)
		if err != nil {
			return err
		}
		ref, err := ParseRef(n)
		if err != nil {
			return err
		}
		img, err := s.Image(digest)
		if err != nil {
			return err
		}
		d, err := partial.Descriptor(img.of)
		if err != nil {
			return fmt.Errorf("image %q: %w", n, err)
		}
		m, err := img.of.Manifest()
		if err != nil {
			return fmt.Errorf("image %q: %w", n, err)
		}
		d.Annotations = map[string]string{refName: ref.Name, fullName: ref.Name}
		index.Manifests = append(index.Manifests, *d)
		one := saved{Config: blobPath(m.Config.Digest), RepoTags: []string{ref.Name}}
		blobs[d.Digest.Hex], blobs[m.Config.Digest.Hex] = d.Size, m.Config.Size
		for _, l := range m.Layers {
			one.Layers = append(one.Layers, blobPath(l.Digest))
			blobs[l.Digest.Hex] = l.Size
		}
		docker = append(docker, one)
	}
	return s.archive(ctx, w, index, docker, blobs)
}

func blobPath(h v1.Hash) string { return "blobs/sha256/" + h.Hex }

func (s *Store) archive(ctx context.Context, w io.Writer, index v1.IndexManifest, docker []saved, blobs map[string]int64) error {
	t := tar.NewWriter(w)
	header := func(file string, size int64) error {
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0)})
	}
	for _, f := range []struct {
		name  string
		value any
	}{{"oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"}}, {"index.json", index}, {"manifest.json", docker}} {
		b, err := json.Marshal(f.value)
		if err == nil {
			err = header(f.name, int64(len(b)))
		}
		if err == nil {
			_, err = t.Write(b)
		}
		if err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
	}
	names := make([]string, 0, len(blobs))
	for hex := range blobs {
		names = append(names, hex)
	}
	slices.Sort(names)
	for _, hex := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := header("blobs/sha256/"+hex, blobs[hex]); err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
		f, err := s.openBlob(hex)
		if err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
		_, err = io.Copy(t, contextReader{ctx, f})
		_ = f.Close() // it was only read
		if err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
	}
	return t.Close()
}

// Load adds the images of an archive to the store and returns them. The archive is from
// [Store.Save] or docker save, or is any OCI layout in an uncompressed tar. The last argument has
// an effect only if the archive has a single image without a name: it becomes the image's name.
func (s *Store) Load(ctx context.Context, file, as string) ([]Entry, error) {
	release, err := s.use(ctx) // collection removes unfinished images, too
	if err != nil {
		return nil, err
	}
	defer release()
	tmp, err := os.MkdirTemp(s.path("tmp"), "load")
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	defer os.RemoveAll(tmp)
	found, err := s.open(ctx, file, tmp)
	if err != nil {
		return nil, s.explain(file, fmt.Errorf("archive: %w", err))
	}
	if len(found) == 1 && found[0].name == "" {
		found[0].name = as
	}
	var out []Entry
	for _, f := range found {
		if f.name == "" {
			return out, fmt.Errorf("archive %s: has %d images, and at least one has no name; --name can name it only if it is the only image", file, len(found))
		}
		if err := runsHere(f.img, Platform); err != nil {
			return out, fmt.Errorf("archive %s: image %q: %w", file, f.name, err)
		}
		digest, err := s.Add(ctx, &Image{f.img}, f.name)
		if err != nil {
			return out, err
		}
		out = append(out, Entry{Name: f.name, Digest: digest})
	}
	return out, nil
}

// found is an image in an archive.
type found struct {
	name string
	img  v1.Image
}

var blobForm = regexp.MustCompile(`^blobs/sha256/[0-9a-f]{64}$`)

// maxIndex bounds the size of an archive's index, in bytes.
const maxIndex = 16 << 20

// open reads an archive. It extracts the files of a layout into tmp, except large ones of an
// archive that is a regular file: these are later read from the archive.
func (s *Store) open(ctx context.Context, file, tmp string) ([]found, error) {
	if err := os.MkdirAll(filepath.Join(tmp, "blobs/sha256"), 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	has, large := map[string]bool{}, map[string]section{}
	left := s.limits.bytes
	for t, n := tar.NewReader(f), 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		e, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%w; want an uncompressed tar from docker save, or of an OCI layout", err)
		}
		if n > s.limits.entries {
			return nil, errors.New("more files than an archive may have")
		}
		name := strings.TrimPrefix(e.Name, "./")
		table := name == "oci-layout" || name == "index.json" || name == "manifest.json"
		if e.Typeflag != tar.TypeReg || !table && !blobForm.MatchString(name) || has[name] {
			continue
		}
		if left -= e.Size; left < 0 || table && e.Size > maxIndex {
			return nil, fmt.Errorf("%s: %d bytes, more than it may have", name, e.Size)
		}
		has[name] = true
		if e.Size > maxIndex && info.Mode().IsRegular() {
			at, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			large[filepath.Base(name)] = section{file, at, e.Size}
			continue
		}
		// The name has one of the forms above.
		if err := extract(ctx, filepath.Join(tmp, name), t); err != nil {
			return nil, err
		}
	}
	switch {
	case has["oci-layout"] && has["index.json"]:
		return fromLayout(tmp, has["manifest.json"], large)
	case has["manifest.json"]:
		return fromDocker(file)
	}
	return nil, errors.New("it has neither index.json nor manifest.json; want an archive from docker save, or an OCI layout")
}

func fromLayout(dir string, docker bool, large map[string]section) ([]found, error) {
	// The keys are digests of configurations. Docker's names are those that users know.
	names := map[string][]string{}
	if docker {
		b, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
		if err != nil {
			return nil, err
		}
		var all []saved
		if err := json.Unmarshal(b, &all); err != nil {
			return nil, fmt.Errorf("manifest.json: %w", err)
		}
		for _, one := range all {
			names[one.Config] = one.RepoTags
		}
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("index.json: %w", err)
	}
	var out []found
	for _, d := range m.Manifests {
		if err := small(dir, d.Digest); err != nil {
			return nil, err
		}
		img, err := imageOf(dir, index, d)
		if err != nil {
			return nil, err
		}
		manifest, err := img.Manifest()
		if err != nil {
			return nil, err
		}
		if err := small(dir, manifest.Config.Digest); err != nil {
			return nil, err
		}
		all := names[blobPath(manifest.Config.Digest)]
		if len(all) == 0 {
			all = []string{d.Annotations[fullName]}
		}
		if _, err := ParseRef(d.Annotations[refName]); all[0] == "" && err == nil && strings.ContainsAny(d.Annotations[refName], ":/") {
			all[0] = d.Annotations[refName]
		}
		for _, n := range all {
			out = append(out, found{n, sectioned{img, large}})
		}
	}
	return out, nil
}

// small returns an error unless a blob of a layout is small enough to be read into memory.
func small(dir string, h v1.Hash) error {
	if !blobForm.MatchString(blobPath(h)) {
		return fmt.Errorf("digest %q, want a SHA-256", h)
	}
	info, err := os.Stat(filepath.Join(dir, blobPath(h)))
	if err == nil && info.Size() > maxConfig {
		err = fmt.Errorf("%s: %d bytes, want at most %d in a manifest or configuration", h, info.Size(), maxConfig)
	}
	return err
}

// imageOf returns the image that a descriptor names. If it names an index, imageOf returns the
// index's image for this machine.
func imageOf(dir string, index v1.ImageIndex, d v1.Descriptor) (v1.Image, error) {
	switch {
	case d.MediaType.IsImage():
		return index.Image(d.Digest)
	case d.MediaType.IsIndex():
		inner, err := index.ImageIndex(d.Digest)
		if err != nil {
			return nil, err
		}
		m, err := inner.IndexManifest()
		if err != nil {
			return nil, err
		}
		for _, d := range m.Manifests { // images for other platforms may be missing
			if err := small(dir, d.Digest); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
		return forPlatform(inner)
	}
	return nil, fmt.Errorf("%w: %s is a %s", ErrNoImage, d.Digest, d.MediaType)
}

// forPlatform returns the image of an index that runs on this machine.
func forPlatform(index v1.ImageIndex) (v1.Image, error) {
	p, err := v1.ParsePlatform(Platform)
	if err != nil {
		return nil, err
	}
	images, err := partial.FindImages(index, match.Platforms(*p))
	if err != nil {
		return nil, err
	}
	if len(images) == 0 {
		return nil, fmt.Errorf("%w for %s in its index", ErrNoImage, Platform)
	}
	return images[0], nil
}

// fromDocker reads the format of older versions of docker save.
func fromDocker(file string) ([]found, error) {
	opener := func() (io.ReadCloser, error) { return os.Open(file) }
	m, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, err
	}
	var out []found
	for _, d := range m {
		if len(d.RepoTags) == 0 && len(m) == 1 {
			img, err := tarball.Image(opener, nil)
			return []found{{"", img}}, err
		}
		for _, n := range d.RepoTags {
			tag, err := name.NewTag(n)
			if err != nil {
				return nil, err
			}
			img, err := tarball.Image(opener, &tag)
			if err != nil {
				return nil, err
			}
			out = append(out, found{n, img})
		}
	}
	return out, nil
}

// runsHere returns an error if an image does not run on this machine's platform.
func runsHere(img v1.Image, platform string) error {
	f, err := img.ConfigFile()
	if err != nil {
		return err
	}
	if got := f.OS + "/" + f.Architecture; got != platform {
		return fmt.Errorf("%w for this machine: it is for %s, want %s", ErrNoImage, got, platform)
	}
	return nil
}

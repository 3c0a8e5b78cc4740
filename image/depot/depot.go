// Package depot keeps images where all control planes find them: in an object store that outlives
// each of them. Images are known by digest, and share the parts that they have in common.
package depot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
)

// Object describes an object.
type Object = struct {
	Name string
	Size int64
	At   time.Time // when it was stored
}

// ErrNone means that an object does not exist.
var ErrNone = errors.New("depot: no such object")

// Objects is an object store. An object is stored completely or not at all.
type Objects interface {
	Put(ctx context.Context, name string, data []byte) error
	// Get returns an object. The error wraps ErrNone if there is none.
	Get(ctx context.Context, name string) ([]byte, error)
	// Stat describes an object. The error wraps ErrNone if there is none.
	Stat(ctx context.Context, name string) (Object, error)
	List(ctx context.Context) ([]Object, error)
	// Delete deletes an object. It is no error if the object does not exist.
	Delete(ctx context.Context, name string) error
}

// The objects of a depot:
//
//	image/HEX     the manifest sha256:HEX; all parts of the image were stored before it
//	part/HEX/N    bytes from N*piece on of the part sha256:HEX; the last piece is shorter
//	name/NAME     what the name of an image means, as JSON
const (
	images = "image/"
	parts  = "part/"
	names  = "name/"
)

// piece is the size of the objects of a part. Each is in memory while it is sent.
const piece = 8 << 20

// Depot is a store of images. Its methods are safe for concurrent use.
type Depot struct {
	objects    Objects
	uses       uses       // so that Collect spares what Put has found
	collecting sync.Mutex // held by Collect
}

// New returns the depot in an object store.
func New(o Objects) *Depot { return &Depot{objects: o} }

func hexOf(digest string) string { return strings.TrimPrefix(digest, "sha256:") }

func pieceName(digest string, n int64) string {
	return parts + hexOf(digest) + "/" + strconv.FormatInt(n, 10)
}

// pieces returns how many objects a part of this size has. An empty part has one.
func pieces(size int64) int64 { return max((size+piece-1)/piece, 1) }

// pieceSize returns the size of a part's piece n.
func pieceSize(size, n int64) int64 { return min(size-n*piece, piece) }

// Put copies an image from a store, except for what the depot has already. When Put returns nil,
// every control plane can get the image.
func (d *Depot) Put(ctx context.Context, from *image.Store, digest string) error {
	manifest, err := read(ctx, from, digest)
	if err != nil {
		return err
	}
	all, err := image.Parts(manifest)
	if err != nil {
		return err
	}
	hexes := []string{hexOf(digest)}
	for _, p := range all {
		hexes = append(hexes, hexOf(p.Digest))
	}
	release, err := d.uses.hold(ctx, hexes)
	if err != nil {
		return err
	}
	defer release()
	for _, p := range all {
		if err := d.putPart(ctx, from, p); err != nil {
			return fmt.Errorf("image %s is not where other control planes find it: %w", digest, err)
		}
	}
	// An image that is there already is stored again, because Collect spares new ones.
	if err := d.objects.Put(ctx, images+hexOf(digest), manifest); err != nil {
		return fmt.Errorf("image %s is not where other control planes find it: %w", digest, err)
	}
	return nil
}

// read returns the manifest of an image.
func read(ctx context.Context, from *image.Store, digest string) ([]byte, error) {
	r, err := image.OpenPart(ctx, from, digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, image.MaxManifest))
}

// putPart copies a part, unless the depot has it. It checks the digest before the last piece is
// stored, so the depot has no complete part with wrong bytes.
func (d *Depot) putPart(ctx context.Context, from *image.Store, p image.Part) error {
	n := pieces(p.Size)
	there := make([]bool, n)
	all := true
	for i := range n {
		is, err := d.objects.Stat(ctx, pieceName(p.Digest, i))
		if err != nil && !errors.Is(err, ErrNone) {
			return err
		}
		there[i] = err == nil && is.Size == pieceSize(p.Size, i)
		all = all && there[i]
	}
	if all {
		return nil
	}
	r, err := image.OpenPart(ctx, from, p.Digest)
	if err != nil {
		return err
	}
	defer r.Close()
	sum, b := sha256.New(), make([]byte, min(p.Size, piece))
	for i := range n {
		b = b[:pieceSize(p.Size, i)]
		if _, err := io.ReadFull(r, b); err != nil {
			return fmt.Errorf("part %s: %w", p.Digest, err)
		}
		sum.Write(b)
		if got := hex.EncodeToString(sum.Sum(nil)); i == n-1 && got != hexOf(p.Digest) {
			return fmt.Errorf("part %s: %w: its bytes have digest sha256:%s", p.Digest, image.ErrCorrupt, got)
		}
		if there[i] {
			continue
		}
		if err := d.objects.Put(ctx, pieceName(p.Digest, i), b); err != nil {
			return err
		}
	}
	return nil
}

// named is the stored form of a name.
type named struct {
	V      int       `json:"v"` // 1
	Digest string    `json:"digest"`
	Added  time.Time `json:"added"`
}

// Name stores what the name of an image means. added is when it began to mean that.
func (d *Depot) Name(ctx context.Context, name, digest string, added time.Time) error {
	b, err := json.Marshal(named{1, digest, added.UTC()})
	if err != nil {
		return err
	}
	release, err := d.uses.hold(ctx, []string{names + name})
	if err != nil {
		return err
	}
	defer release()
	return d.objects.Put(ctx, names+name, b)
}

// Resolve returns the digest of the image that a name meant when it was stored last, and since when
// it meant that. The error wraps [image.ErrNoImage] if the name is not known.
func (d *Depot) Resolve(ctx context.Context, name string) (digest string, added time.Time, err error) {
	b, err := d.objects.Get(ctx, names+name)
	if errors.Is(err, ErrNone) {
		return "", added, fmt.Errorf("image %q: %w in the store of all control planes", name, image.ErrNoImage)
	}
	var is named
	if err == nil {
		err = json.Unmarshal(b, &is)
	}
	if err == nil && is.V != 1 {
		err = fmt.Errorf("version %d, want 1: run the same release of stagecoach everywhere", is.V)
	}
	if err != nil {
		return "", added, fmt.Errorf("image %q: %w", name, err)
	}
	return is.Digest, is.Added, nil
}

// Collect deletes the images that are not among the used digests, their names and their parts.
// Objects that are younger than age stay, because an image may be on its way, or its function may
// not be stored yet. Collect returns how many bytes it has deleted. One control plane at a time may
// call it. Put does not wait for it, except for the deletion of a single object that it needs.
func (d *Depot) Collect(ctx context.Context, used []string, age time.Duration) (freed int64, err error) {
	d.collecting.Lock()
	defer d.collecting.Unlock()
	defer d.uses.collect()()
	all, err := d.objects.List(ctx)
	if err != nil {
		return 0, err
	}
	keep, err := d.mark(ctx, all, used, age)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, o := range all {
		if time.Since(o.At) < age {
			continue
		}
		of := d.of(ctx, o)
		if of == "" || keep[of] {
			continue
		}
		done, err := d.uses.unless([]string{o.Name, of}, func() error { return d.objects.Delete(ctx, o.Name) })
		if done {
			freed += o.Size
		}
		errs = append(errs, err)
	}
	return freed, errors.Join(errs...)
}

// of returns the digest of the image or the part that an object belongs to, without sha256:. It
// returns "" if that is not known: a later version may have stored the object.
func (d *Depot) of(ctx context.Context, o Object) string {
	switch kind, rest, _ := strings.Cut(o.Name, "/"); kind + "/" {
	case images:
		return rest
	case parts:
		part, _, _ := strings.Cut(rest, "/")
		return part
	case names:
		digest, _, _ := d.Resolve(ctx, rest)
		return hexOf(digest)
	}
	return ""
}

// mark returns the images that stay and their parts, without sha256:.
func (d *Depot) mark(ctx context.Context, all []Object, used []string, age time.Duration) (map[string]bool, error) {
	keep := map[string]bool{}
	for _, digest := range used {
		keep[hexOf(digest)] = true
	}
	for _, o := range all {
		hex, is := strings.CutPrefix(o.Name, images)
		if !is || !keep[hex] && time.Since(o.At) >= age {
			continue
		}
		keep[hex] = true
		manifest, err := d.objects.Get(ctx, o.Name)
		if err != nil {
			return nil, err
		}
		has, err := image.Parts(manifest)
		if err != nil {
			return nil, fmt.Errorf("image sha256:%s: %w", hex, err)
		}
		for _, p := range has {
			keep[hexOf(p.Digest)] = true
		}
	}
	return keep, nil
}

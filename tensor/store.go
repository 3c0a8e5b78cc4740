package tensor

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Store keeps the encoded form of large items outside messages, as long as the request that owns
// them lives.
type Store interface {
	// Put stores an encoded item and returns its reference.
	Put(owner string, item []byte) (Ref, error)
	// Get returns the encoded item.
	Get(Ref) ([]byte, error)
	// Drop deletes all items of owner. It is no error if there are none.
	Drop(owner string) error
}

// Dir is a Store of files in a folder, with one folder per owner. [OpenDir] deletes files that a
// crash left behind, because their requests are gone too. Dir is safe for concurrent use. A Put
// that runs or begins during its owner's Drop fails with ErrDropped. A Put after the Drop creates
// the owner again.
type Dir struct {
	path  string
	limit int64
	next  atomic.Uint64

	mu     sync.Mutex
	used   int64
	owners map[string]*owner
}

// owner is the state of one request in a Dir.
type owner struct {
	bytes   int64
	writing int  // number of running Puts
	dropped bool // removed when the last Put has ended
}

// ErrFull means that a store or its disk has no room for an item.
var ErrFull = errors.New("tensor: the store is full")

// ErrDropped means that the owner of an item is being dropped.
var ErrDropped = errors.New("tensor: its owner was dropped")

// OpenDir creates an empty store in the folder at path, and removes what is in the folder. limit is
// the largest total size of items in bytes.
func OpenDir(path string, limit int64) (*Dir, error) {
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("blob store: %w", err)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("blob store: %w", err)
	}
	return &Dir{path: path, limit: limit, owners: map[string]*owner{}}, nil
}

// Put writes item to a new file. The file gets its name only when it is complete.
func (d *Dir) Put(name string, item []byte) (Ref, error) {
	ref := Ref{Owner: name, Blob: strconv.FormatUint(d.next.Add(1), 36), Size: int64(len(item))}
	o, err := d.reserve(ref)
	if err != nil {
		return Ref{}, err
	}
	if err := d.finish(&ref, o, d.write(ref, item)); err != nil {
		return Ref{}, err
	}
	return ref, nil
}

// finish ends a Put or Stream. err is its outcome.
func (d *Dir) finish(ref *Ref, o *owner, err error) error {
	if err != nil {
		_ = os.Remove(d.file(*ref)) // the file may not exist
	}
	d.mu.Lock()
	if err != nil {
		o.bytes -= ref.Size
		d.used -= ref.Size
	}
	o.writing--
	dropped, last := o.dropped, o.writing == 0
	d.mu.Unlock()
	if dropped {
		if last {
			_ = d.remove(ref.Owner, o) // if it fails, the next OpenDir removes it
		}
		err = ErrDropped
	}
	if disk.IsFull(err) {
		err = fmt.Errorf("%w: %w", ErrFull, disk.Explain(d.path, max(ref.Size, 1), err))
	}
	if err != nil {
		return fmt.Errorf("blob of %q: %w", ref.Owner, err)
	}
	return nil
}

// reserve reserves room for an item.
func (d *Dir) reserve(ref Ref) (*owner, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if ref.Size > d.limit-d.used {
		return nil, fmt.Errorf("item of %d bytes, %d of %d in use: %w", ref.Size, d.used, d.limit, ErrFull)
	}
	o := d.owners[ref.Owner]
	switch {
	case o == nil:
		o = &owner{}
		d.owners[ref.Owner] = o
	case o.dropped:
		return nil, fmt.Errorf("blob of %q: %w", ref.Owner, ErrDropped)
	}
	o.writing++
	o.bytes += ref.Size
	d.used += ref.Size
	return o, nil
}

func (d *Dir) write(ref Ref, item []byte) error {
	f, err := d.create(ref)
	if err != nil {
		return err
	}
	_, err = f.Write(item)
	return errors.Join(err, f.Close())
}

// create creates the file of a blob, and the owner's folder if necessary.
func (d *Dir) create(ref Ref) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	f, err := os.OpenFile(d.file(ref), flags, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(d.folder(ref.Owner), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		f, err = os.OpenFile(d.file(ref), flags, 0o600)
	}
	return f, err
}

// Get reads the file.
func (d *Dir) Get(ref Ref) ([]byte, error) {
	b, err := os.ReadFile(d.file(ref))
	if err != nil {
		return nil, fmt.Errorf("blob %q of %q: %w", ref.Blob, ref.Owner, err)
	}
	if int64(len(b)) != ref.Size {
		return nil, fmt.Errorf("blob %q of %q: %d bytes, want %d", ref.Blob, ref.Owner, len(b), ref.Size)
	}
	return b, nil
}

// Open returns the encoded item as a file for reading. The caller closes the file, which stays
// readable after the item's owner is dropped.
func (d *Dir) Open(ref Ref) (*os.File, error) {
	f, err := os.Open(d.file(ref))
	if err != nil {
		return nil, fmt.Errorf("blob %q of %q: %w", ref.Blob, ref.Owner, err)
	}
	return f, nil
}

// Drop removes the owner's folder. If something is being written into the folder, the last writer
// removes the folder.
func (d *Dir) Drop(name string) error {
	d.mu.Lock()
	o := d.owners[name]
	now := o != nil && !o.dropped && o.writing == 0
	if o != nil {
		o.dropped = true
	}
	d.mu.Unlock()
	if !now {
		return nil
	}
	return d.remove(name, o)
}

// remove removes a dropped owner that nobody writes to.
func (d *Dir) remove(name string, o *owner) error {
	err := os.RemoveAll(d.folder(name))
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.owners, name)
	d.used -= o.bytes
	if err != nil {
		return fmt.Errorf("blobs of %q: %w", name, err)
	}
	return nil
}

// folder and file escape names from outside, so that they cannot name other paths.
func (d *Dir) folder(owner string) string { return filepath.Join(d.path, "o-"+url.PathEscape(owner)) }

func (d *Dir) file(ref Ref) string {
	return filepath.Join(d.folder(ref.Owner), "b-"+url.PathEscape(ref.Blob))
}

// messageLimit is the largest total size in bytes of a message's small items. If the small items
// are larger together, Externalise moves some of them to the store too.
const messageLimit = 1 << 20

// Externalise returns a copy of a in which every item above InlineLimit is replaced by a reference
// into s. If the smaller items have more than 1 MiB together, Externalise replaces them too, from
// the first on, until at most 1 MiB is left.
func Externalise(s Store, owner string, a Activation) (Activation, error) {
	small, large := 0, false
	for _, it := range a {
		if n := it.Size(); n > InlineLimit {
			large = true
		} else {
			small += n
		}
	}
	if !large && small <= messageLimit {
		return a, nil
	}
	out := make(Activation, len(a))
	for i, it := range a {
		out[i] = it
		n := it.Size()
		if it.Ref != nil || n <= InlineLimit && small <= messageLimit {
			continue
		}
		ref, err := s.Put(owner, AppendItem(make([]byte, 0, n+64), it))
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		out[i] = Item{Ref: &ref}
		if n <= InlineLimit {
			small -= n
		}
	}
	return out, nil
}

// Resolve returns a copy of a in which every reference is replaced by its item.
func Resolve(s Store, a Activation) (Activation, error) { return resolve(s, a, true) }

// ResolveStored is Resolve, but references to items that nodes keep stay.
func ResolveStored(s Store, a Activation) (Activation, error) { return resolve(s, a, false) }

func resolve(s Store, a Activation, kept bool) (Activation, error) {
	var out Activation
	for i, it := range a {
		if it.Ref == nil || it.Ref.Node != "" && !kept {
			continue
		}
		if out == nil {
			out = append(Activation(nil), a...)
		}
		b, err := s.Get(*it.Ref)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		if out[i], err = DecodeItem(b); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
	}
	if out == nil {
		return a, nil
	}
	return out, nil
}

// Size estimates the bytes of the item in a message. A reference counts as 0 bytes.
func (it Item) Size() int {
	n := len(it.Bytes)
	for _, t := range it.Tensors {
		n += len(t.Data) + len(t.Name) + 8*len(t.Shape)
	}
	return n
}

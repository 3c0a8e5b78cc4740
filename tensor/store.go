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

// Store keeps the encoded form of large items outside of messages, for as long as the request that owns them lives.
type Store interface {
	// Put keeps an encoded item, and returns where it is.
	Put(owner string, item []byte) (Ref, error)
	// Get returns the encoded item.
	Get(Ref) ([]byte, error)
	// Drop forgets all that owner has. Dropping an owner that has nothing is no error.
	Drop(owner string) error
}

// Dir is a Store of files in a folder of one machine, one folder an owner. What a crash leaves behind is removed by the
// next OpenDir, because the requests are gone too. It is safe for concurrent use; a Put during its owner's Drop
// fails with ErrDropped, and one after it makes the owner anew.
type Dir struct {
	path  string
	limit int64
	next  atomic.Uint64

	mu     sync.Mutex
	used   int64
	owners map[string]*owner
}

// owner is what a Dir has of one request.
type owner struct {
	bytes   int64
	writing int  // Puts under way
	dropped bool // goes once nothing is written
}

// ErrFull says that a store, or its disk, has no room for an item.
var ErrFull = errors.New("tensor: the store is full")

// ErrDropped says that an item's owner is being dropped.
var ErrDropped = errors.New("tensor: its owner was dropped")

// OpenDir makes an empty store of at most limit bytes at path. What lies there is removed.
func OpenDir(path string, limit int64) (*Dir, error) {
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("blob store: %w", err)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("blob store: %w", err)
	}
	return &Dir{path: path, limit: limit, owners: map[string]*owner{}}, nil
}

// Put writes item to a file of its own. Nobody knows the file before it is whole.
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

// finish ends a Put or Stream, which err has come to.
func (d *Dir) finish(ref *Ref, o *owner, err error) error {
	if err != nil {
		_ = os.Remove(d.file(*ref)) // it may not be there
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
			_ = d.remove(ref.Owner, o) // the next OpenDir does
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

// reserve takes room for an item.
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

// create makes the file of a blob, and the folder of an owner who has none.
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

// Open returns the encoded item as a file to read, the caller's to close. It stays readable when its owner is dropped.
func (d *Dir) Open(ref Ref) (*os.File, error) {
	f, err := os.Open(d.file(ref))
	if err != nil {
		return nil, fmt.Errorf("blob %q of %q: %w", ref.Blob, ref.Owner, err)
	}
	return f, nil
}

// Drop removes the owner's folder; while something is written into it, the last writer does.
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

// folder and file escape what comes from outside, so that it names nothing but itself.
func (d *Dir) folder(owner string) string { return filepath.Join(d.path, "o-"+url.PathEscape(owner)) }

func (d *Dir) file(ref Ref) string {
	return filepath.Join(d.folder(ref.Owner), "b-"+url.PathEscape(ref.Blob))
}

// messageLimit is the size in bytes above which the items of one message are put into the store, largest first, even
// though each is small.
const messageLimit = 1 << 20

// Externalise returns a with every item above InlineLimit replaced by a reference into s; so are smaller ones while all of
// them together are above 1 MiB. a itself is not changed.
func Externalise(s Store, owner string, a Activation) (Activation, error) {
	total, large := 0, false
	for _, it := range a {
		n := it.Size()
		total += n
		large = large || n > InlineLimit
	}
	if !large && total <= messageLimit {
		return a, nil
	}
	out := make(Activation, len(a))
	for i, it := range a {
		out[i] = it
		n := it.Size()
		if it.Ref != nil || n <= InlineLimit && total <= messageLimit {
			continue
		}
		ref, err := s.Put(owner, AppendItem(make([]byte, 0, n+64), it))
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		out[i] = Item{Ref: &ref}
		total -= n
	}
	return out, nil
}

// Resolve returns a with every reference replaced by its item. a itself is not changed.
func Resolve(s Store, a Activation) (Activation, error) {
	var out Activation
	for i, it := range a {
		if it.Ref == nil {
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

// Size is about what the item takes in a message, in bytes; a reference takes none.
func (it Item) Size() int {
	n := len(it.Bytes)
	for _, t := range it.Tensors {
		n += len(t.Data) + len(t.Name) + 8*len(t.Shape)
	}
	return n
}

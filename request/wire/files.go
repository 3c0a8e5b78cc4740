package wire

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// fileOwner is the owner of a reference to a file that comes with the frame. The reference's blob
// is the file's index in the frame.
const fileOwner = "fd:"

// Attach moves the large items of a into files, for a frame that already has n files. An inline
// item above tensor.InlineLimit goes into a sealed memfd, unless the frame already has MaxFiles. A
// reference becomes the file that open returns for it, or stays if that is nil. All other items
// stay inline. Attach does not change a. It fails if the files are too many or too large for
// Detach. The caller closes the returned files once the frame is written, and also after an error.
func Attach(a tensor.Activation, n int, open func(tensor.Ref) (*os.File, error)) (tensor.Activation, []*os.File, error) {
	var out tensor.Activation
	var files []*os.File
	left := int64(maxDetached)
	for i, it := range a {
		var f *os.File
		var size int64
		var err error
		switch {
		case it.Ref != nil:
			if size = it.Ref.Size; size <= left {
				f, err = open(*it.Ref)
			}
		case it.Size() > tensor.InlineLimit && n+len(files) < MaxFiles:
			encoded := tensor.AppendItem(make([]byte, 0, it.Size()+64), it)
			if size = int64(len(encoded)); size <= left {
				f, err = sealed(encoded)
			}
		default:
			continue
		}
		if left -= size; left < 0 {
			err = fmt.Errorf("%d bytes in files, want at most %d in all", maxDetached-left, int64(maxDetached))
		}
		if err != nil {
			return nil, files, fmt.Errorf("item %d: %w", i, err)
		}
		if f == nil {
			continue
		}
		if out == nil {
			out = append(out, a...)
		}
		out[i] = tensor.Item{Ref: fileRef(n+len(files), size)}
		files = append(files, f)
		if n+len(files) > MaxFiles {
			return nil, files, fmt.Errorf("item %d: more than %d items by reference in one frame", i, MaxFiles)
		}
	}
	if out == nil {
		out = a
	}
	return out, files, nil
}

// Detach replaces the references in the activation a. Each reference names one of the frame's
// files, and is replaced by the item in that file. Detach copies the items, so that later writes of
// the sender to the files have no effect. It fails on references to anything else, and if the items
// have more than 1 GiB together.
func Detach(a tensor.Activation, files []*os.File) (tensor.Activation, error) {
	return detachAll(a, files, false)
}

// DetachKept is Detach for a frame with Frame.Kept: references to items that nodes keep stay.
func DetachKept(a tensor.Activation, files []*os.File) (tensor.Activation, error) {
	return detachAll(a, files, true)
}

func detachAll(a tensor.Activation, files []*os.File, kept bool) (tensor.Activation, error) {
	left := int64(maxDetached)
	for i, it := range a {
		if it.Ref == nil || kept && it.Ref.Node != "" {
			continue
		}
		if left -= it.Ref.Size; left < 0 {
			return nil, fmt.Errorf("item %d: %d bytes in a file, want at most %d in all", i, it.Ref.Size, int64(maxDetached))
		}
		var err error
		if a[i], err = detach(*it.Ref, files); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
	}
	return a, nil
}

// maxDetached is how many bytes Detach reads for one activation.
const maxDetached = 1 << 30

func detach(ref tensor.Ref, files []*os.File) (tensor.Item, error) {
	k, ok := fileIndex(ref, len(files))
	if !ok {
		return tensor.Item{}, fmt.Errorf("reference to %q of %q, want a file that came with the frame, which has %d", ref.Blob, ref.Owner, len(files))
	}
	info, err := files[k].Stat()
	if err != nil {
		return tensor.Item{}, err
	}
	// reading anything else could block for ever.
	if !info.Mode().IsRegular() || info.Size() < ref.Size {
		return tensor.Item{}, fmt.Errorf("a file %v of %d bytes, want a regular one of %d", info.Mode(), info.Size(), ref.Size)
	}
	b := make([]byte, ref.Size)
	if _, err := files[k].ReadAt(b, 0); err != nil {
		return tensor.Item{}, err
	}
	it, err := tensor.DecodeItem(b)
	if err == nil && it.Ref != nil {
		err = errors.New("a reference within a file, want the item")
	}
	return it, err
}

// fileIndex returns the index of the file that a reference names, of n files that came with the
// frame.
func fileIndex(ref tensor.Ref, n int) (int, bool) {
	k, err := strconv.Atoi(ref.Blob)
	return k, err == nil && ref.Owner == fileOwner && ref.Node == "" && k >= 0 && k < n
}

// fileRef returns the reference to the file with index k of a frame.
func fileRef(k int, size int64) *tensor.Ref {
	return &tensor.Ref{Owner: fileOwner, Blob: strconv.Itoa(k), Size: size}
}

// sealed returns a memfd with the content b that nobody can change.
func sealed(b []byte) (*os.File, error) {
	f, err := NewMemory()
	if err != nil {
		return nil, err
	}
	if _, err = f.Write(b); err == nil {
		err = Seal(f)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("memfd of %d bytes: %w", len(b), err)
	}
	return f, nil
}

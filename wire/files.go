package wire

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// fileOwner is the owner of a reference to a file that rides with the frame; its blob is the file's index there.
const fileOwner = "fd:"

// Attach moves the large items of a into files for a frame that has n files already: an inline item above
// tensor.InlineLimit into a sealed memfd, a reference into what open returns for it. The rest stays inline. a itself is not
// changed; the files are the caller's to close once the frame is written, also when there is an error.
func Attach(a tensor.Activation, n int, open func(tensor.Ref) (*os.File, error)) (tensor.Activation, []*os.File, error) {
	var out tensor.Activation
	var files []*os.File
	for i, it := range a {
		var f *os.File
		var size int64
		var err error
		switch {
		case it.Ref != nil:
			size = it.Ref.Size
			f, err = open(*it.Ref)
		case it.Size() > tensor.InlineLimit && n+len(files) < MaxFiles:
			encoded := tensor.AppendItem(make([]byte, 0, it.Size()+64), it)
			size = int64(len(encoded))
			f, err = sealed(encoded)
		default:
			continue
		}
		if err != nil {
			return nil, files, fmt.Errorf("item %d: %w", i, err)
		}
		if out == nil {
			out = append(out, a...)
		}
		out[i] = tensor.Item{Ref: &tensor.Ref{Owner: fileOwner, Blob: strconv.Itoa(n + len(files)), Size: size}}
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

// Detach reads the items of a that lie in a frame's files back. The items are copies: a sender that writes to the file
// later changes nothing. A reference to anything else is an error.
func Detach(a tensor.Activation, files []*os.File) (tensor.Activation, error) {
	for i, it := range a {
		if it.Ref == nil {
			continue
		}
		k, err := strconv.Atoi(it.Ref.Blob)
		if it.Ref.Owner != fileOwner || err != nil || k < 0 || k >= len(files) {
			return nil, fmt.Errorf("item %d: reference to %q of %q, want a file that rides with the frame, which has %d", i, it.Ref.Blob, it.Ref.Owner, len(files))
		}
		if it.Ref.Size > maxFile {
			return nil, fmt.Errorf("item %d: %d bytes in a file, want at most %d", i, it.Ref.Size, int64(maxFile))
		}
		info, err := files[k].Stat()
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		if info.Size() < it.Ref.Size {
			return nil, fmt.Errorf("item %d: a file of %d bytes, want %d", i, info.Size(), it.Ref.Size)
		}
		b := make([]byte, it.Ref.Size)
		if _, err := files[k].ReadAt(b, 0); err != nil && err != io.EOF {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		if a[i], err = tensor.DecodeItem(b); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		if a[i].Ref != nil {
			return nil, fmt.Errorf("item %d: a reference within a file, want the item", i)
		}
	}
	return a, nil
}

// maxFile is the largest item in bytes that Detach reads.
const maxFile = 1 << 30

// sealed returns a memfd that holds b and that nobody can change any more.
func sealed(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("stagecoach-item", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "item")
	if _, err = f.Write(b); err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("memfd of %d bytes: %w", len(b), err)
	}
	return f, nil
}

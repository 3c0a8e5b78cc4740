// Package disk returns the free bytes of a folder's disk, and adds the disk's name to the errors of
// writes that found it full. It also replaces files.
package disk

import (
	"errors"
	"fmt"
	"strconv"
	"syscall"
)

// FullError means that a disk has too little room. errors.Is reports it as syscall.ENOSPC.
type FullError struct {
	Path string // a folder on the disk
	// In bytes. Free is -1 if unknown. Want is shown only if it is larger than Free, because a
	// failed write may free bytes.
	Free, Want int64
	Err        error // the error of the write that found the disk full; nil: no write was tried
}

// Error implements error.
func (e *FullError) Error() string {
	want := "more"
	if e.Want > e.Free {
		want = strconv.FormatInt(e.Want, 10)
	}
	text := fmt.Sprintf("the disk of %s has %d bytes left, want %s: free some space", e.Path, e.Free, want)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap implements errors.Unwrap.
func (e *FullError) Unwrap() []error {
	if e.Err == nil {
		return []error{syscall.ENOSPC}
	}
	return []error{syscall.ENOSPC, e.Err}
}

// Free returns how many bytes may still be written to the disk of the file or folder at path.
func Free(path string) (int64, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return 0, fmt.Errorf("disk of %s: %w", path, err)
	}
	return int64(s.Bavail) * s.Bsize, nil
}

// Room returns a *FullError if the disk of path has fewer bytes left than are wanted.
func Room(path string, want int64) error {
	free, err := Free(path)
	if err != nil {
		return err
	}
	if free < want {
		return &FullError{Path: path, Free: free, Want: want}
	}
	return nil
}

// IsFull reports whether err comes from a full disk or an exhausted quota.
func IsFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Explain turns the error of a write below path into a *FullError if the disk was full. Any other
// error is returned unchanged. want is how many bytes the write needed.
func Explain(path string, want int64, err error) error {
	var full *FullError
	if !IsFull(err) || errors.As(err, &full) {
		return err
	}
	free, bad := Free(path)
	if bad != nil {
		free = -1
	}
	return &FullError{Path: path, Free: free, Want: want, Err: err}
}

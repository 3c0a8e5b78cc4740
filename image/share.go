package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// shareFrom is the smallest size, in bytes, of files that images share.
const shareFrom = 1 << 20

// shares reports whether a file is shared with equal files of other images. Only the store's owner
// may write to such a file.
func (u *unpacker) shares(e *tar.Header) bool {
	return u.shared != "" && e.Size >= shareFrom && mode(e)&0o022 == 0 && (!u.chown || e.Uid == 0)
}

// linkFrom makes a hard link in the root to a file of a layer. It returns false if that is not
// possible, for example if the file has as many links as its file system allows.
func (u *unpacker) linkFrom(file, at string, e *tar.Header) (bool, error) {
	dir, err := u.root.Open(path.Dir(at)) // a path without links
	if err != nil {
		return false, err
	}
	defer dir.Close()
	err = unix.Linkat(unix.AT_FDCWD, file, int(dir.Fd()), path.Base(at), 0)
	switch {
	case err == nil:
		if info, err := os.Lstat(file); err != nil || int(info.Sys().(*syscall.Stat_t).Uid) == e.Uid {
			return true, err
		}
		return true, u.own(at, e) // another user owns the built file
	case errors.Is(err, unix.EMLINK), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOTSUP):
		return false, nil
	}
	return false, fmt.Errorf("link %s: %w", at, err)
}

// share replaces a file by a link to the file of other images with the same content and properties.
func (u *unpacker) share(at, id string) error {
	dir, err := u.root.Open(path.Dir(at)) // a path without links
	if err != nil {
		return err
	}
	defer dir.Close()
	id, base := filepath.Join(u.shared, id), path.Base(at)
	for range 2 {
		err = unix.Linkat(int(dir.Fd()), base, unix.AT_FDCWD, id, 0)
		if err == nil {
			return nil // this is the first file with the content
		}
		if !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("share %s: %w", at, err)
		}
		part := base + ".part"
		err = unix.Linkat(unix.AT_FDCWD, id, int(dir.Fd()), part, 0)
		if err == nil {
			return unix.Renameat(int(dir.Fd()), part, int(dir.Fd()), base)
		}
		if errors.Is(err, unix.EMLINK) || errors.Is(err, unix.EEXIST) {
			return nil // the file system allows no link, so the file stays a copy
		}
	}
	return fmt.Errorf("share %s: %w", at, err)
}

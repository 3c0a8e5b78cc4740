package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// maxSeized bounds the number of files and folders below a folder.
const maxSeized = 1000

// Seize makes this process's user the owner of a folder that an account's process has written, and
// lets all users read the folder. Afterwards nobody else can change its content, not even through a
// descriptor or mapping that is still open. The folder may contain only files and folders; most is
// the maximum total size of its files in bytes. If Seize fails, the caller must not use the folder.
func Seize(folder string, most int64) error {
	fd, err := unix.Open(folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("seize %s: %w", folder, err)
	}
	s := seizure{bytes: most, left: maxSeized}
	if err := s.folder(os.NewFile(uintptr(fd), folder)); err != nil {
		return fmt.Errorf("seize: %w", err)
	}
	return nil
}

// seizure counts what the rest of the folder may contain.
type seizure struct {
	bytes int64
	left  int
}

// folder seizes an open folder and closes it. It changes the owner first, so that no file can be
// added after the list is read.
func (s *seizure) folder(f *os.File) error {
	defer f.Close()
	//nolint:gosec // all users may read it
	if err := errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o755)); err != nil {
		return err
	}
	for {
		names, err := f.Readdirnames(100)
		for _, name := range names {
			if err := s.entry(f, name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *seizure) entry(dir *os.File, name string) error {
	path := dir.Name() + "/" + name
	if s.left--; s.left < 0 {
		return fmt.Errorf("%s: more than %d files and folders, want fewer", path, maxSeized)
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		return s.folder(f)
	}
	defer f.Close()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is a %v, want only files and folders", path, info.Mode().Type())
	}
	//nolint:gosec // all users may read it
	if err := errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o444)); err != nil {
		return err
	}
	// The kernel grants a read lease only if no process has the file open for writing. No process can
	// open it for writing any more.
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
		return fmt.Errorf("%s: another process can still write to it: %w", path, err)
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if info, err = f.Stat(); err != nil { // the size no longer changes
		return err
	}
	if s.bytes -= info.Size(); s.bytes < 0 {
		return fmt.Errorf("%s: the folder has %d bytes too many", path, -s.bytes)
	}
	return nil
}

package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// maxSeized bounds the files and folders of a folder that is seized.
const maxSeized = 1000

// Seize makes a folder that a process with an account has written this process's own, for others to read: from then on nobody
// else can change what is in it, not even through a descriptor or mapping that is still open. Files of at most so many bytes
// in all are wanted, and folders, and nothing else. When it fails, the folder is good for nothing.
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

// seizure is how much may still come.
type seizure struct {
	bytes int64
	left  int
}

// folder seizes an open folder, which it closes. It becomes ours first, so that what is listed then is all there will be.
func (s *seizure) folder(f *os.File) error {
	defer f.Close()
	if err := errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o755)); err != nil { //nolint:gosec // for others to read
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
		return fmt.Errorf("%s: more than %d files and folders", path, maxSeized)
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
		return fmt.Errorf("%s is a %v, want files and folders", path, info.Mode().Type())
	}
	if err := errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o444)); err != nil { //nolint:gosec // for others to read
		return err
	}
	// A lease to read is given only while nobody has the file open for writing, and nobody can open it any more.
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
		return fmt.Errorf("%s: somebody can still write to it: %w", path, err)
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if info, err = f.Stat(); err != nil { // now that it changes no more
		return err
	}
	if s.bytes -= info.Size(); s.bytes < 0 {
		return fmt.Errorf("%s: there is more than wanted by %d bytes", path, -s.bytes)
	}
	return nil
}

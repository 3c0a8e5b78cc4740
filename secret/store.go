package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// MaxSize is the size in bytes that a secret may have.
const MaxSize = 1 << 20

// nameWant says in words what validName wants.
const nameWant = "up to 253 lower-case letters, digits, '-' and '.', a letter or digit at both ends"

var (
	nameForm      = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

func validName(s string) bool { return len(s) <= 253 && nameForm.MatchString(s) }

// Store is secrets in a folder.
type Store struct {
	root   *os.Root // of the values
	mounts *os.Root // of the copies; so that no name leads out of them
	at     string   // path of that
	groups Groups
}

// Groups says which group of users a namespace's functions run as.
type Groups func(namespace string) (gid int, err error)

// The folders of a Store.
const (
	valuesDir = "secrets"
	mountsDir = "secret-mounts"
)

// Open opens the secrets in dir, whose last folder is made if it does not exist. Mounts of an earlier owner are gone; those of
// this one are below it, and its user's alone.
func Open(dir string) (*Store, error) { return openStore(dir, filepath.Join(dir, mountsDir), nil) }

// OpenShared is Open with mounts in another folder, whose last part is made. There, a function's secrets can be read by what runs
// in its namespace's group, and changed by this process's user, who has to be root.
func OpenShared(dir, mounts string, groups Groups) (*Store, error) {
	return openStore(dir, mounts, groups)
}

func openStore(dir, mounts string, groups Groups) (*Store, error) {
	s := &Store{groups: groups}
	var err error
	if s.at, err = filepath.Abs(mounts); err == nil {
		err = s.openAt(dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("secrets: %w", err), s.Close())
	}
	return s, nil
}

func (s *Store) openAt(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	var err error
	if s.root, err = os.OpenRoot(dir); err != nil {
		return err
	}
	err = errors.Join(s.root.MkdirAll(valuesDir, 0o700), s.root.RemoveAll(mountsDir), os.RemoveAll(s.at))
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o700)
	if s.groups != nil {
		mode = 0o711
	}
	if err := errors.Join(os.Mkdir(s.at, mode), os.Chmod(s.at, mode)); err != nil { // whatever the umask
		return err
	}
	s.mounts, err = os.OpenRoot(s.at)
	return err
}

// Close lets the folders go; the files stay, but for shared mounts.
func (s *Store) Close() error {
	var errs []error
	if s.groups != nil && s.mounts != nil {
		errs = append(errs, os.RemoveAll(s.at))
	}
	for _, r := range []*os.Root{s.root, s.mounts} {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}

// List returns the names of a namespace's secrets, sorted.
func (s *Store) List(namespace string) ([]string, error) {
	if !namespaceForm.MatchString(namespace) {
		return nil, nil
	}
	entries, err := fs.ReadDir(s.root.FS(), valuesDir+"/"+namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("secrets of %q: %w", namespace, err)
	}
	var names []string
	for _, e := range entries { // sorted
		if validName(e.Name()) { // what a crash has left half-written is not
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Put stores a secret, new or not.
func (s *Store) Put(namespace, name string, value []byte) error {
	file, err := valueFile(namespace, name)
	if err == nil && len(value) > MaxSize {
		err = fmt.Errorf("%d bytes, want at most %d", len(value), MaxSize)
	}
	if err == nil {
		err = s.root.MkdirAll(filepath.Dir(file), 0o700)
	}
	if err == nil {
		err = write(s.root, file, value, nil)
	}
	if err != nil {
		return fmt.Errorf("secret %q of %q: %w", name, namespace, err)
	}
	return nil
}

// Delete removes a secret; one that is not there is no error. Copies in mounts stay until these are made anew.
func (s *Store) Delete(namespace, name string) error {
	file, err := valueFile(namespace, name)
	if err == nil {
		err = s.root.Remove(file)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("secret %q of %q: %w", name, namespace, err)
	}
	_ = s.root.Remove(filepath.Dir(file)) // when it was the last
	return nil
}

func valueFile(namespace, name string) (string, error) {
	switch {
	case !namespaceForm.MatchString(namespace):
		return "", fmt.Errorf("namespace %q, want up to 63 lower-case letters, digits and -, no - at the ends", namespace)
	case !validName(name):
		return "", fmt.Errorf("name %q, want %s", name, nameWant)
	}
	return filepath.Join(valuesDir, namespace, name), nil
}

// MountPath returns the absolute path of the folder that [Store.Mount] fills for a function.
func (s *Store) MountPath(namespace, function string) string {
	return filepath.Join(s.at, namespace, function)
}

// Mount makes a function's folder hold exactly the secrets of these names, with their present values. The folder stays the
// same one, and each file changes at once, so that what runs reads the old value or the new one. Without names, the folder is
// removed.
func (s *Store) Mount(namespace, function string, names []string) error {
	if err := s.mount(namespace, function, names); err != nil {
		return fmt.Errorf("secrets for function %q of %q: %w", function, namespace, err)
	}
	return nil
}

func (s *Store) mount(namespace, function string, names []string) error {
	if !namespaceForm.MatchString(namespace) || function == "" || function == "." || strings.ContainsAny(function, "/\x00") || function == ".." {
		return errors.New("no name for a folder")
	}
	folder := filepath.Join(namespace, function)
	if len(names) == 0 {
		err := s.mounts.RemoveAll(folder)
		_ = s.mounts.Remove(namespace) // when it was the last
		return err
	}
	give, err := s.readers(namespace)
	if err != nil {
		return err
	}
	for _, dir := range []string{namespace, folder} {
		if err := s.mounts.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := give(s.mounts, dir, 0o750); err != nil {
			return err
		}
	}
	for _, name := range names {
		file, err := valueFile(namespace, name)
		if err != nil {
			return err
		}
		value, err := s.root.ReadFile(file)
		if err != nil {
			return err
		}
		mounted := filepath.Join(folder, name)
		if old, err := s.mounts.ReadFile(mounted); err == nil && bytes.Equal(old, value) {
			continue
		}
		if err := write(s.mounts, mounted, value, give); err != nil {
			return err
		}
	}
	there, err := fs.ReadDir(s.mounts.FS(), filepath.ToSlash(folder))
	if err != nil {
		return err
	}
	for _, e := range there {
		if !slices.Contains(names, e.Name()) {
			err = errors.Join(err, s.mounts.Remove(filepath.Join(folder, e.Name())))
		}
	}
	return err
}

// giver lets others read a file or folder in root, with this mode.
type giver func(root *os.Root, name string, mode fs.FileMode) error

// readers returns what lets a namespace's functions read their mounts; it does nothing when they run as this process's user.
func (s *Store) readers(namespace string) (giver, error) {
	if s.groups == nil {
		return func(*os.Root, string, fs.FileMode) error { return nil }, nil
	}
	gid, err := s.groups(namespace)
	if err != nil {
		return nil, err
	}
	return func(root *os.Root, name string, mode fs.FileMode) error {
		return errors.Join(root.Chown(name, os.Getuid(), gid), root.Chmod(name, mode))
	}, nil
}

// write writes a file of mode 0400, or given to others to read, so that it is there whole or not at all, also after a power cut.
func write(root *os.Root, file string, value []byte, give giver) error {
	temporary := filepath.Join(filepath.Dir(file), ".new") // no secret's name; there is one writer
	if err := root.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	_, err = f.Write(value)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil && give != nil {
		err = give(root, temporary, 0o440)
	}
	if err == nil {
		err = root.Rename(temporary, file)
	}
	if err != nil {
		return errors.Join(err, root.Remove(temporary))
	}
	d, err := root.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

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
	dir  string
	root *os.Root // of all that is written, so that no name leads out of it
}

// The folders of a Store.
const (
	valuesDir = "secrets"
	mountsDir = "secret-mounts"
)

// Open opens the secrets in dir, whose last folder is made if it does not exist. Mounts of an earlier owner are gone.
func Open(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	s := &Store{dir: dir, root: root}
	err = root.RemoveAll(mountsDir)
	for _, sub := range []string{valuesDir, mountsDir} {
		err = errors.Join(err, root.MkdirAll(sub, 0o700))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("secrets: %w", err), root.Close())
	}
	return s, nil
}

// Close lets the folder go; the files stay.
func (s *Store) Close() error { return s.root.Close() }

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
		err = s.write(file, value)
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
	return filepath.Join(s.dir, mountsDir, namespace, function)
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
	folder := filepath.Join(mountsDir, namespace, function)
	if len(names) == 0 {
		err := s.root.RemoveAll(folder)
		_ = s.root.Remove(filepath.Dir(folder)) // when it was the last
		return err
	}
	if err := s.root.MkdirAll(folder, 0o700); err != nil {
		return err
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
		if old, err := s.root.ReadFile(mounted); err == nil && bytes.Equal(old, value) {
			continue
		}
		if err := s.write(mounted, value); err != nil {
			return err
		}
	}
	there, err := fs.ReadDir(s.root.FS(), filepath.ToSlash(folder))
	if err != nil {
		return err
	}
	for _, e := range there {
		if !slices.Contains(names, e.Name()) {
			err = errors.Join(err, s.root.Remove(filepath.Join(folder, e.Name())))
		}
	}
	return err
}

// write writes a file of mode 0400 so that it is there whole or not at all, also after a power cut.
func (s *Store) write(file string, value []byte) error {
	temporary := filepath.Join(filepath.Dir(file), ".new") // no secret's name; there is one writer
	if err := s.root.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := s.root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	_, err = f.Write(value)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = s.root.Rename(temporary, file)
	}
	if err != nil {
		return errors.Join(err, s.root.Remove(temporary))
	}
	d, err := s.root.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

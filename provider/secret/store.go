package secret

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// MaxSize is the largest secret in bytes.
const MaxSize = 1 << 20

// nameWant describes validName in words.
const nameWant = "up to 253 lower-case letters, digits, '-' and '.', a letter or digit at both ends"

var (
	nameForm      = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

func validName(s string) bool { return len(s) <= 253 && nameForm.MatchString(s) }

// Store holds secrets in a folder. Its methods are safe for concurrent use.
type Store struct {
	mu     sync.Mutex // held by changes
	root   *os.Root   // folder of the values
	mounts *os.Root   // folder of the copies, which no name can leave
	at     string     // path of mounts
	groups Groups
	keep   bool // mounts survive Open and Close
}

// Groups returns the group of all functions of a namespace that name exactly these secrets. names
// is sorted and has no duplicates.
type Groups func(namespace string, names []string) (gid int, err error)

// The folders of a Store.
const (
	valuesDir = "secrets"
	mountsDir = "secret-mounts"
)

// Open opens the secrets in the folder dir. It creates this folder if it does not exist; the parent
// must exist. It removes the mounts of an earlier owner. The new Store's mounts are below dir, and
// only this process's user can read them.
func Open(dir string) (*Store, error) { return openStore(dir, filepath.Join(dir, mountsDir), nil) }

// OpenShared does what [Open] does, for functions that run as other users. The functions' folders
// are in the folder at the path mounts. OpenShared creates this folder; its parent must exist. A
// function's group can read the function's folder, but only this process's user, which must be
// root, can enter the folders above it. So the function's processes get their folder as a mount
// (sandbox.Command.Secrets).
func OpenShared(dir, mounts string, groups Groups) (*Store, error) {
	return openStore(dir, mounts, groups)
}

// OpenKept does what [OpenShared] does for a node whose processes survive this one. Earlier mounts
// stay, also after Close, until they are unmounted or swept. Without groups, functions run as this
// process's user.
func OpenKept(dir, mounts string, groups Groups) (*Store, error) {
	return openAll(dir, mounts, &Store{groups: groups, keep: true})
}

func openStore(dir, mounts string, groups Groups) (*Store, error) {
	return openAll(dir, mounts, &Store{groups: groups})
}

func openAll(dir, mounts string, s *Store) (*Store, error) {
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
	if err := s.root.MkdirAll(valuesDir, 0o700); err != nil {
		return err
	}
	if !s.keep {
		if err := errors.Join(s.root.RemoveAll(mountsDir), os.RemoveAll(s.at)); err != nil {
			return err
		}
	}
	if err := os.Mkdir(s.at, 0o700); err != nil && !(s.keep && errors.Is(err, fs.ErrExist)) {
		return err
	}
	s.mounts, err = os.OpenRoot(s.at)
	return err
}

// Close closes the folders. The files stay, except for shared mounts.
func (s *Store) Close() error {
	var errs []error
	if s.groups != nil && s.mounts != nil && !s.keep {
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
		if validName(e.Name()) { // skips files that a crash has left half-written
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// All returns the names of the secrets of all namespaces, sorted.
func (s *Store) All() (map[string][]string, error) {
	namespaces, err := fs.ReadDir(s.root.FS(), valuesDir)
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	all := map[string][]string{}
	for _, e := range namespaces {
		names, err := s.List(e.Name())
		if err != nil {
			return nil, err
		}
		if len(names) > 0 {
			all[e.Name()] = names
		}
	}
	return all, nil
}

// Read returns the value of a secret. The error wraps [fs.ErrNotExist] if there is none.
func (s *Store) Read(namespace, name string) ([]byte, error) {
	file, err := valueFile(namespace, name)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	value, err := s.root.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("secret %q of %q: %w", name, namespace, err)
	}
	return value, nil
}

// Put stores a new or existing secret. The copies in mounts change at once.
func (s *Store) Put(namespace, name string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
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
	if err == nil {
		err = s.refresh(namespace, name, value)
	}
	if err != nil {
		return fmt.Errorf("secret %q of %q: %w", name, namespace, disk.Explain(s.root.Name(), int64(len(value))+1, err))
	}
	return nil
}

// refresh updates all copies of a secret, including those of earlier deploys.
func (s *Store) refresh(namespace, name string, value []byte) error {
	folders, err := fs.Glob(s.mounts.FS(), namespace+"/*/*")
	if err != nil {
		return err
	}
	for _, folder := range folders {
		mounted := filepath.Join(folder, name)
		info, err := s.mounts.Stat(mounted)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = write(s.mounts, mounted, value, s.toGroup(int(info.Sys().(*syscall.Stat_t).Gid)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Delete removes a secret. It is no error if the secret does not exist. Existing copies in mounts
// stay.
func (s *Store) Delete(namespace, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	file, err := valueFile(namespace, name)
	if err == nil {
		err = s.root.Remove(file)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("secret %q of %q: %w", name, namespace, err)
	}
	_ = s.root.Remove(filepath.Dir(file)) // succeeds if it was the last secret
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

// MountPath returns the absolute path of the folder that [Store.Mount] fills for a function with
// these secrets, or "" without names. The last part of the path is the same for all functions that
// name the same secrets.
func (s *Store) MountPath(namespace, function string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	return filepath.Join(s.at, folderOf(namespace, function, setOf(names)))
}

// setOf returns names sorted and without duplicates.
func setOf(names []string) []string { return slices.Compact(slices.Sorted(slices.Values(names))) }

func folderOf(namespace, function string, set []string) string {
	sum := sha256.Sum256([]byte(strings.Join(set, "\n"))) // names contain no line break
	return filepath.Join(namespace, function, hex.EncodeToString(sum[:8]))
}

// Group returns the group that may read the folder of a function with these secrets. It returns 0
// if functions run as this process's user, or if the function names none.
func (s *Store) Group(namespace string, names []string) (int, error) {
	if s.groups == nil || len(names) == 0 {
		return 0, nil
	}
	return s.groups(namespace, setOf(names))
}

// Mount writes the present values of these secrets into the function's folder for this set of
// secrets. It reuses an existing folder and replaces each file atomically, so running replicas read
// either the old or the new value. Folders with other secrets, from earlier deploys of the
// function, stay until [Store.Sweep] removes them. Without names, Mount does nothing.
func (s *Store) Mount(namespace, function string, names []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mount(namespace, function, setOf(names)); err != nil {
		return fmt.Errorf("secrets for function %q of %q: %w", function, namespace, disk.Explain(s.at, 1, err))
	}
	return nil
}

func (s *Store) mount(namespace, function string, set []string) error {
	if err := nameless(namespace, function); err != nil || len(set) == 0 {
		return err
	}
	gid, err := s.Group(namespace, set)
	if err != nil {
		return err
	}
	give := s.toGroup(gid)
	folder := folderOf(namespace, function, set)
	if err := s.mounts.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	if err := give(s.mounts, folder, 0o750); err != nil {
		return err
	}
	now := time.Now()
	// keeps Sweep from removing it for a while.
	if err := s.mounts.Chtimes(folder, now, now); err != nil {
		return err
	}
	for _, name := range set {
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
	return nil
}

// Unmount removes all folders of a function, even if its replicas still run.
func (s *Store) Unmount(namespace, function string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := nameless(namespace, function); err != nil {
		return fmt.Errorf("secrets for function %q of %q: %w", function, namespace, err)
	}
	err := s.mounts.RemoveAll(filepath.Join(namespace, function))
	_ = s.mounts.Remove(namespace) // succeeds if it was the last function
	return err
}

// Mounted returns the functions that have folders, as their namespaces with their names.
func (s *Store) Mounted() (map[string][]string, error) {
	folders, err := fs.Glob(s.mounts.FS(), "*/*")
	out := map[string][]string{}
	for _, f := range folders {
		out[filepath.Dir(f)] = append(out[filepath.Dir(f)], filepath.Base(f))
	}
	return out, err
}

// nameless returns why a function can have no folder, or nil.
func nameless(namespace, function string) error {
	if !namespaceForm.MatchString(namespace) || function == "" || function == "." || strings.ContainsAny(function, "/\x00") || function == ".." {
		return errors.New("no name for a folder")
	}
	return nil
}

// sweepAfter is how long Sweep keeps a folder after Mount has filled it, because its function may
// not be stored yet.
const sweepAfter = time.Minute

// Sweep removes folders for which used returns false. used gets the path as [Store.MountPath]
// returns it.
func (s *Store) Sweep(used func(namespace, function, folder string) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	folders, err := fs.Glob(s.mounts.FS(), "*/*/*")
	if err != nil {
		return err
	}
	var errs []error
	for _, folder := range folders {
		info, err := s.mounts.Stat(folder)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		function := filepath.Dir(folder)
		namespace := filepath.Dir(function)
		if time.Since(info.ModTime()) < sweepAfter || used(namespace, filepath.Base(function), filepath.Join(s.at, folder)) {
			continue
		}
		errs = append(errs, s.mounts.RemoveAll(folder))
		// Each succeeds if it was the last entry.
		_, _ = s.mounts.Remove(function), s.mounts.Remove(namespace)
	}
	return errors.Join(errs...)
}

// giver makes a file or folder in root readable for others, with this mode.
type giver func(root *os.Root, name string, mode fs.FileMode) error

// toGroup returns a giver for a group. It does nothing if functions run as this process's user.
func (s *Store) toGroup(gid int) giver {
	if s.groups == nil {
		return func(*os.Root, string, fs.FileMode) error { return nil }
	}
	return func(root *os.Root, name string, mode fs.FileMode) error {
		return errors.Join(root.Chown(name, os.Getuid(), gid), root.Chmod(name, mode))
	}
}

// write writes a file with mode 0400. If give is set, it then makes the file readable for a group.
// The file is written completely or not at all, even after a power failure.
func write(root *os.Root, file string, value []byte, give giver) error {
	// Not a valid name of a secret; there is only one writer.
	temporary := filepath.Join(filepath.Dir(file), ".new")
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

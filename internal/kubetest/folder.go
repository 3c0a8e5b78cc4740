package kubetest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

const folders = "stagecoach-k8s-"

// newFolder makes the folder of a cluster. It ends with the test. A killed test leaves its folder
// and its cgroups, which the next cluster removes.
func newFolder(t testing.TB) string {
	t.Helper()
	left, _ := filepath.Glob(filepath.Join(os.TempDir(), folders+"*"))
	for _, dir := range left {
		removeLeft(t, dir)
	}
	// A socket's path has at most 107 bytes, so it is not in t.TempDir.
	dir, err := os.MkdirTemp("", folders) //nolint:usetesting // as above
	if err != nil {
		t.Fatal(err)
	}
	lock, err := newLock(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the processes end before
		removeGroups(t, dir)
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
		_ = lock.Close()
	})
	return dir
}

// newLock makes the lock of a folder. It has another name until it is locked, so that no other test
// can lock it and take the folder for one that is left.
func newLock(dir string) (*os.File, error) {
	lock, err := os.Create(filepath.Join(dir, "lock.new"))
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		err = os.Rename(lock.Name(), filepath.Join(dir, "lock"))
	}
	return lock, err
}

// removeLeft removes a cluster's folder and cgroups if its test has ended, and with it the lock.
func removeLeft(t testing.TB, dir string) {
	t.Helper()
	lock, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return // a test is about to make the lock, or another one removes the folder
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return // it is in use
	}
	removeGroups(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}

// removeGroups removes the cgroups of a cluster's nodes, whose processes have ended.
func removeGroups(t testing.TB, dir string) {
	t.Helper()
	name := filepath.Base(dir)
	all, _ := filepath.Glob("/sys/fs/cgroup/*/" + name) // a folder per controller, in version 1
	for _, group := range append(all, "/sys/fs/cgroup/"+name) {
		// If the test was killed, its last processes may still end.
		proctest.Until(t, group+" to be removed", func() bool { return removeBelow(group) })
	}
}

// removeBelow removes a folder of cgroups, and returns true if nothing is left.
func removeBelow(group string) bool {
	var all []string
	_ = filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return nil // a group that has just gone
	})
	for _, path := range slices.Backward(all) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false
		}
	}
	return true
}

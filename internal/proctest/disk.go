package proctest

import (
	"errors"
	"os"
	"syscall"
	"testing"
)

// Disk mounts a tmpfs of a size such as 128m on a temporary folder of the test, and returns the
// folder. Without root, it skips the test, or fails it if CI=true.
func Disk(t testing.TB, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("mount a small disk: %v; want root", err)
		}
		t.Skipf("needs root, to mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Fill fills dir's disk with a file. leave is roughly how many bytes stay free. The returned
// function removes the file.
func Fill(t testing.TB, dir string, leave int64) (free func()) {
	t.Helper()
	var disk syscall.Statfs_t
	if err := syscall.Statfs(dir, &disk); err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(dir, "ballast")
	if err != nil {
		t.Fatal(err)
	}
	left, block := int64(disk.Bavail)*disk.Bsize-leave, make([]byte, 1<<20)
	for err == nil && (left > 0 || leave == 0) {
		n := int64(len(block))
		if leave > 0 {
			n = min(n, left)
		}
		var wrote int
		wrote, err = f.Write(block[:n])
		left -= int64(wrote)
	}
	if closing := f.Close(); closing != nil || err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(errors.Join(err, closing))
	}
	return func() {
		if err := os.Remove(f.Name()); err != nil {
			t.Error(err)
		}
	}
}

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReach checks that a running process can read folders that it is given later, one after the
// other, and nothing beside them.
func TestReach(t *testing.T) {
	a := openAccounts(t)
	image, beside := private(t)
	state := filepath.Dir(filepath.Dir(beside))
	l := take(t, a, "ns")
	p, o, _ := start(t, newSpawner(t), Command{Dir: image, Process: "sleep 600", As: &l.Account})
	defer func() { _, _ = p.Signal(syscall.SIGKILL), p.Wait(); o.Finish(time.Second) }()
	within := func(path string) string { return fmt.Sprintf("/proc/%d/root%s", p.PID(), path) }
	var folders []string
	for i := range 8 {
		folder := filepath.Join(state, "store", fmt.Sprint(i), "fs")
		write(t, filepath.Join(folder, "file"), "of another")
		folders = append(folders, folder)
	}
	if _, err := os.Stat(within(folders[0])); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("it sees another folder already: %v", err)
	}
	for range 2 { // the second call finds the folder readable already
		for _, folder := range folders[:7] {
			if err := Reach(p.PID(), &l.Account, folder); err != nil {
				t.Error(err)
			}
			if b, err := os.ReadFile(within(filepath.Join(folder, "file"))); err != nil || string(b) != "of another" {
				t.Errorf("%s: %q, %v", folder, b, err)
			}
			for _, name := range []string{filepath.Join(folder, "new"), filepath.Join(filepath.Dir(folder), "new"), filepath.Join(state, "new")} {
				if err := os.WriteFile(within(name), nil, 0o600); !errors.Is(err, unix.EROFS) {
					t.Errorf("%s can be written to: %v", name, err)
				}
			}
		}
	}
	for _, path := range []string{folders[7], filepath.Join(state, "token"), beside} {
		if _, err := os.Stat(within(path)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("it sees %s: %v", path, err)
		}
	}
	if b, err := os.ReadFile(within(filepath.Join(image, "model", "m.onnx"))); err != nil || string(b) != "parameters" {
		t.Errorf("its own: %q, %v", b, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), state) {
		t.Errorf("other processes see its mounts (%v)", err)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", p.PID()))
	// Each folder is listed twice: as the mounted folder and as the mount point.
	if n := strings.Count(string(mounts), "/store/"); err != nil || n != 2*7 {
		t.Errorf("it has %d mounts of folders, %v, want 7:\n%s", n/2, err, mounts)
	}
	if err := os.Chmod(folders[7], 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Reach(p.PID(), &l.Account, folders[7]); err == nil || !strings.Contains(err.Error(), "chmod -R a+rX") {
		t.Errorf("a folder that it may not read: %v", err)
	}
	if err := Reach(1<<22, &l.Account, folders[0]); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a process that does not exist: %v", err)
	}
}

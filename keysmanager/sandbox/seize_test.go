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

	"golang.org/x/sys/unix"
)

func TestSeizeTakesFoldersFromTheirWriter(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const uid = 301_500
	packed := func(t *testing.T) string {
		dir := filepath.Join(t.TempDir(), "packed")
		write(t, filepath.Join(dir, "m", "weights.bin"), "1234567890")
		write(t, filepath.Join(dir, "m", "model.onnx"), "model")
		for _, p := range []string{"", "m", "m/weights.bin", "m/model.onnx"} {
			if err := os.Chown(filepath.Join(dir, p), uid, uid); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	weights := func(dir string) string { return filepath.Join(dir, "m", "weights.bin") }
	var keep []any
	for name, tc := range map[string]struct {
		do   func(dir string) error
		want string
	}{
		"as it should be": {func(string) error { return nil }, ""},
		"read by others": {func(dir string) error {
			f, err := os.Open(weights(dir))
			keep = append(keep, f)
			return err
		}, ""},
		"open for writing": {func(dir string) error {
			f, err := os.OpenFile(weights(dir), os.O_WRONLY, 0)
			keep = append(keep, f)
			return err
		}, "can still write"},
		"mapped for writing": {func(dir string) error {
			f, err := os.OpenFile(weights(dir), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			b, err := unix.Mmap(int(f.Fd()), 0, 10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			keep = append(keep, b)
			return errors.Join(err, f.Close())
		}, "can still write"},
		"a link":      {func(dir string) error { return os.Symlink("/etc/shadow", filepath.Join(dir, "m", "x")) }, "too many levels"},
		"a pipe":      {func(dir string) error { return unix.Mkfifo(filepath.Join(dir, "x"), 0o666) }, "is a p"},
		"too large":   {func(dir string) error { return os.Truncate(weights(dir), 101) }, "bytes too many"},
		"too many":    {func(dir string) error { return many(filepath.Join(dir, "m")) }, "more than 1000"},
		"not there":   {os.RemoveAll, "no such file"},
		"is a link":   {func(dir string) error { return errors.Join(os.RemoveAll(dir), os.Symlink("/etc", dir)) }, "not a directory"},
		"set-user-ID": {func(dir string) error { return os.Chmod(weights(dir), 0o4777|fs.ModeSetuid) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := packed(t)
			if err := tc.do(dir); err != nil {
				t.Fatal(err)
			}
			err := Seize(dir, 100)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("%v, want %q", err, tc.want)
			}
			for path, want := range map[string]string{"": "drwxr-xr-x 0 0", "m": "drwxr-xr-x 0 0", "m/weights.bin": "-r--r--r-- 0 0"} {
				if info, e := os.Stat(filepath.Join(dir, path)); err == nil {
					if e != nil {
						t.Fatal(e)
					}
					st := info.Sys().(*syscall.Stat_t)
					if got := fmt.Sprintf("%v %d %d", info.Mode(), st.Uid, st.Gid); got != want {
						t.Errorf("%s: %s, want %s", path, got, want)
					}
				}
			}
		})
	}
	for _, k := range keep {
		switch k := k.(type) {
		case *os.File:
			_ = k.Close()
		case []byte:
			_ = unix.Munmap(k)
		}
	}
}

func many(dir string) error {
	for i := range maxSeized + 1 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			return err
		}
	}
	return nil
}

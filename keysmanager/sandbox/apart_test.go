package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestGuestHasTheImagesUser checks user, home and environment of a program whose root is made
// elsewhere. The image does not change.
func TestGuestHasTheImagesUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	root := t.TempDir()
	for path, text := range map[string]string{
		"etc/passwd": "app:x:1000:3000::/home/app:/bin/sh\nsvc:x:1001:3001::/srv:/bin/sh\n", "etc/group": "media:x:44:app\n",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	home := filepath.Join(root, "home/app")
	if err := os.MkdirAll(home, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(home, 1000, 3000); err != nil {
		t.Fatal(err)
	}
	for user, want := range map[string]struct {
		uid, gid int
		groups   []int
		env      []string
	}{
		"app": {1000, 3000, []int{44}, []string{"HOME=/home/app", "USER=app", "A=1", "TMPDIR=/tmp", "PATH=" + Path}},
		"svc": {1001, 3001, nil, []string{"HOME=/tmp", "USER=svc"}},
		"7:8": {7, 8, nil, []string{"HOME=/tmp"}},
		"":    {0, 0, nil, []string{"HOME=/"}},
	} {
		o, err := Command{Chroot: root, Dir: "work", Argv: []string{"/web"}, User: user, Env: map[string]string{"A": "1"}}.Guest()
		if err != nil {
			t.Fatal(err)
		}
		if o.UID != want.uid || o.GID != want.gid || !slices.Equal(o.Groups, want.groups) || o.Dir != "/work" {
			t.Errorf("user %q: %d %d %v in %s", user, o.UID, o.GID, o.Groups, o.Dir)
		}
		for _, kv := range want.env {
			if !slices.Contains(o.Env, kv) {
				t.Errorf("user %q: environment %q, want %s", user, o.Env, kv)
			}
		}
	}
	if _, err := (Command{Chroot: root, User: "nobody-here"}).Guest(); err == nil {
		t.Error("a user that the image does not list")
	}
	if _, err := os.Stat(filepath.Join(root, "srv")); err == nil {
		t.Error("a home was added to the image")
	}
}

// TestFillWritesWhereTheProcessIs fills a folder that only the process sees.
func TestFillWritesWhereTheProcessIs(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	from, to := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(from, "key"), []byte("value"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := NewSpawner()
	defer s.Close()
	p, err := s.Start(t.Context(), Command{Dir: "/", Argv: []string{"unshare", "-m", "sh", "-c", "mount -t tmpfs none " + to + "; touch " + from + "/mounted; exec sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Signal(syscall.SIGKILL); p.Wait() }()
	proctest.Until(t, "the mount", func() bool { _, err := os.Stat(filepath.Join(from, "mounted")); return err == nil })
	pidfd, err := unix.PidfdOpen(p.PID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	c := Command{Binds: []Bind{{From: from, To: to, Copy: true}}}
	if err := c.Fill(pidfd, 1000, 3000); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(to); err != nil || len(left) > 0 {
		t.Errorf("the machine sees %v, %v", left, err)
	}
	inside := filepath.Join("/proc", strconv.Itoa(p.PID()), "root", to, "key")
	b, err := os.ReadFile(inside)
	if err != nil || string(b) != "value" {
		t.Fatalf("the process sees %q, %v", b, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(inside, &st); err != nil || st.Uid != 1000 || st.Gid != 3000 || st.Mode&0o777 != 0o400 {
		t.Errorf("user %d, group %d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	c.Binds[0].Copy = false
	if err := c.Fill(pidfd, 0, 0); err == nil {
		t.Error("a folder of the machine is shown")
	}
}

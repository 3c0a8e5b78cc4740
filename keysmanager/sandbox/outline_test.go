package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestOutlineHasTheTargetsOfNames checks that a process with an account gets the file to which
// /etc/resolv.conf is a link. On machines with systemd-resolved, the target is below /run.
func TestOutlineHasTheTargetsOfNames(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	t.Parallel()
	dir := proctest.Outside(t)
	target := filepath.Join(dir, "stub-resolv.conf")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(target, []byte("nameserver 127.0.0.53\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var o, given Outline
	var err error
	proctest.OnThread(func() {
		if err = errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""), unix.Mount("tmpfs", "/etc", "tmpfs", 0, "")); err != nil {
			return
		}
		if err = os.Symlink(target, "/etc/resolv.conf"); err != nil {
			return
		}
		c := Command{Dir: dir, Argv: []string{"/bin/true"}, As: &Account{UID: testNumbers.First, GID: testNumbers.First}}
		if o, err = c.Outline(""); err != nil {
			return
		}
		c.Resolv = target
		given, err = c.Outline("")
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Mount{From: target, At: target, Data: true}
	same := func(m Mount) bool { return m.From == want.From && m.At == want.At && m.Data && !m.Write }
	if !slices.ContainsFunc(o.Mounts, same) {
		t.Errorf("mounts %+v, want %+v", o.Mounts, want)
	}
	if slices.ContainsFunc(given.Mounts, same) {
		t.Errorf("mounts %+v, want no machine's file beside the one that was given", given.Mounts)
	}
}

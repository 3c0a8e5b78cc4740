package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestAccountSeesItsFilesAlone checks what a process with an account reads and writes.
func TestAccountSeesItsFilesAlone(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		private := filepath.Dir(root)
		reads, writes := filepath.Join(private, "reads", "file"), filepath.Join(private, "writes")
		write(t, reads, "given", 0o666) // only the mount is in the way
		write(t, filepath.Join(writes, "file"), "here", 0o644)
		secrets := filepath.Join(sandbox.RunFolder, fmt.Sprintf("secrets-of-%d-%s", os.Getpid(), r.name))
		write(t, filepath.Join(secrets, "own", "key"), "secret", 0o440)
		write(t, filepath.Join(secrets, "others", "key"), "others' secret", 0o444)
		t.Cleanup(func() { _ = os.RemoveAll(secrets) })
		own := filepath.Join(secrets, "own")
		if err := errors.Join(
			os.Chown(writes, r.lease.UID, r.lease.GID), os.Chown(own, 0, r.lease.GID), os.Chown(filepath.Join(own, "key"), 0, r.lease.GID), os.Chmod(own, 0o750),
		); err != nil {
			t.Fatal(err)
		}
		c := r.beside(root, "id", "read="+reads, "write="+reads, "write="+writes+"/new", "write=stage", "read="+own+"/key", "write="+own+"/key",
			"read="+secrets+"/others/key", "read="+private+"/token", "temp", "write=/tmp/x", "write=/var/tmp/x", "write=/dev/shm/x", "write=/etc/x", "write=/x", "read=/etc/passwd")
		c.Reads, c.Writes, c.Secrets = []string{reads}, []string{writes}, own
		text := r.said(t, c)
		want(t, text,
			fmt.Sprintf("id: %d %d []", r.lease.UID, r.lease.GID), "read="+reads+": given", "write="+reads+": ", "write=stage: ",
			"read="+own+"/key: secret", "write="+own+"/key: ", "not others' secret", "not not given", "temp: /tmp ", "write=/etc/x: ", "write=/x: ",
			"not write="+writes, "not write=/tmp/x", "not write=/var/tmp/x", "not write=/dev/shm/x", fmt.Sprintf("user-%d:x:%d:%d:", r.lease.UID, r.lease.UID, r.lease.GID))
		if b, err := os.ReadFile(filepath.Join(writes, "new")); err != nil || string(b) != "x" {
			t.Errorf("%q, %v, want what it wrote", b, err)
		}
		again := r.said(t, r.beside(root, "read=/tmp/x", "read=/var/tmp/x", "read=/dev/shm/x"))
		want(t, again, "read=/tmp/x: open /tmp/x: no such file", "read=/var/tmp/x: open", "read=/dev/shm/x: open")
	})
}

// TestRootHasItsOwnFiles checks what a program with its own root reads and writes, and as whom.
func TestRootHasItsOwnFiles(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		secrets, names := t.TempDir(), t.TempDir()
		hosts, resolv := filepath.Join(names, "hosts"), filepath.Join(names, "resolv")
		write(t, filepath.Join(secrets, "key"), "secret", 0o400)
		write(t, hosts, "10.0.0.1 here", 0o666)
		write(t, resolv, "nameserver 192.0.2.1", 0o666)
		c := inside(root, "id", "read=/home/app/file", "write=/home/app/file", "read=/etc/hosts", "write=/etc/hosts", "read=/etc/resolv.conf", "write=/etc/resolv.conf", "read=/var/secrets/key", "write=/var/secrets/key",
			"env", "read=/etc/passwd", "write=/etc/passwd", "temp", "write=/dev/shm/x", "list=/", "read=/dev/zero/x", "write=/dev/null")
		c.Hosts, c.Resolv = hosts, resolv
		c.User, c.Binds = "app", []sandbox.Bind{{From: secrets, To: "/var/secrets", Copy: true}}
		want(t, r.said(t, c),
			"id: 1234 1235 [1300]", "read=/home/app/file: of the image", "read=/etc/hosts: 10.0.0.1 here", "write=/etc/hosts: ", "read=/etc/resolv.conf: nameserver 192.0.2.1", "write=/etc/resolv.conf: ",
			"read=/var/secrets/key: secret",
			"write=/var/secrets/key: ", "HOME=/home/app", "USER=app", "write=/etc/passwd: ", "temp: /tmp ", "not write=/dev/shm/x", "not write=/dev/null", "not token")
		if b, err := os.ReadFile(filepath.Join(root, "home/app/file")); err != nil || string(b) != "of the image" {
			t.Errorf("%q, %v, want the image unchanged", b, err)
		}
		for user, line := range map[string]string{"": "id: 0 0 [", "77": "id: 77 0 [", "77:88": "id: 77 88 ["} {
			c := inside(root, "id", "read=/etc/passwd")
			c.User = user
			want(t, r.said(t, c), line)
		}
		c = inside(root, "write=/x", "write=/home/app/file", "write=/tmp/x", "write=/dev/shm/x", "write=/dev/x", "id")
		c.ReadOnly = true
		want(t, r.said(t, c), "write=/x: ", "write=/home/app/file: ", "not write=/tmp", "not write=/dev/shm")
	})
}

// TestMemoryFilesAreBounded checks that files in memory have a limit.
func TestMemoryFilesAreBounded(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		c := r.beside(image(t))
		c.Argv = []string{"sh", "-c", "df -k /tmp /var/tmp /dev/shm | awk '{print $2, $6}'"}
		want(t, r.said(t, c), "524288 /tmp", "524288 /var/tmp", "65536 /dev/shm")
	})
}

// TestNetworkOfACommand checks that a process is in the network of its command, and otherwise in
// that of this process.
func TestNetworkOfACommand(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		network := namespace(t)
		for given, ns := range map[*os.File]string{nil: "/proc/self/ns/net", network: fmt.Sprintf("/proc/self/fd/%d", network.Fd())} {
			for _, c := range []sandbox.Command{r.beside(image(t), "wait"), inside(image(t), "wait")} {
				c.Network = given
				p := r.start(t, c)
				p.awaitLine(t)
				var got, want unix.Stat_t
				if err := errors.Join(unix.Stat(fmt.Sprintf("/proc/%d/ns/net", p.PID()), &got), unix.Stat(ns, &want)); err != nil || got.Ino != want.Ino {
					t.Errorf("network %d, %v, want %d", got.Ino, err, want.Ino)
				}
				_ = p.Signal(unix.SIGKILL)
				p.end()
			}
		}
	})
}

// namespace returns a new network namespace.
func namespace(t *testing.T) *os.File {
	t.Helper()
	made := make(chan *os.File, 1)
	proctest.OnThread(func() {
		if unix.Unshare(unix.CLONE_NEWNET) != nil {
			made <- nil
			return
		}
		f, _ := os.Open("/proc/thread-self/ns/net") // nil after an error
		made <- f
	})
	f := <-made
	if f == nil {
		t.Fatal("no network namespace")
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// TestAccountReachesItsFilesByLinks checks that a process with an account finds its files at the
// paths that it was given, if these are links or below links.
func TestAccountReachesItsFilesByLinks(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root, dir := image(t), proctest.Outside(t)
		files, writes, links := filepath.Join(dir, "files"), filepath.Join(dir, "writes"), filepath.Join(dir, "links")
		write(t, filepath.Join(files, "model.so.1.2"), "given", 0o644)
		write(t, filepath.Join(writes, "sub", "file"), "here", 0o644)
		if err := errors.Join(
			os.Mkdir(links, 0o755), os.Chown(filepath.Join(writes, "sub"), r.lease.UID, r.lease.GID),
			os.Symlink(root, filepath.Join(links, "image")), os.Symlink("model.so.1.2", filepath.Join(files, "model.so.1")), os.Symlink("../writes", filepath.Join(links, "state")),
		); err != nil {
			t.Fatal(err)
		}
		read, state := filepath.Join(files, "model.so.1"), filepath.Join(links, "state", "sub")
		c := r.beside(filepath.Join(links, "image"), "read="+read, "read="+read+".2", "read="+state+"/file", "write="+state+"/new", "write="+read, "read=home/app/file")
		c.Reads, c.Writes = []string{read}, []string{state}
		text := r.said(t, c)
		want(t, text, "read="+read+": given", "read="+read+".2: given", "read="+state+"/file: here", "write="+read+": ", "read=home/app/file: of the image", "not write="+state)
		if b, err := os.ReadFile(filepath.Join(writes, "sub", "new")); err != nil || string(b) != "x" {
			t.Errorf("%q, %v, want what it wrote", b, err)
		}
	})
}

// TestUserOfAnImageOpensItsOutputAgain checks that a program that is not root opens /dev/stdout and
// /dev/stderr, as servers do that log to files.
func TestUserOfAnImageOpensItsOutputAgain(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		c := inside(image(t), "write=/dev/stdout", "id", "write=/dev/stderr")
		c.User = "app"
		want(t, r.said(t, c), "stdout: xid: 1234 1235", "stderr: x", "not write=/dev/std")
	})
}

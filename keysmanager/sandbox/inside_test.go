package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// parentOf makes this test's binary start a process in the root that the variable names, print its
// pid and wait.
const parentOf = "SANDBOX_TEST_PARENT"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == InitCommand {
		fmt.Fprintln(os.Stderr, Init(os.Args[2:]))
		os.Exit(1)
	}
	if root := os.Getenv(parentOf); root != "" {
		p, err := NewSpawner().Start(context.Background(), Command{Chroot: root, Argv: []string{"/probe", "wait"}, User: "7", Stdout: os.Stderr})
		if err != nil {
			panic(err)
		}
		fmt.Println(p.PID())
		select {}
	}
	goleak.VerifyTestMain(m)
}

var probe = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "probe")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	build := exec.Command("go", "build", "-o", dir, "./testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(filepath.Join(dir, "probe"))
})

// root returns a folder with the program probe and a few files.
func root(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	program, err := probe()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "probe"), string(program))
	write(t, filepath.Join(dir, "etc/passwd"), "root:x:0:0:root:/root:/bin/sh\napp:x:100:101:App:/home/app:/bin/sh\n")
	write(t, filepath.Join(dir, "etc/group"), "root:x:0:\nwheel:x:102:app,root\nstaff:x:103:\n")
	write(t, filepath.Join(dir, "usr/bin/dummy"), "x")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestProcessSeesOnlyItsRoot(t *testing.T) {
	dir := root(t)
	secrets := t.TempDir()
	write(t, filepath.Join(secrets, "api-key"), "s3cret")
	if err := os.Chmod(filepath.Join(secrets, "api-key"), 0o400); err != nil {
		t.Fatal(err)
	}
	for _, link := range [][2]string{{"../../../../../etc/passwd", "etc/resolv.conf"}, {"/run", "var/run"}, {"/../../../../tmp", "escape"}} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, link[1])), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(link[0], filepath.Join(dir, link[1])); err != nil {
			t.Fatal(err)
		}
	}
	s := newSpawner(t)
	binds := []Bind{{From: secrets, To: "/var/openfaas/secrets"}, {From: filepath.Join(secrets, "api-key"), To: "/escape/key"}}
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		c    Command
		want []string
	}{
		"root": {
			Command{Argv: []string{"./probe", "id", "pid", "dir", "env", "status=NoNewPrivs", "status=CapEff"}, Env: map[string]string{"A": "b c"}},
			[]string{
				"id: 0 0 [102] <nil>", "pid: 1 [/proc/1] <nil>", "dir: / <nil>", "NoNewPrivs: 1",
				"env: PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/tmp A=b c HOME=/root LOGNAME=root USER=root", "CapEff: 00000000a00405fb",
			},
		},
		"a user": {
			Command{Argv: []string{"/probe", "id", "dir", "env", "status=CapEff"}, User: "app", Dir: "/srv/new", Env: map[string]string{"PATH": "/x", "TMPDIR": "/y"}},
			[]string{"id: 100 101 [102] <nil>", "dir: /srv/new <nil>", "env: PATH=/x TMPDIR=/y HOME=/home/app LOGNAME=app USER=app", "CapEff: 0000000000000000"},
		},
		"only the image": {
			Command{Process: "probe list=/ list=/home list=/work", Env: map[string]string{"PATH": "/nosuch:/"}},
			[]string{
				"list: / [dev escape etc probe proc root tmp usr var] <nil>",
				"list: /home [] open /home: no such file or directory", "list: /work [] open /work: no such file or directory",
			},
		},
		"devices": {
			Command{Argv: []string{"/probe", "list=/dev", "write=/dev/null", "write=/dev/stdout", "mknod=/dev/mem"}, User: "app"},
			[]string{"list: /dev [fd full null random shm stderr stdin stdout urandom zero] <nil>", "xmknod=/dev/mem: permission denied"},
		},
		"binds": {
			Command{Argv: []string{"/probe", "read=/var/openfaas/secrets/api-key", "read=/tmp/key", "write=/var/openfaas/secrets/new"}, Binds: binds},
			[]string{
				"read=/var/openfaas/secrets/api-key: s3cret", "read=/tmp/key: s3cret",
				"write=/var/openfaas/secrets/new: open /var/openfaas/secrets/new: read-only file system",
			},
		},
		"secrets are the user's": {
			Command{Argv: []string{"/probe", "read=/run/secrets/api-key", "write=/run/secrets/api-key"}, User: "app", Binds: []Bind{{From: secrets, To: "/run/secrets", Copy: true}}},
			[]string{"read=/run/secrets/api-key: s3cret", "write=/run/secrets/api-key: open /run/secrets/api-key: read-only file system"},
		},
		"what root may not": {
			Command{Argv: []string{"/probe", "mount=/tmp", "mknod=/tmp/mem", "write=/proc/sys/kernel/core_pattern", "read=/proc/keys"}},
			[]string{
				"mount=/tmp: operation not permitted", "mknod=/tmp/mem: operation not permitted", "read=/proc/keys: ",
				"write=/proc/sys/kernel/core_pattern: open /proc/sys/kernel/core_pattern: read-only file system",
			},
		},
		"names are the machine's": {
			Command{Argv: []string{"/probe", "read=/etc/resolv.conf"}},
			strings.Split("read=/etc/resolv.conf: "+strings.TrimSpace(string(resolv)), "\n"),
		},
		"a root that is closed": {
			Command{Argv: []string{"/probe", "write=/new", "write=/dev/new", "write=/tmp/new", "write=/dev/shm/new", "write=/dev/null", "write=/proc/self/comm"}, ReadOnly: true},
			[]string{"write=/new: open /new: read-only file system", "write=/dev/new: open /dev/new: read-only file system"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tc.c.Chroot = dir
			got := finished(t, s, tc.c)
			for i := range got {
				got[i] = strings.TrimPrefix(got[i], "stdout: ")
			}
			slices.Sort(got)
			if want := slices.Sorted(slices.Values(tc.want)); !slices.Equal(got, want) {
				t.Errorf("says\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// TestRootInsideHasNoRights checks that a process in a root cannot gain rights with a user
// namespace and cannot read the keys of the machine's root.
func TestRootInsideHasNoRights(t *testing.T) {
	got := finished(t, newSpawner(t), Command{Chroot: root(t), Argv: []string{"/probe", "child", "userns", "unshare", "keys"}})
	want := []string{
		"stdout: keys: operation not permitted", "stdout: unshare: operation not permitted",
		"stdout: userns: fork/exec /proc/self/exe: operation not permitted",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestDevicesOfGPUs checks that GPUs are in the root of a process that asks for them, and in no
// other. A device that every machine has stands for a GPU.
func TestDevicesOfGPUs(t *testing.T) {
	dir := root(t)
	const node = "/dev/nvidia-stagecoach-test"
	if err := unix.Mknod(node, unix.S_IFCHR|0o644, int(unix.Mkdev(1, 5))); err != nil {
		t.Skipf("this machine does not allow device files: %v", err)
	}
	defer os.Remove(node)
	for gpus, want := range map[bool]string{true: "stdout: stat: Dcrw-r--r--", false: "stdout: stat=" + node + ": stat " + node + ": no such file or directory"} {
		c := Command{Chroot: dir, Argv: []string{"/probe", "stat=" + node}, GPUs: gpus}
		if got := finished(t, newSpawner(t), c); len(got) != 1 || got[0] != want {
			t.Errorf("with GPUs %t: %q, want %s", gpus, got, want)
		}
	}
}

// TestWritesToARootArePrivate runs two processes that write into the root of one image. The image
// stays as it was.
func TestWritesToARootArePrivate(t *testing.T) {
	dir, s := root(t), newSpawner(t)
	list := func() (all []string) {
		t.Helper()
		if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error { all = append(all, path); return err }); err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := list()
	for range 2 {
		got := finished(t, s, Command{Chroot: dir, Argv: []string{"/probe", "read=/new", "write=/new", "read=/new", "write=/etc/passwd", "write=/tmp/x"}})
		if want := []string{"stdout: read=/new: open /new: no such file or directory", "stdout: read=/new: x"}; !slices.Equal(got, want) {
			t.Errorf("says %q, want %q", got, want)
		}
	}
	if after := list(); !slices.Equal(before, after) {
		t.Errorf("the image has %q, want %q", after, before)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || bytes.Contains(mounts, []byte(dir)) {
		t.Errorf("mounts of ours: %s, %v", mounts, err)
	}
}

func TestDescriptorsAndSignalsReachAProcessWithARoot(t *testing.T) {
	dir, s := root(t), newSpawner(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p, o, l := start(t, s, Command{Chroot: dir, Argv: []string{"/probe", "list=/proc/self/fd", "fd=3", "wait"}, Files: []*os.File{w}})
	_ = w.Close()
	if b := make([]byte, 64); true {
		n, err := r.Read(b)
		if string(b[:n]) != "through the descriptor\n" {
			t.Errorf("descriptor 3: %q, %v", b[:n], err)
		}
	}
	proctest.Until(t, "it to wait", func() bool { return slices.Contains(l.sorted(), "stdout: waiting") })
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(); status != 0 {
		t.Errorf("status %#x, want 0", status)
	}
	o.Finish(10 * time.Second)
	if got := l.sorted(); !slices.Contains(got, "stdout: terminated") || !slices.Contains(got, "stdout: list: /proc/self/fd [0 1 2 3 4] <nil>") {
		t.Errorf("says %q, want its descriptors and the signal", got)
	}
}

// TestProcessWithARootEndsWithItsParent kills a program that has started a process with a root as
// another user. A change of the user clears the kernel's parent-death signal, so Init has to set it
// again.
func TestProcessWithARootEndsWithItsParent(t *testing.T) {
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentOf+"="+root(t))
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 32)
	n, err := out.Read(b)
	pid, wrong := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	if err != nil || wrong != nil {
		t.Fatalf("got %q, %v, want a pid", b[:n], err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Errorf("process %d: %v, want one that runs", pid, err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	proctest.Gone(t, pid)
}

func TestStartInsideNamesTheMissingFile(t *testing.T) {
	dir, s := root(t), newSpawner(t)
	write(t, filepath.Join(dir, "text"), "no program")
	for name, tc := range map[string]struct {
		c    Command
		want string
	}{
		"no program":   {Command{Argv: []string{"/nosuch"}}, "/nosuch: no such file"},
		"not in PATH":  {Command{Argv: []string{"nosuch"}}, "nosuch: not in the image's PATH"},
		"no format":    {Command{Argv: []string{"/text"}}, "/text: exec format error"},
		"no user":      {Command{Argv: []string{"/probe"}, User: "nobody"}, `/etc/passwd has no "nobody"`},
		"no bind":      {Command{Argv: []string{"/probe"}, Binds: []Bind{{From: dir + "/nosuch", To: "/x"}}}, "bind /x: "},
		"bind nowhere": {Command{Argv: []string{"/probe"}, Binds: []Bind{{From: dir, To: "x"}}}, "want an absolute path"},
		"no root":      {Command{Chroot: dir + "/nosuch", Argv: []string{"/probe"}}, "nosuch: no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.c.Chroot == "" {
				tc.c.Chroot = dir
			}
			if _, err := s.Start(t.Context(), tc.c); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "start "+tc.c.Argv[0]) {
				t.Errorf("%v, want an error with %q and the name of the program", err, tc.want)
			}
		})
	}
	if left := proctest.Children(t, os.Getpid()); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

func TestIdentifyReadsTheImagesAccounts(t *testing.T) {
	const passwd = "root:x:0:0:root:/root:/bin/sh\napp:x:100:101:App:/home/app:/bin/sh\nodd:x:-1:0::/:/x\n12:x:200:200::relative:/x\n"
	const group = "root:x:0:\nwheel:x:102:app,root\nstaff:x:103:\nodd:x:y:\n"
	for user, want := range map[string]string{
		"": "{0 0 [102] root /root true}", "root": "{0 0 [102] root /root true}", "app": "{100 101 [102] app /home/app true}", "100": "{100 101 [102] app /home/app true}",
		"7": "{7 0 [] user-7 / false}", "7:8": "{7 8 [] user-7 / false}", "app:staff": "{100 103 [] app /home/app true}", "app:": "{100 101 [102] app /home/app true}", ":staff": "{0 103 [] root /root true}",
		"12":     "{200 200 [] 12 / true}", // a name counts before a number
		"nobody": `user "nobody": the image's /etc/passwd has no "nobody"`, "app:nogroup": `user "app:nogroup": the image's /etc/group has no "nogroup"`,
		"odd": `user "odd": /etc/passwd has the numbers "-1" and "0"`, "4294967295": `has no "4294967295"`, "-1": `has no "-1"`, "app:odd": `has no "odd"`,
	} {
		id, err := identify(user, passwd, group)
		if got := fmt.Sprint(id); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s, %v, want %s", user, got, err, want)
		}
	}
}

// FuzzIdentify checks two rules for every list of accounts: a number that is not valid identifies
// nobody, and no other number than 0 identifies root.
func FuzzIdentify(f *testing.F) {
	f.Add("app", "app:x:100:101:App:/home/app:/bin/sh", "wheel:x:102:app,root")
	f.Add("7:8", "", "")
	f.Add("0:", ":::::/:", ":::")
	f.Fuzz(func(t *testing.T, user, passwd, group string) {
		id, err := identify(user, passwd, group)
		if err != nil {
			return
		}
		if id.uid < 0 || id.gid < 0 || id.uid >= 1<<32-1 || id.gid >= 1<<32-1 || !strings.HasPrefix(id.home, "/") {
			t.Fatalf("%q is %+v", user, id)
		}
		if n, ok := parseID(user); ok && n != 0 && id.uid == 0 && passwd == "" {
			t.Fatalf("%q is root", user)
		}
	})
}

// TestWaitForAProgramEndsWithItsContext has an init process that says nothing.
func TestWaitForAProgramEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		defer ours.Close()
		why := errors.New("nobody waits for it")
		ctx, cancel := context.WithCancelCause(t.Context())
		failed := make(chan error, 1)
		go func() { failed <- awaitProgram(ctx, ours, inside{}) }() // the test waits for it
		if _, err := bufio.NewReader(theirs).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		cancel(why)
		if err := <-failed; !errors.Is(err, why) || time.Since(begin) != 0 {
			t.Errorf("%v after %v, want %v at once", err, time.Since(begin), why)
		}
	})
}

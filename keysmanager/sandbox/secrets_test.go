package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// secretsOf creates a folder with the secret named key below RunFolder, as package secret does, and
// returns its path.
func secretsOf(t *testing.T, gid int, value string) string {
	t.Helper()
	if err := ownFolder(RunFolder, 0o711); err != nil {
		t.Fatal(err)
	}
	store, err := os.MkdirTemp(RunFolder, "secrets-test-") //nolint:usetesting // not in /tmp
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(store) })
	folder := filepath.Join(store, "ns", "f", "set")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chown(folder, 0, gid), os.Chmod(folder, 0o750)); err != nil {
		t.Fatal(err)
	}
	putSecret(t, folder, gid, value)
	return folder
}

// putSecret replaces the secret named key in a folder.
func putSecret(t *testing.T, folder string, gid int, value string) {
	t.Helper()
	file := filepath.Join(folder, ".new")
	write(t, file, value)
	if err := errors.Join(os.Chown(file, 0, gid), os.Chmod(file, 0o440), os.Rename(file, filepath.Join(folder, "key"))); err != nil {
		t.Fatal(err)
	}
}

// TestProcessSeesOnlyItsOwnSecrets checks that a process reads the current value of its own
// secrets, and finds no secrets of other functions, whatever its group is.
func TestProcessSeesOnlyItsOwnSecrets(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	image, _ := private(t)
	victim, sibling, hostile := take(t, a, "a"), take(t, a, "a"), take(t, a, "b")
	secrets, own := secretsOf(t, victim.GID, "s3cret"), secretsOf(t, hostile.GID, "own")
	key := secrets + "/key"
	p, o, l := start(t, s, Command{Dir: image, Argv: []string{"./stage", "read=" + key, "wait"}, As: &victim.Account, Secrets: secrets})
	defer func() { _, _ = p.Signal(syscall.SIGTERM), p.Wait(); o.Finish(time.Second) }()
	proctest.Until(t, "the victim to wait", func() bool { return slices.Contains(l.sorted(), "stdout: waiting") })
	if !slices.Contains(l.sorted(), "stdout: read="+key+": s3cret") {
		t.Errorf("%q: its own secret is missing", l.sorted())
	}
	putSecret(t, secrets, victim.GID, "changed")
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", p.PID(), key)); err != nil || string(b) != "changed" {
		t.Errorf("it sees %q, %v, after the change", b, err)
	}
	proc := fmt.Sprintf("/proc/%d", p.PID())
	attacks := map[string]string{
		"read=" + key: "no such file", "list=" + secrets: "no such file", "read=" + proc + "/root" + key: "no such file", "list=" + proc + "/root" + RunFolder: "no such file",
		"read=" + proc + "/cwd/.." + key: "no such file", "read=" + proc + "/cmdline": "no such file", "read=" + proc + "/environ": "no such file",
		"read=/proc/1/cmdline": "no such file", fmt.Sprintf("read=/proc/%d/cmdline", os.Getpid()): "no such file",
		"list=" + RunFolder: "permission denied", "list=" + filepath.Dir(filepath.Dir(filepath.Dir(secrets))): "no such file",
		"read=" + RunFolder + "/groups": "no such file", "write=" + RunFolder + "/x": "read-only file system",
	}
	for _, c := range []Command{
		{As: &hostile.Account, Secrets: own},
		{As: &hostile.Account},
		{As: &sibling.Account}, // in the victim's group
	} {
		c.Dir = image
		for attack, want := range attacks {
			c.Argv = []string{"./stage", attack}
			if got := finished(t, s, c); len(got) != 1 || !strings.Contains(got[0], want) {
				t.Errorf("%s of group %d: %q, want %s", attack, c.As.GID, got, want)
			}
		}
	}
	got := finished(t, s, Command{
		Dir: image, Argv: []string{"./stage", "read=" + own + "/key", "list=" + own, "write=" + own + "/key", "list=" + filepath.Dir(own)}, As: &hostile.Account, Secrets: own,
	})
	want := []string{
		"stdout: list: " + own + " [key] <nil>", "stdout: list: " + filepath.Dir(own) + " [] open " + filepath.Dir(own) + ": permission denied",
		"stdout: read=" + own + "/key: own", "stdout: write=" + own + "/key: open " + own + "/key: read-only file system",
	}
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("its own secrets: %q, want %q", got, want)
	}
	if _, err := s.Start(t.Context(), Command{Dir: image, As: &hostile.Account, Secrets: secrets}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("want a folder that group %d can read", hostile.GID)) {
		t.Errorf("started with another group's secrets: %v", err)
	}
}

// TestReachSecretsAddsThemToARunningProcess checks that a running process can read a folder of
// secrets that it is given later, and nothing beside it. The folder may have been removed and
// created again.
func TestReachSecretsAddsThemToARunningProcess(t *testing.T) {
	a := openAccounts(t)
	image, _ := private(t)
	l := take(t, a, "ns")
	first, second, others := secretsOf(t, l.GID, "one"), secretsOf(t, l.GID, "two"), secretsOf(t, take(t, a, "other").GID, "not its own")
	p, o, _ := start(t, newSpawner(t), Command{Dir: image, Process: "sleep 600", As: &l.Account, Secrets: first})
	defer func() { _, _ = p.Signal(syscall.SIGKILL), p.Wait(); o.Finish(time.Second) }()
	sees := func(folder string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s/key", p.PID(), folder))
		if errors.Is(err, fs.ErrNotExist) {
			return "nothing"
		}
		return fmt.Sprint(string(b), err)
	}
	reach := func(want string) {
		t.Helper()
		for _, folder := range []string{first, second} {
			if err := ReachSecrets(p.PID(), &l.Account, folder); err != nil {
				t.Error(err)
			}
		}
		if got := sees(first) + " " + sees(second); got != want {
			t.Errorf("it sees %s, want %s", got, want)
		}
	}
	if got := sees(second); got != "nothing" {
		t.Errorf("before, it sees %s", got)
	}
	reach("one<nil> two<nil>")
	for _, folder := range []string{first, second} {
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		if got := sees(folder); got != "nothing" {
			t.Errorf("it still sees %s, which was removed", got)
		}
		if err := errors.Join(os.Mkdir(folder, 0o700), os.Chown(folder, 0, l.GID), os.Chmod(folder, 0o750)); err != nil {
			t.Fatal(err)
		}
		putSecret(t, folder, l.GID, "anew")
	}
	reach("anew<nil> anew<nil>")
	if err := ReachSecrets(p.PID(), &l.Account, others); err == nil || sees(others) != "nothing" {
		t.Errorf("another group's: %v, it sees %s", err, sees(others))
	}
	if err := ReachSecrets(p.PID(), &Account{UID: l.UID + 1, GID: l.GID}, secretsOf(t, l.GID, "x")); err == nil || !strings.Contains(err.Error(), "it is of user") {
		t.Errorf("a process of another user: %v", err)
	}
	for _, path := range []string{RunFolder + "/x", filepath.Dir(second) + "/x", second + "/x"} {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/root%s", p.PID(), path), nil, 0o600); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s can be written to: %v", path, err)
		}
	}
}

// TestProcessesOfOthersAreHidden checks that a process sees itself and the processes of its user,
// unless they have sealed themselves. It also sees the parts of /proc that programs need.
func TestProcessesOfOthersAreHidden(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	if err := HidesProcesses(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/1/cmdline"); err != nil {
		t.Errorf("this process's own /proc: %v", err)
	}
	image, _ := private(t)
	l := take(t, a, "ns")
	sealed, so, sl := start(t, s, Command{Dir: image, Argv: []string{"./stage", "sealed", "read=/proc/self/status", "wait"}, As: &l.Account})
	open, oo, ol := start(t, s, Command{Dir: image, Argv: []string{"./stage", "wait"}, As: &l.Account})
	defer func() {
		_, _ = sealed.Signal(syscall.SIGTERM), open.Signal(syscall.SIGTERM)
		_, _ = sealed.Wait(), open.Wait()
		so.Finish(time.Second)
		oo.Finish(time.Second)
	}()
	proctest.Until(t, "both to wait", func() bool {
		return slices.Contains(sl.sorted(), "stdout: waiting") && slices.Contains(ol.sorted(), "stdout: waiting")
	})
	if status := strings.Join(sl.sorted(), "\n"); !strings.Contains(status, "read=/proc/self/status: Name:") {
		t.Errorf("a sealed process does not see itself:\n%s", status)
	}
	got := finished(t, s, Command{Dir: image, Argv: []string{
		"./stage", "pid", "status=NoNewPrivs", "child", "list=/proc/self/task", "stat=/proc/self/fd/0", "stat=/proc/cpuinfo", "stat=/proc/meminfo", "stat=/proc/sys/vm/overcommit_memory",
		"write=/proc/self/comm",
	}, As: &l.Account})
	text := strings.Join(got, "\n")
	var pid int
	i := slices.IndexFunc(got, func(line string) bool { return strings.HasPrefix(line, "stdout: pid: ") })
	if n, err := fmt.Sscanf(got[max(i, 0)], "stdout: pid: %d", &pid); n != 1 {
		t.Fatalf("%v:\n%s", err, text)
	}
	seen := []string{fmt.Sprintf("/proc/%d", pid), fmt.Sprintf("/proc/%d", open.PID())}
	slices.Sort(seen)
	if want := fmt.Sprintf("stdout: pid: %d %v <nil>", pid, seen); got[i] != want {
		t.Errorf("%s, want %s", got[i], want)
	}
	for _, want := range []string{"NoNewPrivs: 1", "id: ", "list: /proc/self/task [", "write=/proc/self/comm: open /proc/self/comm: read-only file system"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing:\n%s", want, text)
		}
	}
	if n := strings.Count(text, "stat: "); n != 4 {
		t.Errorf("%d of 4 files are there:\n%s", n, text)
	}
}

func TestOutermostDropsFoldersBelowOthers(t *testing.T) {
	got := outermost([]string{"/run/stagecoach", "/root", "/run", "/run-x/y", "/root/a/b", "/run"})
	if want := []string{"/root", "/run", "/run-x/y"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

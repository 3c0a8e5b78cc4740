package sandbox

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// testNumbers differ from the numbers of a Stagecoach that may run on this machine, and from those
// of other test processes.
var testNumbers = func() Range {
	first, last := proctest.Numbers()
	return Range{first, last}
}()

func openAccounts(t *testing.T) *Accounts {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	dir := proctest.Outside(t)
	a, err := OpenAccounts(filepath.Join(dir, "run"), testNumbers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

func take(t *testing.T, a *Accounts, tenant string) *Lease {
	t.Helper()
	gid, err := a.Group(tenant)
	if err != nil {
		t.Fatal(err)
	}
	l, err := a.Take(gid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Release() })
	return l
}

// private returns an image with the program probe, and a file beside it. Both are below a folder
// that only root can enter.
func private(t *testing.T) (image, beside string) {
	t.Helper()
	program, err := probe()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(proctest.Outside(t), "private")
	image, beside = filepath.Join(dir, "images", "f", "1"), filepath.Join(dir, "other", "file")
	write(t, filepath.Join(image, "stage"), string(program))
	write(t, filepath.Join(image, "model", "m.onnx"), "parameters")
	write(t, beside, "given")
	write(t, filepath.Join(dir, "token"), "not given")
	for path, mode := range map[string]os.FileMode{dir: 0o700, filepath.Join(image, "model", "m.onnx"): 0o666, filepath.Join(dir, "token"): 0o444} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	return image, beside
}

// TestAccountHasNoRightsAndSeesOnlyItsFiles checks a process with an account: it has its own user,
// it has no rights, and it reaches the paths that its Command names, wherever they are.
func TestAccountHasNoRightsAndSeesOnlyItsFiles(t *testing.T) {
	a := openAccounts(t)
	image, beside := private(t)
	l := take(t, a, "ns")
	own := filepath.Join(filepath.Dir(filepath.Dir(beside)), "written")
	if err := errors.Join(os.Mkdir(own, 0o700), os.Chown(own, l.UID, l.GID)); err != nil {
		t.Fatal(err)
	}
	state := filepath.Dir(filepath.Dir(beside))
	argv := []string{
		"./stage", "id", "dir", "limits", "death", "temp", "status=NoNewPrivs", "status=CapPrm", "status=CapBnd", "status=CapAmb", "status=Groups",
		"read=model/m.onnx", "read=" + image + "/model/m.onnx", "read=" + beside, "list=" + state,
		"write=model/m.onnx", "write=new", "write=" + beside, "write=" + state + "/new", "read=" + state + "/token", "write=" + own + "/mine", "mount=/tmp",
	}
	got := finished(t, newSpawner(t), Command{
		Dir: image, Argv: argv, As: &l.Account, Reads: []string{beside}, Writes: []string{own}, Processes: 64, Env: map[string]string{"GODEBUG": ""},
	})
	bound, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(bound), "CapBnd:\t")
	want := []string{
		fmt.Sprintf("id: %d %d [] <nil>", l.UID, l.GID), "dir: " + image + " <nil>",
		"limit: core 0 0", fmt.Sprintf("limit: fsize %d %[1]d", MaxFileSize), "limit: nproc 64 64", fmt.Sprintf("limit: files %d", MaxFiles), "death: 9",
		"temp: /tmp dtrwxrwxrwx <nil>", "NoNewPrivs: 1", "CapPrm: 0000000000000000", "CapAmb: 0000000000000000", "Groups:",
		"CapBnd: " + after[:16],
		"read=model/m.onnx: parameters", "read=" + image + "/model/m.onnx: parameters", "read=" + beside + ": given",
		"list: " + state + " [] open " + state + ": permission denied",
		"write=model/m.onnx: open model/m.onnx: read-only file system", "write=new: open new: read-only file system",
		"write=" + beside + ": open " + beside + ": read-only file system",
		"write=" + state + "/new: open " + state + "/new: read-only file system",
		"read=" + state + "/token: open " + state + "/token: no such file or directory", "mount=/tmp: operation not permitted",
	}
	for i := range want {
		want[i] = "stdout: " + want[i]
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	open := finished(t, newSpawner(t), Command{Dir: image, Process: "ls /proc/self/fd", As: &l.Account, Reads: []string{beside}})
	// 3 is ls's own.
	if want := []string{"stdout: 0", "stdout: 1", "stdout: 2", "stdout: 3"}; !slices.Equal(open, want) {
		t.Errorf("descriptors %q, want %q", open, want)
	}
	for file, want := range map[string]string{filepath.Join(image, "model/m.onnx"): "parameters", filepath.Join(own, "mine"): "x"} {
		if b, err := os.ReadFile(file); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v, want %q", file, b, err, want)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), state) {
		t.Errorf("other processes see a process's mounts (%v)", err)
	}
}

// TestAccountCannotReachAnotherAccount checks two processes of different users: one cannot look
// into the other, stop it, signal it, or open the files that the other sees in its namespace.
func TestAccountCannotReachAnotherAccount(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	image, _ := private(t)
	victim, hostile := take(t, a, "a"), take(t, a, "b")
	given, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer given.Close()
	run := proctest.Outside(t)
	secrets, socket := filepath.Join(run, "secrets"), filepath.Join(run, "daemon")
	write(t, filepath.Join(secrets, "key"), "s3cret")
	socketOf(t, socket)
	if err := errors.Join(
		os.Chown(secrets, 0, victim.GID), os.Chmod(secrets, 0o750), os.Chown(filepath.Join(secrets, "key"), 0, victim.GID),
		os.Chmod(filepath.Join(secrets, "key"), 0o440),
	); err != nil {
		t.Fatal(err)
	}
	p, o, l := start(t, s, Command{Dir: image, Argv: []string{"./stage", "read=" + secrets + "/key", "wait"}, As: &victim.Account, Files: []*os.File{given}})
	proctest.Until(t, "the victim to wait", func() bool { return slices.Contains(l.sorted(), "stdout: waiting") })
	if !slices.Contains(l.sorted(), "stdout: read="+secrets+"/key: s3cret") {
		t.Errorf("%q: its own secret is missing", l.sorted())
	}
	proc := fmt.Sprintf("/proc/%d/", p.PID())
	attacks := map[string]string{
		"read=" + proc + "fd/3": "no such file", "read=" + proc + "environ": "no such file", "list=" + proc + "root/": "no such file",
		fmt.Sprintf("kill=%d", p.PID()): "operation not permitted", fmt.Sprintf("ptrace=%d", p.PID()): "operation not permitted",
		fmt.Sprintf("kill=%d", os.Getpid()): "operation not permitted", "read=" + secrets + "/key": "permission denied",
		"dial=" + socket: "permission denied",
	}
	for attack, want := range attacks {
		got := finished(t, s, Command{Dir: image, Argv: []string{"./stage", attack}, As: &hostile.Account})
		if len(got) != 1 || !strings.Contains(got[0], want) {
			t.Errorf("%s: %q, want %s", attack, got, want)
		}
	}
	// A process of the same user can signal it, but not look into it once it has sealed itself.
	q, qo, ql := start(t, s, Command{Dir: image, Argv: []string{"./stage", "sealed", "wait"}, As: &victim.Account, Files: []*os.File{given}})
	proctest.Until(t, "the sibling to wait", func() bool { return slices.Contains(ql.sorted(), "stdout: waiting") })
	for _, attack := range []string{fmt.Sprintf("read=/proc/%d/fd/3", q.PID()), fmt.Sprintf("ptrace=%d", q.PID())} {
		if got := finished(t, s, Command{Dir: image, Argv: []string{"./stage", attack}, As: &victim.Account}); len(got) != 1 || !strings.Contains(got[0], "no such file") && !strings.Contains(got[0], "not permitted") {
			t.Errorf("%s on a sibling: %q", attack, got)
		}
	}
	for _, one := range []Process{p, q} {
		if err := one.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		one.Wait()
	}
	o.Finish(time.Second)
	qo.Finish(time.Second)
}

// TestFilesOfAnAccountArePrivateAndBounded checks the files that a process writes. Other processes
// do not see these files, they cannot fill a disk, and they are gone when the process has ended.
func TestFilesOfAnAccountArePrivateAndBounded(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	image, _ := private(t)
	open := proctest.Outside(t)
	if err := os.Chmod(open, 0o777); err != nil { //nolint:gosec // as /tmp is
		t.Fatal(err)
	}
	const name = "/stagecoach-sandbox-test"
	argv, want := []string{"./stage", "write=" + open + "/x"}, []string{"stdout: write=" + open + "/x: open " + open + "/x: read-only file system"}
	for _, o := range privateFolders {
		if _, err := os.Stat(o.at); err != nil {
			continue
		}
		argv = append(argv, "write="+o.at+name, "read="+o.at+name)
		want = append(want, "stdout: read="+o.at+name+": x")
		defer os.Remove(o.at + name)
	}
	slices.Sort(want)
	if got := finished(t, s, Command{Dir: image, Argv: argv, As: &take(t, a, "a").Account}); !slices.Equal(got, want) {
		t.Errorf("it got %q, want %q", got, want)
	}
	other := Command{Dir: image, Argv: []string{"./stage", "read=/tmp" + name, "read=/dev/shm" + name}, As: &take(t, a, "a").Account}
	for _, line := range finished(t, s, other) {
		if !strings.Contains(line, "no such file") {
			t.Errorf("another one finds %s", line)
		}
	}
	for _, o := range privateFolders {
		if _, err := os.Stat(o.at + name); err == nil {
			t.Errorf("%s is left", o.at+name)
		}
	}
	sizes := finished(t, s, Command{Dir: image, Argv: []string{"df", "--output=size", "/tmp", "/dev/shm"}, As: other.As})
	if got := strings.Join(strings.Fields(strings.Join(sizes, " ")), " "); got != "stdout: 65536 stdout: 524288 stdout: 1K-blocks" {
		t.Errorf("sizes of /dev/shm and /tmp: %q", got)
	}
	ours, err := os.Readlink("/proc/self/ns/ipc")
	if err != nil {
		t.Fatal(err)
	}
	if got := finished(t, s, Command{Dir: image, Process: "readlink /proc/self/ns/ipc", As: other.As}); len(got) != 1 || !strings.Contains(got[0], "ipc:[") || strings.Contains(got[0], ours) {
		t.Errorf("its System V memory is in %q, ours in %s", got, ours)
	}
}

// socketOf listens at path, as a daemon does.
func socketOf(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestSparedProcessesOutliveTheirLease releases a user while a process of that user runs which is
// somebody else's, such as another pod's on the machine. Without SpareProcesses, it ends.
func TestSparedProcessesOutliveTheirLease(t *testing.T) {
	for _, spares := range []bool{true, false} {
		a := openAccounts(t)
		if spares {
			a.SpareProcesses()
		}
		l := take(t, a, "")
		other := exec.Command("sleep", "60")
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(l.UID), Gid: uint32(l.GID)}, Pdeathsig: syscall.SIGKILL}
		if err := proctest.Start(other); err != nil {
			t.Fatal(err)
		}
		if err := l.Release(); err != nil {
			t.Error(err)
		}
		if err := other.Process.Signal(syscall.SIGTERM); spares && err != nil {
			t.Errorf("the process has ended: %v", err)
		}
		err := other.Wait()
		if status, ok := other.ProcessState.Sys().(syscall.WaitStatus); !ok || (status.Signal() == syscall.SIGTERM) != spares {
			t.Errorf("spares %v: the process has ended by %v, %v", spares, other.ProcessState, err)
		}
	}
}

// TestKillEndsAWholeForkBomb runs a fork bomb in which each process has its own session. The bomb
// must stop at its limit and must not hinder other users. Kill must leave no process of the bomb.
func TestKillEndsAWholeForkBomb(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	image, _ := private(t)
	bomber, other := take(t, a, "a"), take(t, a, "a")
	p, o, l := start(t, s, Command{Dir: image, Argv: []string{"./stage", "bomb"}, As: &bomber.Account, Processes: 100})
	proctest.Until(t, "the bomb to meet its limit", func() bool {
		return slices.ContainsFunc(l.sorted(), func(line string) bool {
			return strings.Contains(line, "resource temporarily unavailable") || strings.Contains(line, "fork") || strings.Contains(line, "newosproc")
		})
	})
	if n := threads(bomber.UID); n < 50 || n > 100 {
		t.Errorf("%d threads, want about the limit of 100", n)
	}
	if got := finished(t, s, Command{Dir: image, Argv: []string{"./stage", "id"}, As: &other.Account, Processes: 100}); len(got) != 1 {
		t.Errorf("another one: %q", got)
	}
	n, err := bomber.Kill()
	if err != nil || n < 50 {
		t.Errorf("killed %d threads, %v", n, err)
	}
	if status := p.Wait(); status.Signal() != syscall.SIGKILL {
		t.Errorf("status %#x, want SIGKILL", status)
	}
	proctest.Until(t, "nothing to be left", func() bool { return threads(bomber.UID) == 0 })
	o.Finish(10 * time.Second)
}

func TestEachAccountHasOneOwner(t *testing.T) {
	a := openAccounts(t)
	// This stands for another process of this machine.
	b, err := OpenAccounts(filepath.Dir(a.table), testNumbers)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	seen := map[int]bool{}
	for i := range 40 {
		l := take(t, []*Accounts{a, b}[i%2], "x")
		b.next = max(a.next-i%3, testNumbers.users().First) // both ask for the same numbers
		if seen[l.UID] || !testNumbers.users().holds(l.UID) {
			t.Fatalf("user %d is given twice, or none of %v", l.UID, testNumbers.users())
		}
		seen[l.UID] = true
	}
	// The number of a running process stays reserved until the process ends, whoever started it.
	image, _ := private(t)
	l := take(t, a, "x")
	p, o, _ := start(t, newSpawner(t), Command{Dir: image, Argv: []string{"./stage", "wait"}, As: &l.Account})
	if err := a.Close(); err != nil { // the owner has ended
		t.Fatal(err)
	}
	b.next = l.UID
	if next := take(t, b, "x"); next.UID == l.UID {
		t.Errorf("user %d is assigned although processes have it", l.UID)
	}
	adopted, err := b.Adopt(p.PID())
	if err != nil || adopted == nil || adopted.Account != l.Account {
		t.Fatalf("%+v, %v, want %+v", adopted, err, l.Account)
	}
	if _, err := b.Adopt(p.PID()); err == nil {
		t.Error("adopted twice")
	}
	if none, err := b.Adopt(os.Getpid()); none != nil || err != nil {
		t.Errorf("a process without an account: %+v, %v", none, err)
	}
	if err := adopted.Release(); err != nil {
		t.Error(err)
	}
	if p.Wait().Signal() != syscall.SIGKILL {
		t.Error("a process still runs after its account was released")
	}
	o.Finish(time.Second)
	b.next = l.UID
	if next := take(t, b, "x"); next.UID != l.UID {
		t.Errorf("user %d is not assigned again; got %d", l.UID, next.UID)
	}
	if _, err := b.Take(0); err != nil {
		t.Error(err)
	}
	for _, gid := range []int{1, testNumbers.users().First, testNumbers.Last} {
		if _, err := b.Take(gid); err == nil {
			t.Errorf("group %d counts as the group of a namespace", gid)
		}
	}
}

func TestGroupOfATenantStaysTheSame(t *testing.T) {
	a := openAccounts(t)
	seen := map[int]string{}
	for range 2 {
		for i := range 20 {
			tenant := "ns" + strconv.Itoa(i)
			gid, err := a.Group(tenant)
			if err != nil || !testNumbers.groups().holds(gid) || seen[gid] != "" && seen[gid] != tenant {
				t.Fatalf("group of %s: %d, %v, and %q", tenant, gid, err, seen[gid])
			}
			seen[gid] = tenant
		}
		b, err := OpenAccounts(filepath.Dir(a.table), testNumbers)
		if err != nil {
			t.Fatal(err)
		}
		_ = a.Close()
		a = b
	}
	defer a.Close()
	if len(seen) != 20 {
		t.Errorf("%d groups of 20 namespaces", len(seen))
	}
	full := groupTable{Groups: map[string]int{"a": 1000, "b": 1001}}
	if _, _, err := full.add("c", Range{1000, 1001}); err == nil || !strings.Contains(err.Error(), "isolation.uids") {
		t.Errorf("a full table: %v", err)
	}
	if err := os.WriteFile(a.table, []byte(`{"version":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Group("x"); err == nil || !strings.Contains(err.Error(), "version 2, want 1") || !strings.Contains(err.Error(), a.table) {
		t.Errorf("another version: %v", err)
	}
}

func TestOpenAccountsNamesTheMissingRight(t *testing.T) {
	a := openAccounts(t)
	open := filepath.Join(filepath.Dir(filepath.Dir(a.table)), "open")
	if err := errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o777)); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenAccounts(open, testNumbers); err == nil || !strings.Contains(err.Error(), open) || errors.Is(err, ErrNoAccounts) {
		t.Errorf("a folder that every user can write to: %v", err)
	}
	if mapped("0 0 65536\n", DefaultRange) || !mapped("  0   100000 65536\n 65536 1 4294901760", DefaultRange) || mapped("x", DefaultRange) || mapped("", DefaultRange) {
		t.Error("mapped gives a wrong answer")
	}
	image, beside := private(t)
	l := take(t, a, "x")
	s := newSpawner(t)
	if err := os.Chmod(beside, 0o600); err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]Command{
		"chmod -R a+rX":  {Dir: image, As: &l.Account, Reads: []string{beside}},
		"no such file":   {Dir: image + "x", As: &l.Account},
		"nosuch: not in": {Dir: image, Process: "nosuch", As: &l.Account},
		"absolute path":  {Dir: image, As: &l.Account, Reads: []string{"/"}},
	} {
		if _, err := s.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", c, err, want)
		}
	}
	if err := os.Chmod(filepath.Join(image, "stage"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(t.Context(), Command{Dir: image, As: &l.Account}); err == nil || !strings.Contains(err.Error(), "chmod -R a+rX") {
		t.Errorf("a program that only its owner can read: %v", err)
	}
	if got := finished(t, s, Command{Dir: image, Argv: []string{"./stage", "id"}}); len(got) != 1 || !strings.HasPrefix(got[0], "stdout: id: 0 0 ") {
		t.Errorf("after failures %q, want a normal process", got)
	}
}

func TestRangeSplitsIntoUsersAndGroups(t *testing.T) {
	for text, want := range map[string]string{
		"200000-265535": "", "1000-2023": "", "1000-2022": "at least", "0-65535": "all at least 1000", "a": "FIRST-LAST", "5000-4000": "FIRST-LAST", "1000-4294967295": "FIRST-LAST", "": "FIRST-LAST",
	} {
		var r Range
		err := r.UnmarshalText([]byte(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || err == nil && r.String() != text {
			t.Errorf("%q: %v, %v, want %q", text, r, err, want)
		}
		if err == nil && (r.users().size()+r.groups().size()+1 != r.size() || r.users().holds(r.nobody()) || r.groups().holds(r.users().First)) {
			t.Errorf("%q: users %v, groups %v, nobody %d", text, r.users(), r.groups(), r.nobody())
		}
	}
	for _, uid := range []int{0, -1, 1, unix.Getuid(), testNumbers.nobody(), testNumbers.First} {
		if killAll(uid, testNumbers) == nil {
			t.Fatalf("all processes of user %d are killed", uid)
		}
	}
}

// FuzzGroups checks that each group belongs to one tenant and stays with it, whatever the file
// contains.
func FuzzGroups(f *testing.F) {
	for _, s := range []string{"", `{"version":1,"groups":{"a":1000}}`, `{"version":1,"groups":{"a":1000,"b":1000}}`, `{"version":1,"groups":{"a":-1}}`, `{}`, `[`} {
		f.Add([]byte(s), "a")
	}
	f.Fuzz(func(t *testing.T, b []byte, tenant string) {
		numbers := Range{1000, 1255}
		table, err := readGroups(b)
		if err != nil {
			return
		}
		gid, _, err := table.add(tenant, numbers)
		if err != nil {
			return
		}
		again, added, err := table.add(tenant, numbers)
		if err != nil || added || again != gid || !numbers.holds(gid) {
			t.Fatalf("%d, then %d, %v, %v", gid, again, added, err)
		}
		for other, n := range table.Groups {
			if n == gid && other != tenant {
				t.Fatalf("%d is of %q and %q", gid, other, tenant)
			}
		}
	})
}

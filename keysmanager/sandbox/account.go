package sandbox

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Account is the user and group of a process that has no root of its own. No other process has this
// user at the time, and the user has no rights.
type Account struct {
	UID, GID int
}

// Accounts assigns users and groups to processes. All Stagecoach processes of a machine share the
// numbers, through files in a folder that a restart of the machine empties.
type Accounts struct {
	numbers Range
	file    *os.File // one byte per user is locked; the locks end with the process that holds them
	table   string   // path of the file with the groups
	spares  bool     // see SpareProcesses

	mu    sync.Mutex
	next  int
	taken map[int]bool   // users of this process, because its own file locks do not keep it out
	known map[string]int // groups that this process has asked for, by tenant
}

// ErrNoAccounts means that this process cannot start processes as other users.
var ErrNoAccounts = errors.New("stages run as the user of this process, and can do what that can")

// RunFolder is the default folder for the numbers in use.
const RunFolder = "/run/stagecoach"

// wanted has the capabilities that Accounts needs.
var wanted = []struct {
	number int
	name   string
}{
	{unix.CAP_CHOWN, "CHOWN"},
	{unix.CAP_KILL, "KILL"},
	{unix.CAP_SETGID, "SETGID"},
	{unix.CAP_SETUID, "SETUID"},
	{unix.CAP_SYS_ADMIN, "SYS_ADMIN"},
	{unix.CAP_SYS_CHROOT, "SYS_CHROOT"},
}

// OpenAccounts returns the accounts with these numbers. It keeps their state in the folder run,
// which it creates and which must belong to root. The caller closes the result. If this process
// lacks a right that accounts need, the error is ErrNoAccounts with the reason.
func OpenAccounts(run string, numbers Range) (*Accounts, error) {
	if err := mayChange(numbers); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoAccounts, err)
	}
	if err := ownFolder(run, 0o711); err != nil {
		return nil, fmt.Errorf("users for stages: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(run, "users"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("users for stages: %w", err)
	}
	users := numbers.users()
	return &Accounts{
		numbers: numbers, file: file, table: filepath.Join(run, "groups"),
		next: users.First + rand.IntN(users.size()), taken: map[int]bool{}, known: map[string]int{},
	}, nil
}

// SpareProcesses keeps Kill and Release from ending processes, before the first Take. It is for
// processes that something else ends, on a machine where others may have the same users: this
// process sees all of them.
func (a *Accounts) SpareProcesses() { a.spares = true }

// Close releases all accounts that are still taken. Their processes keep running.
func (a *Accounts) Close() error { return a.file.Close() }

// mayChange returns an error if this process cannot become these users.
func mayChange(numbers Range) error {
	if os.Geteuid() != 0 {
		return errors.New("it is not root")
	}
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if !mapped(string(b), numbers) {
			return fmt.Errorf("%s does not map all numbers %v: choose others (isolation.uids)", file, numbers)
		}
	}
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	var missing []string
	for _, c := range wanted {
		if data[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("it lacks the capabilities %s", strings.Join(missing, ", "))
	}
	return nil
}

// mapped reports whether a line of a /proc/PID/uid_map contains all of the numbers.
func mapped(text string, numbers Range) bool {
	for line := range strings.Lines(text) {
		var first, outside, count uint64
		if n, _ := fmt.Sscan(line, &first, &outside, &count); n == 3 && count <= 1<<32 && first <= uint64(numbers.First) && first+count > uint64(numbers.Last) {
			return true
		}
	}
	return false
}

// ownFolder creates a folder that only this user can change.
func ownFolder(dir string, mode fs.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s: %v of user %d, want a folder that only user %d can change: remove it", dir, info.Mode(), st.Uid, os.Geteuid())
	}
	return os.Chmod(dir, mode)
}

// lock reserves a user on this machine. It returns false if another process has the user.
func (a *Accounts) lock(uid int) bool {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(uid), Len: 1}
	return !a.taken[uid] && unix.FcntlFlock(a.file.Fd(), unix.F_OFD_SETLK, &l) == nil
}

func (a *Accounts) unlock(uid int) {
	l := unix.Flock_t{Type: unix.F_UNLCK, Start: int64(uid), Len: 1}
	_ = unix.FcntlFlock(a.file.Fd(), unix.F_OFD_SETLK, &l) // a closed file has no locks
}

// Take reserves a user that no process runs as. The group is gid, a result of [Accounts.Group]; 0
// gives the user a group of its own. The caller releases the lease.
func (a *Accounts) Take(gid int) (*Lease, error) {
	if gid != 0 && !a.numbers.groups().holds(gid) {
		return nil, fmt.Errorf("group %d, want 0 or one of %v", gid, a.numbers.groups())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	busy, err := owners()
	if err != nil {
		return nil, err
	}
	users := a.numbers.users()
	for range users.size() {
		uid := a.next
		if a.next++; a.next > users.Last {
			a.next = users.First
		}
		if busy[uid] > 0 || !a.lock(uid) {
			continue
		}
		a.taken[uid] = true
		return &Lease{Account: Account{UID: uid, GID: cmp.Or(gid, uid)}, accounts: a}, nil
	}
	return nil, fmt.Errorf("all users of %v have processes, want fewer replicas or more users (isolation.uids)", users)
}

// Adopt takes over the account of a process that an earlier owner started. It returns nil if the
// process has no account.
func (a *Accounts) Adopt(pid int) (*Lease, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(pid), &st); err != nil {
		return nil, fmt.Errorf("user of process %d: %w", pid, err)
	}
	if !a.numbers.users().holds(int(st.Uid)) {
		return nil, nil
	}
	return a.Resume(int(st.Uid), int(st.Gid))
}

// Resume takes over the account of a user that an earlier owner reserved.
func (a *Accounts) Resume(uid, gid int) (*Lease, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.numbers.users().holds(uid) || !a.lock(uid) {
		return nil, fmt.Errorf("user %d is taken by another process, or is not one of %v", uid, a.numbers.users())
	}
	a.taken[uid] = true
	return &Lease{Account: Account{UID: uid, GID: gid}, accounts: a}, nil
}

// owners counts the machine's processes per user.
func owners() (map[int]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	out := map[int]int{}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat("/proc/"+e.Name(), &st) == nil { // else the process has ended
			out[int(st.Uid)]++
		}
	}
	return out, nil
}

// Lease is a reserved account.
type Lease struct {
	Account
	accounts *Accounts
}

// Kill ends all processes of this user, including those that have left their process group. It
// returns the number of their threads before the kill, so that the caller can see whether the user
// had reached its limit.
func (l *Lease) Kill() (int, error) {
	n := threads(l.UID) // a process that forks and exits all the time may be missed
	if l.accounts.spares {
		return n, nil
	}
	return n, killAll(l.UID, l.accounts.numbers)
}

// Release ends the remaining processes of this user and gives the number back.
func (l *Lease) Release() error {
	_, err := l.Kill()
	l.accounts.mu.Lock()
	defer l.accounts.mu.Unlock()
	delete(l.accounts.taken, l.UID)
	l.accounts.unlock(l.UID)
	if err != nil {
		return fmt.Errorf("user %d: %w", l.UID, err)
	}
	return nil
}

// threads counts the threads of a user.
func threads(uid int) int {
	entries, _ := os.ReadDir("/proc") // /proc always exists
	n := 0
	for _, e := range entries {
		var st unix.Stat_t
		if _, err := strconv.Atoi(e.Name()); err != nil || unix.Stat("/proc/"+e.Name(), &st) != nil || int(st.Uid) != uid {
			continue
		}
		tasks, _ := os.ReadDir("/proc/" + e.Name() + "/task") // none if the process has ended
		n += len(tasks)
	}
	return n
}

// killAll sends SIGKILL to all processes of a user in one step, so that no fork escapes. It calls
// kill(-1) on a thread with the effective user uid, which may signal only that user's processes.
// The thread's real and saved user is another one without processes, so the killed processes may
// not signal the thread first.
func killAll(uid int, numbers Range) error {
	if !numbers.users().holds(uid) || uid <= 0 {
		return fmt.Errorf("kill processes of user %d, want one of %v", uid, numbers.users())
	}
	var err error
	onThread(func() {
		nobody := numbers.nobody()
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(nobody), uintptr(uid), uintptr(nobody)); e != 0 {
			err = fmt.Errorf("become user %d: %w", uid, e)
			return
		}
		if unix.Geteuid() != uid || unix.Getuid() != nobody { // as root, the kill would hit every process
			err = fmt.Errorf("user %d and %d, want %d and %d", unix.Geteuid(), unix.Getuid(), uid, nobody)
			return
		}
		if _, _, e := unix.RawSyscall(unix.SYS_KILL, ^uintptr(0), uintptr(unix.SIGKILL), 0); e != 0 && e != unix.ESRCH {
			err = fmt.Errorf("kill the processes of user %d: %w", uid, e)
		}
	})
	return err
}

// groupsVersion is the version of the file with the groups.
const groupsVersion = 1

// groupTable is the content of the file with the groups.
type groupTable struct {
	Version int            `json:"version"`
	Groups  map[string]int `json:"groups"`
}

// maxTable bounds the file with the groups, in bytes.
const maxTable = 16 << 20

// readGroups decodes the file with the groups.
func readGroups(b []byte) (groupTable, error) {
	t := groupTable{Version: groupsVersion}
	if len(b) > 0 {
		if err := json.Unmarshal(b, &t); err != nil {
			return t, err
		}
	}
	if t.Version != groupsVersion {
		return t, fmt.Errorf("version %d, want %d", t.Version, groupsVersion)
	}
	seen := map[int]string{}
	for tenant, gid := range t.Groups {
		if other, twice := seen[gid]; twice {
			return t, fmt.Errorf("group %d of both %q and %q", gid, min(other, tenant), max(other, tenant))
		}
		if gid <= 0 {
			return t, fmt.Errorf("group %d of %q", gid, tenant)
		}
		seen[gid] = tenant
	}
	if t.Groups == nil {
		t.Groups = map[string]int{}
	}
	return t, nil
}

// add returns the group of a tenant, and whether it is new.
func (t *groupTable) add(tenant string, numbers Range) (gid int, added bool, err error) {
	if gid, ok := t.Groups[tenant]; ok && numbers.holds(gid) {
		return gid, false, nil
	}
	used := map[int]bool{}
	for _, gid := range t.Groups {
		used[gid] = true
	}
	for gid := numbers.First; gid <= numbers.Last; gid++ {
		if !used[gid] {
			t.Groups[tenant] = gid
			return gid, true, nil
		}
	}
	return 0, false, fmt.Errorf("%d sets of secrets have got a group since the machine started, want a wider range (isolation.uids)", numbers.size())
}

// Group returns the group of a tenant, such as the functions of a namespace that name the same
// secrets. No other tenant has this group. It stays the same until the machine restarts.
func (a *Accounts) Group(tenant string) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if gid, ok := a.known[tenant]; ok {
		return gid, nil
	}
	gid, err := a.group(tenant)
	if err != nil {
		return 0, fmt.Errorf("group of %q: %s: %w", tenant, a.table, err)
	}
	a.known[tenant] = gid
	return gid, nil
}

func (a *Accounts) group(tenant string) (int, error) {
	f, err := os.OpenFile(a.table, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	// Other processes hold it only for such an update.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if info.Size() > maxTable {
		return 0, fmt.Errorf("%d bytes, want at most %d", info.Size(), maxTable)
	}
	b := make([]byte, info.Size())
	if _, err := f.ReadAt(b, 0); err != nil && len(b) > 0 {
		return 0, err
	}
	t, err := readGroups(b)
	if err != nil {
		return 0, err
	}
	gid, added, err := t.add(tenant, a.numbers.groups())
	if err != nil || !added {
		return gid, err
	}
	if b, err = json.Marshal(t); err != nil {
		return 0, err
	}
	// A table only grows, so no old bytes remain.
	if _, err := f.WriteAt(slices.Concat(b, []byte("\n")), 0); err != nil {
		return 0, err
	}
	return gid, nil
}

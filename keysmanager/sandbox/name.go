package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Every process has a user with a name and a home folder that it can write to, because libraries
// ask for both. For example, Python's getpass.getuser fails for a user without a name, and PyTorch
// calls it to find the folder of its compiled kernels.

// Files that list users and groups.
const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"
)

// userName returns the name for a user or group without a name in /etc/passwd and /etc/group. The
// name contains the number, so each user has a different name.
func userName(id int) string {
	if id == 0 {
		return "root"
	}
	return "user-" + strconv.Itoa(id)
}

// userVariables returns the environment variables with a user's name and home folder.
func userVariables(name, home string) []string {
	return []string{"HOME=" + home, "LOGNAME=" + name, "USER=" + name}
}

// starterName is the name of the user of this process.
var starterName = sync.OnceValue(func() string {
	uid := os.Geteuid()
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return u.Username
	}
	return userName(uid)
})

// starterVariables returns the variables with the name and home folder of this process's user, for
// processes that run as that user. Their home is not /tmp itself: other users of the machine can
// write to /tmp, and Python runs code that it finds in the home folder. The home is a folder in
// /tmp that these processes share and that is closed to others.
func starterVariables() ([]string, error) {
	home := filepath.Join(os.TempDir(), "stagecoach-home-"+strconv.Itoa(os.Geteuid()))
	if err := ownFolder(home, 0o700); err != nil {
		return nil, fmt.Errorf("home folder of processes: %w", err)
	}
	return userVariables(starterName(), home), nil
}

// lines returns a line for /etc/passwd with the user, and a line for /etc/group with the user's
// group. groups is the content of /etc/group; the second line is empty if groups has the group
// already.
func (id identity) lines(groups string) (user, group string) {
	user = fmt.Sprintf("%s:x:%d:%d::%s:/bin/sh\n", id.name, id.uid, id.gid, id.home)
	number := strconv.Itoa(id.gid)
	if account(groups, 4, func(f []string) bool { return f[2] == number }) == nil {
		group = fmt.Sprintf("%s:x:%d:\n", userName(id.gid), id.gid)
	}
	return user, group
}

// addToLists adds the user to /etc/passwd and /etc/group of the present root, unless it is listed.
func (id identity) addToLists(groups string) error {
	if id.listed {
		return nil
	}
	user, group := id.lines(groups)
	return errors.Join(appendTo(passwdFile, user), appendTo(groupFile, group))
}

// appendTo adds a line to a file. It creates the file if it does not exist.
func appendTo(file, line string) error {
	if line == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	last := make([]byte, 1)
	if n, _ := f.ReadAt(last, info.Size()-1); n == 1 && last[0] != '\n' {
		line = "\n" + line
	}
	_, err = f.WriteAt([]byte(line), info.Size())
	return err
}

// chooseHome sets the user's home: the folder that /etc/passwd names for the user if the user can
// write to it, otherwise Home. chooseHome creates the named folder if it is missing. If the root is
// read-only, the named folder only has to exist, because an image may have files for its programs
// there.
func (id *identity) chooseHome(readOnly bool) {
	_, err := os.Stat(id.home)
	if errors.Is(err, fs.ErrNotExist) && !readOnly && os.MkdirAll(id.home, 0o755) == nil && os.Chown(id.home, id.uid, id.gid) == nil {
		return
	}
	id.findHome(readOnly)
}

// findHome is chooseHome for a root that must not be changed.
func (id *identity) findHome(readOnly bool) {
	info, err := os.Stat(id.home)
	unknown := !id.listed && id.uid != 0
	if unknown || err != nil || !info.IsDir() || !readOnly && !id.writes(info) {
		id.home = Home
	}
}

// writes reports whether the user may create files in a folder.
func (id identity) writes(folder fs.FileInfo) bool {
	st, ok := folder.Sys().(*syscall.Stat_t)
	if !ok {
		return false
	}
	const both = 0o3 // write and enter
	switch mode := st.Mode; {
	case id.uid == 0:
		return true
	case int(st.Uid) == id.uid:
		return mode>>6&both == both
	case int(st.Gid) == id.gid || slices.Contains(id.groups, int(st.Gid)):
		return mode>>3&both == both
	default:
		return mode&both == both
	}
}

// name adds the account to /etc/passwd and /etc/group in the mount namespace of the calling thread,
// whose /tmp is empty and in memory. A file that the machine does not have is not created.
func (a Account) name() error {
	id := identity{name: userName(a.UID), uid: a.UID, gid: a.GID, home: Home}
	groups, err := os.ReadFile(groupFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	user, group := id.lines(string(groups))
	return errors.Join(mountExtended(passwdFile, user), mountExtended(groupFile, group))
}

// mountExtended mounts a copy of a file with one more line over the file.
func mountExtended(file, line string) error {
	at, err := filepath.EvalSymlinks(file)
	if errors.Is(err, fs.ErrNotExist) || line == "" {
		return nil
	}
	if err != nil {
		return err
	}
	b, err := os.ReadFile(at)
	if err != nil {
		return err
	}
	copied := filepath.Join(Home, filepath.Base(file))
	// The mount keeps the content.
	defer os.Remove(copied)
	// The mode is that of the list that it replaces, whatever the umask is.
	const mode = 0o644
	//nolint:gosec // as above
	err = errors.Join(os.WriteFile(copied, extended(b, line), mode), os.Chmod(copied, mode))
	if err != nil {
		return err
	}
	v, err := view{from: copied, data: true}.open()
	if err != nil {
		return err
	}
	v.path = at
	return errors.Join(v.put(), unix.Close(v.tree))
}

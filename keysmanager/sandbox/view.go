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

	"golang.org/x/sys/unix"
)

// view is a file or folder that one process sees at the path at which this process sees it.
type view struct {
	path  string // absolute, without links
	given string // path, as the caller named it; it may have links
	from  string // the file or folder that appears there; absolute, without links
	write bool
	data  bool // no programs run from it
	tree  int  // a detached mount of it
	isDir bool
}

// enterView gives the calling thread a mount namespace in which c's user reaches the paths of c,
// and sets the thread's folder to c.Dir. leave returns the thread to home, a descriptor of its own
// namespace.
//
// Each path of c is mounted at the same path. c's user may be unable to enter a folder on the way,
// such as /root. Then a folder in memory covers that folder, and contains only the rest of the way.
// Everything is read-only except the paths that c writes to and privateFolders.
func enterView(c Command, home int) (leave func() error, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("mount namespace: %w", err)
	}
	leave = func() error {
		if err := unix.Setns(home, unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("leave the mount namespace of a process: %w", err)
		}
		return nil
	}
	if err = c.show(); err == nil {
		if err = unix.Chdir(c.Dir); err != nil {
			err = fmt.Errorf("folder %s: %w", c.Dir, err)
		}
	}
	if err != nil {
		return nil, errors.Join(err, leave())
	}
	return leave, nil
}

// privateFolders are folders that every user can write to, with their sizes. The process sees file
// systems in memory in their place. These end with the last process that sees them.
var privateFolders = []struct{ at, size string }{{"/tmp", writable}, {"/var/tmp", writable}, {"/dev/shm", shm}}

// inPrivateFolder reports whether a path is in one of privateFolders.
func inPrivateFolder(path string) bool {
	return slices.ContainsFunc(privateFolders, func(o struct{ at, size string }) bool { return within(path, o.at) })
}

func (c Command) show() error {
	if err := mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return err
	}
	views, err := c.views()
	defer func() {
		for _, v := range views {
			_ = unix.Close(v.tree)
		}
	}()
	if err != nil {
		return err
	}
	var covers []string
	// It has files of other functions; only c's secrets appear in it.
	if _, err := os.Stat(RunFolder); err == nil {
		covers = append(covers, RunFolder)
	}
	for _, v := range views {
		if inPrivateFolder(v.path) {
			continue
		}
		at, err := closed(v.path, c.As)
		if err != nil {
			return err
		}
		if at != "" {
			covers = append(covers, at)
		}
	}
	covers = outermost(covers)
	still := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &still); err != nil {
		return fmt.Errorf("make the file systems read-only: %w", err)
	}
	for _, o := range privateFolders {
		err := mount("tmpfs", o.at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size="+o.size)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	if err := c.As.name(); err != nil {
		return fmt.Errorf("name of its user: %w", err)
	}
	if err := ownProc(); err != nil && !refused(err) {
		return err
	}
	for _, at := range covers {
		if err := cover(at); err != nil {
			return err
		}
	}
	for _, v := range views {
		if err := v.put(); err != nil {
			return err
		}
	}
	for _, at := range covers {
		if err := finish(at, true); err != nil {
			return err
		}
	}
	return nil
}

// outermost removes the folders that are inside another folder of the list.
func outermost(folders []string) []string {
	slices.Sort(folders) // a folder sorts before its content
	var out []string
	for _, f := range folders {
		if !slices.ContainsFunc(out, func(o string) bool { return f == o || strings.HasPrefix(f, o+"/") }) {
			out = append(out, f)
		}
	}
	return out
}

const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// cover mounts an empty folder over a folder.
func cover(at string) error {
	return mount("tmpfs", at, "tmpfs", quiet, "mode=0711,size=64k,nr_inodes=1k")
}

// finish makes a covering folder read-only; with done false, it makes it writable again.
func finish(at string, done bool) error {
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | quiet)
	if done {
		flags |= unix.MS_RDONLY
	}
	return mount("", at, "", flags, "")
}

// views opens the paths of c, outer folders first.
func (c Command) views() ([]view, error) {
	all, err := c.seen()
	var out []view
	for _, v := range all {
		if err != nil {
			break
		}
		if v, err = v.open(); err == nil {
			out = append(out, v)
		}
	}
	return out, err
}

// seen returns the paths of c, outer folders first.
func (c Command) seen() ([]view, error) {
	given := map[string]bool{c.Dir: false}
	for _, p := range c.Reads {
		given[p] = false
	}
	for _, p := range c.Writes {
		given[p] = true
	}
	var out []view
	for p, write := range given {
		v, err := checkView(p, write)
		if err != nil {
			return out, err
		}
		out = append(out, v)
	}
	for _, n := range c.names() {
		at, err := filepath.EvalSymlinks(n.at)
		if n.from == "" || errors.Is(err, fs.ErrNotExist) { // creating the file would change the machine
			continue
		}
		if err != nil {
			return out, err
		}
		v, err := checkView(n.from, false)
		if err != nil {
			return out, fmt.Errorf("%s: %w", n.at, err)
		}
		v.path, v.given = at, at
		out = append(out, v)
	}
	if c.Secrets != "" {
		v, err := checkSecrets(c.Secrets, c.As)
		if err != nil {
			return out, err
		}
		out = append(out, v)
	}
	slices.SortFunc(out, func(a, b view) int { return strings.Compare(a.path, b.path) })
	return out, nil
}

// newView opens a view of a file or folder. The caller closes its tree.
func newView(p string, write bool) (view, error) {
	v, err := checkView(p, write)
	if err != nil {
		return view{}, err
	}
	return v.open()
}

// checkView checks that a process may see a file or folder.
func checkView(p string, write bool) (view, error) {
	path, info, err := resolve(p)
	if err != nil {
		return view{}, err
	}
	if need := fs.FileMode(0o004); !write && info.Mode().Perm()&need == 0 {
		return view{}, fmt.Errorf("%s has mode %v: its process runs as a user of its own, want it readable by all (chmod -R a+rX)", path, info.Mode().Perm())
	}
	return view{path: path, given: p, from: path, write: write, isDir: info.IsDir()}, nil
}

// newSecrets opens a view of a folder of secrets. The caller closes its tree.
func newSecrets(p string, as *Account) (view, error) {
	v, err := checkSecrets(p, as)
	if err != nil {
		return view{}, err
	}
	return v.open()
}

// checkSecrets checks that an account may read a folder of secrets.
func checkSecrets(p string, as *Account) (view, error) {
	path, info, err := resolve(p)
	if err != nil {
		return view{}, fmt.Errorf("secrets: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Gid) != as.GID || info.Mode().Perm()&0o050 != 0o050 {
		return view{}, fmt.Errorf("secrets: %s is %v of group %d, want a folder that group %d can read: run `stagecoach up` as root, as this node is", path, info.Mode(), st.Gid, as.GID)
	}
	return view{path: path, given: p, from: path, isDir: true, data: true}, nil
}

// resolve returns the path of a file or folder without links, and its description.
func resolve(p string) (string, fs.FileInfo, error) {
	path, err := filepath.EvalSymlinks(p)
	if err != nil {
		return "", nil, err
	}
	if !filepath.IsAbs(path) || path == "/" {
		return "", nil, fmt.Errorf("%q, want the absolute path of a file or folder", p)
	}
	info, err := os.Stat(path)
	return path, info, err
}

// open creates the detached mount of a view. The caller closes its tree.
func (v view) open() (view, error) {
	attr := uint64(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if !v.write {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	if v.data {
		attr |= unix.MOUNT_ATTR_NOEXEC
	}
	path := v.from
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return view{}, fmt.Errorf("mount of %s: %w", path, err)
	}
	set := unix.MountAttr{Attr_set: attr}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &set); err != nil {
		_ = unix.Close(tree)
		return view{}, fmt.Errorf("mount of %s: %w", path, err)
	}
	v.tree = tree
	return v, nil
}

// put mounts the view at its path. In a covering folder, it creates the path first.
func (v view) put() error {
	if _, err := os.Lstat(v.path); errors.Is(err, fs.ErrNotExist) {
		dir := v.path
		if !v.isDir {
			dir = filepath.Dir(v.path)
		}
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
		if !v.isDir {
			if err := os.WriteFile(v.path, nil, 0o600); err != nil {
				return err
			}
		}
	}
	if err := unix.MoveMount(v.tree, "", unix.AT_FDCWD, v.path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount at %s: %w", v.path, err)
	}
	return nil
}

// closed returns the outermost folder on the way to path that as cannot enter. It is empty if as
// can enter all of them.
func closed(path string, as *Account) (string, error) {
	for i := 1; i < len(path); i++ {
		if path[i] != '/' {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(path[:i], &st); err != nil {
			return "", fmt.Errorf("%s: %w", path[:i], err)
		}
		if !passes(st, as) {
			return path[:i], nil
		}
	}
	return "", nil
}

func passes(st unix.Stat_t, as *Account) bool {
	switch {
	case int(st.Uid) == as.UID:
		return st.Mode&0o100 != 0
	case int(st.Gid) == as.GID:
		return st.Mode&0o010 != 0
	}
	return st.Mode&0o001 != 0
}

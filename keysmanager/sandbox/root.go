package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Sizes in bytes of the files that a process with a root of its own may write. They count as memory
// of the process.
const (
	writable = "512m" // files of its root
	shm      = "64m"  // /dev/shm
)

// scratch is where the new root is assembled. The folder exists on every machine, and nothing needs
// its content any more.
const scratch = "/dev"

// devices are the devices that a process may use.
var devices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

// readOnly are the parts of /proc through which root could change the machine. hidden are parts
// that reveal other processes.
var (
	readOnly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
	hidden   = []string{"/proc/kcore", "/proc/keys", "/proc/timer_list"}
)

// enter makes in.Root the root of this process, which has its own mount namespace. A layer in
// memory over the root takes all writes. enter returns the identity that the program runs as.
func enter(in inside) (identity, error) {
	unix.Umask(0o022)
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return identity{}, err
	}
	parts, err := collect(in)
	if err != nil {
		return identity{}, err
	}
	if err := os.Chdir(in.Root); err != nil { // named "." from here on, wherever it is
		return identity{}, err
	}
	if err := overlay(); err != nil {
		return identity{}, err
	}
	if err := os.Chdir(scratch + "/root"); err != nil {
		return identity{}, err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return identity{}, fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return identity{}, fmt.Errorf("leave the old root: %w", err)
	}
	if err := os.Chdir("/"); err != nil { // from here on, links in the image lead no further than this
		return identity{}, err
	}
	if err := populateRoot(parts); err != nil {
		return identity{}, err
	}
	who, err := lookup(in.User, in.ReadOnly)
	if err != nil {
		return identity{}, err
	}
	for _, g := range parts {
		if g.files != nil {
			if err := g.writeCopy(who); err != nil {
				return identity{}, fmt.Errorf("copy to %s: %w", g.to, err)
			}
		}
	}
	in.Zone.set()
	dir := filepath.Join("/", in.Dir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return identity{}, err
	}
	if in.ReadOnly {
		if err := closeRoot(); err != nil {
			return identity{}, err
		}
	}
	return who, os.Chdir(dir)
}

// overlay mounts the folder "." at scratch/root, with a file system in memory above it.
func overlay() error {
	if err := mount("tmpfs", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size="+writable); err != nil {
		return err
	}
	for _, dir := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(scratch, dir), 0o755); err != nil {
			return err
		}
	}
	return mount("overlay", scratch+"/root", "overlay", unix.MS_NOSUID|unix.MS_NODEV, "lowerdir=.,upperdir="+scratch+"/upper,workdir="+scratch+"/work")
}

// rootPart is a part of the old root that appears in the new one.
type rootPart struct {
	fd    int
	to    string
	isDir bool
	files map[string][]byte // content of a copy, in place of fd
}

// maxCopies bounds the files of a copied folder, in bytes.
const maxCopies = 8 << 20

// read reads the files of a folder.
func read(folder string) (map[string][]byte, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	out, size := map[string][]byte{}, 0
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(folder, e.Name()))
		if err != nil || !info.Mode().IsRegular() {
			continue // it was removed, or is not a file
		}
		if info.Size() > int64(maxCopies-size) {
			return nil, fmt.Errorf("%s: its files have more than %d bytes; want less", folder, maxCopies)
		}
		b, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			return nil, err
		}
		out[e.Name()], size = b, size+len(b)
	}
	return out, nil
}

// writeCopy creates a copy in the new root.
func (t rootPart) writeCopy(who identity) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := os.MkdirAll(t.to, 0o755); err != nil {
		return err
	}
	if err := mount("tmpfs", t.to, "tmpfs", flags, "mode=0755"); err != nil {
		return err
	}
	for name, b := range t.files {
		at := filepath.Join(t.to, name)
		if err := errors.Join(os.WriteFile(at, b, 0o400), os.Chown(at, who.uid, who.gid)); err != nil {
			return err
		}
	}
	return mount("", t.to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|flags, "")
}

// gpuDevices returns the paths of the devices of NVIDIA's driver.
func gpuDevices() []string {
	whole, _ := filepath.Glob("/dev/nvidia*") // the patterns are valid
	parts, _ := filepath.Glob("/dev/nvidia-caps/*")
	return slices.DeleteFunc(append(whole, parts...), func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || info.Mode()&fs.ModeCharDevice == 0 // a folder
	})
}

// collect opens all parts of the old root that the new root gets.
func collect(in inside) ([]rootPart, error) {
	const still = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	var out []rootPart
	add := func(b Bind, attr uint64, optional bool) error {
		info, err := os.Stat(b.From)
		if optional && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bind %s: %w", b.To, err)
		}
		fd, err := unix.OpenTree(unix.AT_FDCWD, b.From, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err == nil {
			err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: attr})
		}
		if err != nil {
			return fmt.Errorf("bind %s to %s: %w", b.From, b.To, err)
		}
		out = append(out, rootPart{fd: fd, to: b.To, isDir: info.IsDir()})
		return nil
	}
	nodes := slices.Clone(devices)
	if in.GPUs {
		nodes = append(nodes, gpuDevices()...)
	}
	for _, d := range nodes {
		if err := add(Bind{From: d, To: d}, still, true); err != nil {
			return nil, err
		}
	}
	for _, b := range in.Names {
		machines := b.From == b.To // if it is the machine's own file, it may be missing
		if err := add(b, still|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_RDONLY, machines); err != nil {
			return nil, err
		}
	}
	for _, b := range in.Binds {
		if !filepath.IsAbs(b.To) {
			return nil, fmt.Errorf("bind %s to %q, want an absolute path", b.From, b.To)
		}
		if b.Copy {
			files, err := read(b.From)
			if err != nil {
				return nil, fmt.Errorf("bind %s: %w", b.To, err)
			}
			out = append(out, rootPart{to: b.To, files: files})
			continue
		}
		if err := add(b, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_RDONLY, false); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// populateRoot mounts /proc, /dev, /tmp and the parts in the new root.
func populateRoot(parts []rootPart) error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		kind, at string
		flags    uintptr
		data     string
	}{
		{"proc", "/proc", quiet, ""},
		{"tmpfs", "/dev", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0755,size=64k"},
		{"tmpfs", "/dev/shm", quiet, "mode=1777,size=" + shm},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := mount(m.kind, m.at, m.kind, m.flags, m.data); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		if err := os.Symlink("/proc/self/fd"+to, "/dev/"+name); err != nil {
			return err
		}
	}
	if _, err := os.Stat("/tmp"); err != nil {
		if err := os.MkdirAll("/tmp", 0o755); err != nil {
			return err
		}
		if err := os.Chmod("/tmp", 0o777|fs.ModeSticky); err != nil {
			return err
		}
	}
	for _, t := range parts {
		if t.files != nil {
			continue // later, when the user is known
		}
		if err := t.attach(); err != nil {
			return err
		}
	}
	return guardProc()
}

func (t rootPart) attach() error {
	dir := t.to
	if !t.isDir {
		dir = filepath.Dir(t.to)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if !t.isDir {
		f, err := os.OpenFile(t.to, os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
		// The file is a link, such as resolv.conf in images of whole machines. Replace it.
		if errors.Is(err, unix.ELOOP) {
			if err = os.Remove(t.to); err == nil {
				f, err = os.OpenFile(t.to, os.O_CREATE|os.O_EXCL, 0o644)
			}
		}
		if err != nil {
			return err
		}
		_ = f.Close() // nothing was written
	}
	if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("bind to %s: %w", t.to, err)
	}
	return unix.Close(t.fd)
}

func guardProc() error {
	for _, p := range readOnly {
		if err := mount(p, p, "", unix.MS_BIND|unix.MS_REC, ""); errors.Is(err, unix.ENOENT) {
			continue
		} else if err != nil {
			return err
		}
		if err := mount("", p, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return err
		}
	}
	for _, p := range hidden {
		if err := mount("/dev/null", p, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// closeRoot makes everything but /tmp and /dev/shm read-only.
func closeRoot() error {
	if err := mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size="+writable); err != nil {
		return err
	}
	const closed = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID
	// The devices in it are separate mounts.
	if err := mount("", "/dev", "", closed|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	return mount("", "/", "", closed|unix.MS_NODEV, "")
}

func mount(what, at, kind string, flags uintptr, data string) error {
	err := unix.Mount(what, at, kind, flags, data)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("mount %s at %s: %w, want the capability SYS_ADMIN and a security profile that lets it mount", strings.TrimSpace(kind+" "+what), at, err)
	case err != nil:
		return fmt.Errorf("mount %s at %s: %w", strings.TrimSpace(kind+" "+what), at, err)
	}
	return nil
}

// kept are the capabilities that a program keeps if it runs as root: those over its own files and
// processes.
var kept = map[uintptr]string{
	unix.CAP_CHOWN: "CAP_CHOWN", unix.CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE", unix.CAP_FOWNER: "CAP_FOWNER", unix.CAP_FSETID: "CAP_FSETID",
	unix.CAP_KILL: "CAP_KILL", unix.CAP_SETGID: "CAP_SETGID", unix.CAP_SETUID: "CAP_SETUID", unix.CAP_SETPCAP: "CAP_SETPCAP",
	unix.CAP_SETFCAP: "CAP_SETFCAP", unix.CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE", unix.CAP_SYS_CHROOT: "CAP_SYS_CHROOT",
	unix.CAP_AUDIT_WRITE: "CAP_AUDIT_WRITE",
}

// dropRights gives up the rights that the program must not have: all but the given capabilities. It
// locks the calling goroutine to its thread; that thread must become the program.
func dropRights(who identity, kept map[uintptr]string) error {
	runtime.LockOSThread()
	for c := uintptr(0); c <= 63; c++ {
		if kept[c] != "" {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); errors.Is(err, unix.EINVAL) {
			break // the kernel knows no further capabilities
		} else if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	for fd := range 3 { // a program that is not root may open /dev/stdout again
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
			_ = unix.Fchown(fd, who.uid, who.gid) // if it fails, only that opening fails
		}
	}
	if err := syscall.Setgroups(who.groups); err != nil {
		return fmt.Errorf("groups %v: %w", who.groups, err)
	}
	if err := syscall.Setgid(who.gid); err != nil {
		return fmt.Errorf("group %d: %w", who.gid, err)
	}
	if err := syscall.Setuid(who.uid); err != nil {
		return fmt.Errorf("user %d: %w", who.uid, err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := noUserNamespaces(); err != nil {
		return err
	}
	// The change of the user has cleared the parent-death signal that the Spawner set.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("parent-death signal: %w", err)
	}
	return nil
}

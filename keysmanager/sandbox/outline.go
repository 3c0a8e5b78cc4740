package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Outline describes what the process of a Command gets. A Runtime that lets other programs make the
// process reads it from there.
type Outline struct {
	Program string // absolute; empty: the process looks for Argv's first in its PATH
	Argv    []string
	Env     []string
	Dir     string // where the process starts; absolute

	UID, GID int
	Groups   []int    // further groups
	Rights   []string // the capabilities that the process keeps, such as CAP_CHOWN

	Mounts []Mount                // outer folders first
	Lists  map[string][]byte      // content of the files that the process sees at these paths, read-only
	Memory []Scratch              // file systems in memory, outer folders first
	Limits map[string]unix.Rlimit // all resource limits, such as RLIMIT_CORE
	// Devices are the paths of the devices that the process may use, of those that the machine has.
	Devices []string
}

// Mount makes a file or folder of the machine appear at a path, without devices and set-user-ID
// bits.
type Mount struct {
	From  string // absolute, without links
	At    string // absolute; folders on the way may be links
	Write bool
	Data  bool // no programs run from it
	// Files has the content of a folder in place of From. They belong to the process's user.
	Files map[string][]byte
}

// Scratch is a folder for files in memory.
type Scratch struct{ At, Size string }

// Writable is the number of bytes of a root that a process may write, in the form of an option of
// tmpfs. They are in memory.
const Writable = writable

// Outline returns what the process gets, for a command with Chroot or an account. root is the
// folder in which the root of a command with Chroot is mounted; the user and the working folder are
// added there if they are missing.
func (c Command) Outline(root string) (Outline, error) {
	o := Outline{Argv: c.Args(), Devices: slices.Clone(devices)}
	var err error
	if c.Chroot != "" {
		err = c.outlineRoot(&o, root)
	} else {
		err = c.outlineAccount(&o)
	}
	if err != nil {
		return Outline{}, err
	}
	if o.Limits, err = c.allLimits(); err != nil {
		return Outline{}, err
	}
	slices.SortFunc(o.Mounts, func(a, b Mount) int { return strings.Compare(a.At, b.At) })
	return o, nil
}

func (c Command) outlineRoot(o *Outline, root string) error {
	in := inside{Dir: c.Dir, User: c.User, ReadOnly: c.ReadOnly, Zone: machineZone()}
	who, err := settleIn(root, in)
	if err != nil {
		return err
	}
	o.UID, o.GID, o.Groups, o.Dir = who.uid, who.gid, who.groups, filepath.Join("/", c.Dir)
	o.Env = environment(c.Env, append([]string{"TMPDIR=/tmp"}, userVariables(who.name, who.home)...))
	if who.uid == 0 {
		o.Rights = c.Options.Kept()
	}
	if c.GPUs {
		o.Devices = append(o.Devices, gpuDevices()...)
	}
	o.Memory = []Scratch{{"/dev/shm", shm}}
	if c.ReadOnly {
		o.Memory = append(o.Memory, Scratch{"/tmp", writable})
	}
	for _, n := range c.names() {
		from := cmp.Or(n.from, n.at)
		if _, err := os.Stat(from); n.from == "" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		o.Mounts = append(o.Mounts, Mount{From: from, At: n.at, Data: true})
	}
	for _, b := range c.Binds {
		if !filepath.IsAbs(b.To) {
			return fmt.Errorf("bind %s to %q, want an absolute path", b.From, b.To)
		}
		m := Mount{From: b.From, At: filepath.Clean(b.To)}
		if b.Copy {
			files, err := read(b.From)
			if err != nil {
				return fmt.Errorf("bind %s: %w", b.To, err)
			}
			m = Mount{At: m.At, Files: files, Data: true}
		}
		o.Mounts = append(o.Mounts, m)
	}
	return nil
}

// Guest returns what the process of a command with Chroot gets where somebody else makes its root
// from the same image. It has no Mounts, Memory and Limits. Nothing is added to the image: without
// a folder for the user's home, that is Home.
func (c Command) Guest() (Outline, error) {
	var who identity
	var err error
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_FS); err != nil {
			return
		}
		if err = errors.Join(unix.Chroot(c.Chroot), unix.Chdir("/")); err != nil {
			err = fmt.Errorf("root %s: %w", c.Chroot, err)
			return
		}
		if who, _, err = known(c.User); err == nil {
			who.findHome(c.ReadOnly)
		}
	})
	if err != nil {
		return Outline{}, err
	}
	env := environment(c.Env, append([]string{"TMPDIR=" + Home}, userVariables(who.name, who.home)...))
	return Outline{Argv: c.Args(), Env: env, Dir: filepath.Join("/", c.Dir), UID: who.uid, GID: who.gid, Groups: who.groups}, nil
}

// settleIn adds a user and a working folder to a root, from a thread that sees only that.
func settleIn(root string, in inside) (who identity, err error) {
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_FS); err != nil {
			return
		}
		if err = errors.Join(unix.Chroot(root), unix.Chdir("/")); err != nil {
			err = fmt.Errorf("root %s: %w", root, err)
			return
		}
		unix.Umask(0o022)
		if who, err = lookup(in.User, in.ReadOnly); err != nil {
			return
		}
		if _, err := os.Stat("/tmp"); err != nil {
			// Fails if the image has a file of this name.
			_ = errors.Join(os.MkdirAll("/tmp", 0o755), os.Chmod("/tmp", 0o777|fs.ModeSticky))
		}
		in.Zone.set()
		err = os.MkdirAll(filepath.Join("/", in.Dir), 0o755)
	})
	return who, err
}

func (c Command) outlineAccount(o *Outline) error {
	if c.As == nil {
		return errors.New("a container needs a user of its own: run as root")
	}
	cmd, err := c.cmd()
	if err != nil {
		return err
	}
	o.Program, o.Argv, o.Env = cmd.Path, cmd.Args, cmd.Env
	o.UID, o.GID, o.Dir = c.As.UID, c.As.GID, c.Dir
	o.Devices = append(o.Devices, gpuDevices()...) // CUDA_VISIBLE_DEVICES says which of them it uses
	for _, p := range privateFolders {
		o.Memory = append(o.Memory, Scratch{p.at, p.size})
	}
	views, err := c.seen()
	if err != nil {
		return err
	}
	for _, v := range views {
		m := Mount{From: v.from, At: v.path, Write: v.write, Data: v.data}
		o.Mounts = append(o.Mounts, m)
		// The root has no links of the machine, and the program gets this path.
		if given := filepath.Clean(v.given); given != v.path {
			m.At = given
			o.Mounts = append(o.Mounts, m)
		}
	}
	for _, n := range c.names() {
		// The machine's file may be a link to a folder that the root lacks, such as /run/systemd.
		at, err := filepath.EvalSymlinks(n.at)
		if err == nil && n.from == "" && at != n.at {
			o.Mounts = append(o.Mounts, Mount{From: at, At: at, Data: true})
		}
	}
	o.Lists, err = c.As.lists()
	return err
}

// lists returns the machine's lists of users and groups with the account, by their paths.
func (a Account) lists() (map[string][]byte, error) {
	id := identity{name: userName(a.UID), uid: a.UID, gid: a.GID, home: Home}
	groups, err := os.ReadFile(groupFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	user, group := id.lines(string(groups))
	out := map[string][]byte{}
	for file, line := range map[string]string{passwdFile: user, groupFile: group} {
		at, err := filepath.EvalSymlinks(file)
		if errors.Is(err, fs.ErrNotExist) || line == "" {
			continue
		}
		if err != nil {
			return nil, err
		}
		b, err := os.ReadFile(at)
		if err != nil {
			return nil, err
		}
		out[at] = extended(b, line)
	}
	return out, nil
}

// extended returns a list with one more line.
func extended(list []byte, line string) []byte {
	if n := len(list); n > 0 && list[n-1] != '\n' {
		line = "\n" + line
	}
	return append(slices.Clip(list), line...)
}

package contained

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
)

// Finding is one thing that containers need of a machine.
type Finding struct {
	Check string `json:"check"`
	OK    bool   `json:"ok"`
	Found string `json:"found"`
	ToDo  string `json:"toDo,omitempty"` // if it is not OK
}

// Check looks at all that --runtime containerd needs of this machine. It starts nothing.
func Check(ctx context.Context, c Config) []Finding {
	user := Finding{Check: "user", OK: os.Geteuid() == 0, Found: fmt.Sprintf("uid %d", os.Geteuid()), ToDo: "run stagecoach as root: only root may mount images and make containers"}
	socket, peer := checkSocket(ctx, c.Address)
	out := []Finding{user, socket}
	if socket.OK {
		out = append(out, checkServer(ctx, c)...)
		out = append(out, checkPrograms(peer)...)
	}
	return append(out, checkGroups("/sys/fs/cgroup"))
}

// checkSocket connects to containerd. It returns the process that listens, or 0.
func checkSocket(ctx context.Context, address string) (f Finding, peer int) {
	f = Finding{Check: "socket", Found: address}
	conn, err := (&net.Dialer{Timeout: probeTimeout}).DialContext(ctx, "unix", address)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Found, f.ToDo = "no "+address, "install containerd and start it (systemctl start containerd), or name its socket (--containerd-address)"
	case errors.Is(err, fs.ErrPermission):
		f.Found, f.ToDo = "no permission for "+address, "run stagecoach as root, or as a user that may write to the socket"
	case errors.Is(err, unix.ECONNREFUSED):
		f.Found, f.ToDo = "nobody listens at "+address, "start containerd (systemctl start containerd), or name its socket (--containerd-address)"
	case err != nil:
		f.Found, f.ToDo = err.Error(), "name containerd's socket (--containerd-address)"
	default:
		defer conn.Close()
		f.OK = true
		if raw, err := conn.(syscall.Conn).SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				if who, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
					peer = int(who.Pid)
				}
			})
		}
	}
	return f, peer
}

// The oldest version of containerd that is tested.
const oldestMajor, oldestMinor = 1, 6

// checkServer asks containerd for its version and snapshotters.
func checkServer(ctx context.Context, c Config) []Finding {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	version := Finding{Check: "version", ToDo: fmt.Sprintf("look into containerd's log; want containerd %d.%d or newer at this socket", oldestMajor, oldestMinor)}
	client, err := containerd.New(c.Address, containerd.WithDefaultNamespace(c.Namespace))
	if err != nil {
		version.Found = err.Error()
		return []Finding{version}
	}
	defer client.Close()
	v, err := client.Version(ctx)
	if err != nil {
		version.Found = err.Error()
		return []Finding{version}
	}
	version.Found = v.Version
	version.OK = newEnough(v.Version)
	if !version.OK {
		version.ToDo = fmt.Sprintf("install containerd %d.%d or newer", oldestMajor, oldestMinor)
	}
	snapshotter := Finding{Check: "snapshotter", Found: c.Snapshotter}
	all, err := plugins(ctx, client, snapshotters)
	if _, snapshotter.OK = all[c.Snapshotter]; err != nil {
		snapshotter.Found, snapshotter.ToDo = err.Error(), "look into containerd's log"
	} else if !snapshotter.OK {
		snapshotter.Found = fmt.Sprintf("no %s", c.Snapshotter)
		snapshotter.ToDo = fmt.Sprintf("name one of %s (--containerd-snapshotter), or look into containerd's log why it does not work", strings.Join(slices.Sorted(maps.Keys(all)), ", "))
	}
	return []Finding{version, snapshotter}
}

// newEnough reports whether a version such as 1.6.20~ds1 or v2.4.2 is tested. Versions that are no
// numbers are those of builds from a clone.
func newEnough(version string) bool {
	var major, minor int
	if n, err := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d", &major, &minor); n < 2 || err != nil {
		return true
	}
	return major > oldestMajor || major == oldestMajor && minor >= oldestMinor
}

// checkPrograms looks for the programs that containerd starts, where containerd looks for them:
// beside itself, and in its own PATH.
func checkPrograms(containerd int) []Finding {
	var dirs []string
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", containerd)); err == nil {
		dirs = append(dirs, filepath.Dir(exe))
	}
	path := os.Getenv("PATH")
	if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", containerd)); err == nil {
		for kv := range strings.SplitSeq(string(env), "\x00") {
			if own, ok := strings.CutPrefix(kv, "PATH="); ok {
				path = own
			}
		}
	}
	dirs = append(dirs, filepath.SplitList(path)...)
	var out []Finding
	for _, program := range []string{"containerd-shim-runc-v2", "runc"} {
		f := Finding{Check: program, Found: "none in " + strings.Join(dirs, ":"), ToDo: "install it where containerd finds it (Debian: apt-get install containerd runc)"}
		for _, dir := range dirs {
			at := filepath.Join(dir, program)
			if info, err := os.Stat(at); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				f.OK, f.Found = true, at
				break
			}
		}
		out = append(out, f)
	}
	return out
}

// checkGroups looks at the machine's cgroups. containers are put into groups by path, which is what
// containerd calls the driver cgroupfs.
func checkGroups(at string) Finding {
	f := Finding{Check: "cgroups", ToDo: "mount the cgroup hierarchies with these controllers at " + at + ": replicas would have no limits"}
	want := []string{"cpu", "memory", "pids"}
	if b, err := os.ReadFile(filepath.Join(at, "cgroup.controllers")); err == nil {
		has := strings.Fields(string(b))
		f.Found = "v2, driver cgroupfs, " + strings.Join(has, " ")
		f.OK = !slices.ContainsFunc(want, func(c string) bool { return !slices.Contains(has, c) })
		return f
	}
	var has []string
	for _, c := range append(want, "devices", "freezer") {
		if _, err := os.Stat(filepath.Join(at, c, "cgroup.procs")); err == nil {
			has = append(has, c)
		}
	}
	f.Found = "v1, driver cgroupfs, " + strings.Join(has, " ")
	f.OK = len(has) == len(want)+2
	if len(has) == 0 {
		f.Found = "none at " + at
	}
	return f
}

// plugins returns containerd's plugins of a type that work, and the folder of each.
func plugins(ctx context.Context, c *containerd.Client, kind string) (map[string]string, error) {
	all, err := c.IntrospectionService().Plugins(ctx, "type=="+kind)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, p := range all.Plugins {
		if p.InitErr == nil {
			out[p.ID] = p.Exports["root"]
		}
	}
	return out, nil
}

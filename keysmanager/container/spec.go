package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/container/entry"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// systemFolders are the machine's folders that a process with an account sees, where they exist.
var systemFolders = []string{"/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sbin", "/usr"}

// spec describes a container to containerd. socket is the folder with the socket of its first
// program, and env what the program's environment gets from CDI.
func (r *Runtime) spec(ctx context.Context, c sandbox.Command, p *process, o sandbox.Outline, root, socket string) (_ *specs.Spec, env []string, err error) {
	s, err := oci.GenerateSpec(namespaces.WithNamespace(ctx, r.cfg.Namespace), nil, &containers.Container{ID: p.id})
	if err != nil {
		return nil, nil, err
	}
	s.Root = &specs.Root{Path: root, Readonly: c.Chroot == "" || c.ReadOnly}
	s.Hostname = hostname(p.id)
	user := specs.User{UID: uint32(o.UID), GID: uint32(o.GID)}
	for _, g := range o.Groups {
		user.AdditionalGids = append(user.AdditionalGids, uint32(g))
	}
	s.Process = &specs.Process{
		Args: []string{entry.Program}, Env: []string{"GOMAXPROCS=1", "GOGC=off"}, Cwd: "/", User: user, NoNewPrivileges: true,
		Capabilities: &specs.LinuxCapabilities{Bounding: o.Rights, Permitted: o.Rights, Effective: o.Rights},
	}
	if s.Process.OOMScoreAdj, err = ownOOMScore(); err != nil {
		return nil, nil, err
	}
	s.Process.Rlimits = limits(o.Limits)
	path := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	if c.Network != nil {
		path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), c.Network.Fd())
	}
	s.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: path}}
	for _, own := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.MountNamespace} {
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: own})
	}
	names, gpus, err := r.cdiNames(c)
	if err != nil {
		return nil, nil, err
	}
	if gpus {
		o.Devices = slices.DeleteFunc(o.Devices, func(path string) bool { return strings.HasPrefix(path, "/dev/nvidia") })
	}
	if err := addDevices(s, o.Devices); err != nil {
		return nil, nil, err
	}
	if s.Mounts, err = r.mounts(c, p, o, root, socket); err != nil {
		return nil, nil, err
	}
	if env, err = addCDI(s, names); err != nil {
		return nil, nil, err
	}
	s.Linux.Seccomp = seccomp.DefaultProfile(s)
	return s, env, nil
}

// hostname returns the name of a container's machine, from its id.
func hostname(id string) string { return id[:min(len(id), 63)] }

// hosts returns the mount of the file in which the container's hostname is found. It is a copy of
// the file that the command names, or of the machine's, with one more line. ok is false if a
// program with an account would not see it, because the machine has none.
func (p *process) hosts(c sandbox.Command) (m specs.Mount, ok bool, err error) {
	at := hostsFile
	if c.Chroot == "" {
		if at, err = filepath.EvalSymlinks(at); errors.Is(err, fs.ErrNotExist) {
			return m, false, nil
		}
	}
	if err != nil {
		return m, false, err
	}
	b, err := os.ReadFile(cmp.Or(c.Hosts, hostsFile))
	if err != nil && (c.Hosts != "" || !errors.Is(err, fs.ErrNotExist)) {
		return m, false, err
	}
	b = fmt.Appendf(b, "\n127.0.1.1\t%s\n", hostname(p.id))
	from, err := p.folder.copyOf("hosts", map[string][]byte{"hosts": b}, 0o644, 0, 0)
	return bind(filepath.Join(from, "hosts"), at, "ro", "noexec"), err == nil, err
}

const hostsFile = "/etc/hosts"

// ownOOMScore returns how readily the kernel ends this process for memory. Without a value of its
// own a container has that of its shim, which the kernel may be told never to end.
func ownOOMScore() (*int, error) {
	b, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return nil, err
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return &score, err
}

// limits returns resource limits in the form of a container's spec.
func limits(all map[string]unix.Rlimit) (out []specs.POSIXRlimit) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, specs.POSIXRlimit{Type: name, Hard: all[name].Max, Soft: all[name].Cur})
	}
	return out
}

// addDevices adds devices of this machine.
func addDevices(s *specs.Spec, paths []string) error {
	const access = "rwm"
	for _, path := range paths {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return fmt.Errorf("device %s: %w", path, err)
		}
		//nolint:unconvert // the type differs on other machines
		major, minor := int64(unix.Major(uint64(st.Rdev))), int64(unix.Minor(uint64(st.Rdev)))
		mode := fs.FileMode(st.Mode & 0o777)
		s.Linux.Devices = append(s.Linux.Devices, specs.LinuxDevice{Path: path, Type: "c", Major: major, Minor: minor, FileMode: &mode, UID: &st.Uid, GID: &st.Gid})
		s.Linux.Resources.Devices = append(s.Linux.Resources.Devices, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: access})
	}
	return nil
}

// mounts returns the file systems of a container, outer folders first.
func (r *Runtime) mounts(c sandbox.Command, p *process, o sandbox.Outline, root, socket string) ([]specs.Mount, error) {
	all := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "strictatime", "mode=755", "size=64k"}},
	}
	if c.Chroot == "" {
		all = append(all, specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}})
		system, err := systemMounts(root)
		if err != nil {
			return nil, err
		}
		all = append(all, system...)
	}
	for _, m := range o.Memory {
		options := []string{"nosuid", "nodev", "mode=1777", "size=" + m.Size}
		if m.At == "/dev/shm" && c.Chroot != "" {
			options = append(options, "noexec")
		}
		all = append(all, specs.Mount{Destination: m.At, Type: "tmpfs", Source: "tmpfs", Options: options})
	}
	lists, copies := map[string][]byte{}, 0
	for at, content := range o.Lists {
		lists[filepath.Base(at)] = content
	}
	if len(lists) > 0 {
		from, err := p.folder.copyOf("lists", lists, 0o644, 0, 0)
		if err != nil {
			return nil, err
		}
		for _, at := range slices.Sorted(maps.Keys(o.Lists)) {
			all = append(all, bind(filepath.Join(from, filepath.Base(at)), at, "ro", "noexec"))
		}
	}
	hosts, named, err := p.hosts(c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", hostsFile, err)
	}
	if named {
		all = append(all, hosts)
	}
	for _, m := range o.Mounts {
		if named && m.At == hosts.Destination {
			continue
		}
		var options []string
		if !m.Write {
			options = append(options, "ro")
		}
		if m.Data {
			options = append(options, "noexec")
		}
		from := m.From
		if m.Files != nil {
			if err := p.folder.inMemory(); err != nil {
				return nil, err
			}
			if from, err = p.folder.copyOf(fmt.Sprintf("%s/%d", memoryFolder, copies), m.Files, 0o400, o.UID, o.GID); err != nil {
				return nil, err
			}
			copies++
		} else if _, err := os.Stat(from); err != nil {
			return nil, fmt.Errorf("bind %s: %w", m.At, err)
		}
		all = append(all, bind(from, m.At, options...))
	}
	all = append(all, bind(r.cfg.Init, entry.Program, "ro"), bind(socket, entry.Folder, "ro", "noexec"))
	slices.SortStableFunc(all, func(a, b specs.Mount) int { return strings.Compare(a.Destination, b.Destination) })
	return all, nil
}

func bind(from, at string, options ...string) specs.Mount {
	if slices.Contains(options, "ro") {
		options = append(options, "rro")
	}
	return specs.Mount{Destination: at, Type: "bind", Source: from, Options: append([]string{"rbind", "nosuid", "nodev", "rnosuid", "rnodev"}, options...)}
}

// systemMounts returns the mounts of the machine's system folders. Those that are links become
// links in the root.
func systemMounts(root string) ([]specs.Mount, error) {
	var all []specs.Mount
	for _, at := range systemFolders {
		info, err := os.Lstat(at)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, err
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(at)
			if err == nil {
				err = os.Symlink(target, filepath.Join(root, at))
			}
			if err != nil {
				return nil, err
			}
		case info.IsDir():
			all = append(all, bind(at, at, "ro"))
		}
	}
	return all, nil
}

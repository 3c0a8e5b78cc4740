package cli

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// The states of a diagnosis.
const (
	checkOK      = "ok"
	checkWarning = "warning" // a node works without it, with less
	checkMissing = "missing" // a node does not work without it
)

// diagnosis is one thing that a node needs of its machine.
type diagnosis struct {
	Check string `json:"check"`
	State string `json:"state"`
	Found string `json:"found"`
	ToDo  string `json:"toDo,omitempty"` // unless it is ok
}

func fine(check, format string, args ...any) diagnosis {
	return diagnosis{Check: check, State: checkOK, Found: fmt.Sprintf(format, args...)}
}

func warning(check, found, toDo string) diagnosis {
	return diagnosis{Check: check, State: checkWarning, Found: found, ToDo: toDo}
}

func missing(check, found, toDo string) diagnosis {
	return diagnosis{Check: check, State: checkMissing, Found: found, ToDo: toDo}
}

// machine is the machine that is looked at.
type machine struct {
	root string // folder that has /proc, /etc and /lib; empty: the root
	user int    // of this process; 0: root
}

func (m machine) path(name string) string { return filepath.Join("/", m.root, name) }

// all looks at everything but the network. state is the node's folder.
func (m machine) all(uids, state string) []diagnosis {
	out := []diagnosis{m.userID(), m.numbers(uids), m.cgroups()}
	out = append(out, m.kernel()...)
	return append(out, m.memory(), m.disk(state), m.devices())
}

func (m machine) userID() diagnosis {
	if m.user == 0 {
		return fine("user", "root")
	}
	return warning("user", fmt.Sprintf("uid %d, not root", m.user),
		"run the daemon as root. Without it, all functions run as this user with the machine's files and network, and only images for stages work")
}

// numbers looks at the users that functions run as.
func (m machine) numbers(uids string) diagnosis {
	const check = "user numbers"
	var r sandbox.Range
	if err := r.UnmarshalText([]byte(uids)); err != nil {
		return missing(check, err.Error(), "correct --uids")
	}
	if m.user != 0 {
		return fine(check, "%s, not used without root", uids)
	}
	for _, file := range []string{"etc/passwd", "etc/group"} {
		if name, number := m.within(file, r); name != "" {
			return warning(check, fmt.Sprintf("%s of /%s has the number %d, which is in %s", name, file, number, uids),
				"choose other numbers with --uids: functions would run as that user or group")
		}
	}
	return fine(check, "%s, no other user or group has one of them", uids)
}

// within returns the first line of a file like /etc/passwd whose number is in a range.
func (m machine) within(file string, r sandbox.Range) (name string, number int) {
	f, err := os.Open(m.path(file))
	if err != nil {
		return "", 0 // a machine without it has no such users
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < 3 {
			continue
		}
		if n, err := strconv.Atoi(fields[2]); err == nil && n >= r.First && n <= r.Last {
			return fields[0], n
		}
	}
	return "", 0
}

func (m machine) cgroups() diagnosis {
	const check, cost = "cgroups", "; without them, replicas have no limits, and their usage is not known"
	f, err := cgroup.Look(m.root)
	version := "v1"
	if f.Unified {
		version = "v2"
	}
	switch {
	case err != nil:
		return warning(check, err.Error(), "mount cgroups at /sys/fs/cgroup"+cost)
	case len(f.Lacks) > 0:
		return warning(check, fmt.Sprintf("%s without the controllers %s", version, strings.Join(f.Lacks, ", ")),
			"delegate them to this process (systemd: Delegate=yes in the unit)"+cost)
	case !f.Writable:
		return warning(check, fmt.Sprintf("%s, but no permission for %s", version, f.Folder), "run as root, or delegate the group to this user (systemd: Delegate=yes in the unit)"+cost)
	}
	return fine(check, "%s with %s in %s", version, strings.Join(f.Has, ", "), f.Folder)
}

// kernel looks at the kernel's features.
func (m machine) kernel() []diagnosis {
	out := []diagnosis{memfd()}
	for _, feature := range []struct{ check, module, cost string }{
		{"nftables", "nf_tables", "functions share the machine's network, and nothing filters it"},
		{"veth", "veth", "functions share the machine's network"},
	} {
		found, known := m.module(feature.module)
		switch {
		case m.user != 0:
			out = append(out, fine(feature.check, "not used without root"))
		case found:
			out = append(out, fine(feature.check, "the kernel has %s", feature.module))
		case known:
			out = append(out, warning(feature.check, "the kernel has no "+feature.module, "use a kernel with it; without it, "+feature.cost))
		default:
			out = append(out, warning(feature.check, "unknown: there is no list of this kernel's modules", fmt.Sprintf("try `modprobe %s`; without it, %s", feature.module, feature.cost)))
		}
	}
	return append(out, m.namespaces())
}

func memfd() diagnosis {
	fd, err := unix.MemfdCreate("stagecoach-doctor", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return missing("memfd", err.Error(), "use Linux 3.17 or newer, without a seccomp filter that refuses memfd_create")
	}
	_ = unix.Close(fd)
	return fine("memfd", "works")
}

// module reports whether the kernel has a module, loaded, built in or on disk. known is false if
// the machine does not say which modules its kernel has.
func (m machine) module(name string) (found, known bool) {
	if _, err := os.Stat(m.path("sys/module/" + name)); err == nil {
		return true, true
	}
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false, false
	}
	folder := m.path("lib/modules/" + unix.ByteSliceToString(u.Release[:]))
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		b, err := os.ReadFile(filepath.Join(folder, list))
		if err != nil {
			continue
		}
		known = true
		if strings.Contains(string(b), "/"+name+".ko") {
			return true, true
		}
	}
	return false, known
}

// namespaces looks at user namespaces. Stagecoach itself makes none, but rootless containers do.
func (m machine) namespaces() diagnosis {
	const check = "user namespaces"
	b, err := os.ReadFile(m.path("proc/sys/user/max_user_namespaces"))
	n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n == 0 {
		return fine(check, "off; only a rootless containerd would need them")
	}
	return fine(check, "at most %d", n)
}

// The least memory and disk of a node in bytes, and what it should have.
const (
	leastMemory, enoughMemory = 64 << 20, 1 << 30
	leastDisk, enoughDisk     = 512 << 20, 5 << 30
)

func (m machine) memory() diagnosis {
	const check = "memory"
	bounds := resources.NewKernel(m.root).Bounds()
	if len(bounds) == 0 {
		return missing(check, "unknown: no /proc/meminfo", "mount /proc")
	}
	least := bounds[0]
	for _, b := range bounds[1:] {
		if b.Total-b.Used < least.Total-least.Used {
			least = b
		}
	}
	free := max(least.Total-least.Used, 0)
	found := fmt.Sprintf("%s of %s free (%s)", plan.Size(free), plan.Size(least.Total), least.Name)
	switch {
	case free < leastMemory:
		return missing(check, found, "end other programs, or give the cgroup more: a node needs at least "+plan.Size(leastMemory))
	case free < enoughMemory:
		return warning(check, found, "end other programs: few models fit into less than "+plan.Size(enoughMemory))
	}
	return fine(check, "%s", found)
}

func (m machine) disk(state string) diagnosis {
	const check = "disk"
	folder, err := filepath.Abs(state)
	if err != nil {
		return missing(check, err.Error(), "name a folder with --state")
	}
	for { // the folder may not be there yet
		if _, err := os.Stat(folder); err == nil || folder == "/" {
			break
		}
		folder = filepath.Dir(folder)
	}
	free, err := disk.Free(folder)
	if err != nil {
		return missing(check, err.Error(), "name a folder with --state")
	}
	if unix.Access(folder, unix.W_OK) != nil {
		return missing(check, "no permission for "+folder, "name a folder with --state that this user may write to")
	}
	found := fmt.Sprintf("%s free at %s", plan.Size(free), folder)
	switch {
	case free < leastDisk:
		return missing(check, found, "make room, or name another folder with --state: a node needs at least "+plan.Size(leastDisk))
	case free < enoughDisk:
		return warning(check, found, "make room: images and prepared parameters need more than "+plan.Size(enoughDisk))
	}
	return fine(check, "%s", found)
}

// devices looks at NVIDIA's driver and its library.
func (m machine) devices() diagnosis {
	const check = "accelerators"
	driver, err := os.ReadFile(m.path("proc/driver/nvidia/version"))
	if err != nil {
		return fine(check, "no driver of NVIDIA: this is a node without devices")
	}
	version, _, _ := strings.Cut(string(driver), "\n")
	version = strings.Join(strings.Fields(strings.TrimPrefix(version, "NVRM version:")), " ")
	w := device.Open(device.Config{Log: slog.New(slog.DiscardHandler), Timeout: 5 * time.Second})
	defer w.Close()
	all := w.Devices()
	if len(all) == 0 {
		return missing(check, version+", but NVML shows no device", "install libnvidia-ml.so.1 of the same version, and look whether nvidia-smi works; or start the daemon with --devices none")
	}
	for _, d := range all {
		if d.Fault.Text != "" {
			return warning(check, fmt.Sprintf("%s; device %s is not well: %s", version, d.Index, d.Fault.Text), "reset or replace it: no replica is placed on it")
		}
	}
	return fine(check, "%s; %s", version, plural(len(all), "device"))
}

// port looks whether the daemon could listen at an address.
func port(ctx context.Context, check, address string) diagnosis {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return missing(check, err.Error(), "choose another port, or end the program that has this one (ss -ltnp)")
	}
	_ = l.Close()
	return fine(check, "%s is free", address)
}

// clock looks at this machine's clock without another one to compare it with.
func clock(now time.Time) diagnosis {
	const check = "clock"
	var x unix.Timex
	state, err := unix.Adjtimex(&x)
	switch {
	case now.Year() < 2025 || now.Year() > 2100:
		return missing(check, now.UTC().Format(time.RFC3339)+", which cannot be true", "set the clock, and keep it right with chrony or systemd-timesyncd")
	case err == nil && state == unix.TIME_ERROR:
		return warning(check, now.UTC().Format(time.RFC3339)+", but nothing keeps it right", "start chrony or systemd-timesyncd; --join compares it with the control plane's clock")
	}
	return fine(check, "%s", now.UTC().Format(time.RFC3339))
}

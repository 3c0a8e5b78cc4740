package resources

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// EnvDevices is the variable that tells CUDA which devices a process may see, by UUID; empty: none.
const EnvDevices = "CUDA_VISIBLE_DEVICES"

// Device is an accelerator as it was last seen: a whole GPU, or a part of one (MIG).
type Device struct {
	ID          string // its UUID
	Index       string // number of the GPU on the machine, such as 2; for a part GPU:PART, such as 2:0
	Name        string
	Memory      int64         // bytes
	Used        int64         // bytes, by all processes of the machine
	Utilisation float64       // share of the latest seconds in which it computed; negative: unknown
	Temperature int           // degrees Celsius; 0: unknown
	Power       float64       // power draw in watts; 0: unknown
	Unhealthy   string        // why nothing may run on it; empty: it is healthy
	Processes   map[int]int64 // bytes by pid, as far as known; must not be changed
}

// DeviceInfo is a device and the replicas that use it.
type DeviceInfo struct {
	Device
	Reserved int64    // bytes, for this node's replicas
	Free     int64    // bytes that may still be reserved: neither reserved nor used by other processes
	Replicas []string // that have reserved memory of it, sorted

	// Bytes of Free that belong to parked children, or to children that are being parked. They are
	// freed when an order needs them.
	Parked    int64
	ParkedFor []string // functions whose children are parked on it, sorted
}

// ContextOverhead is the device memory that a process takes in addition to its parameters, in
// bytes, until it is measured.
const ContextOverhead = 512 << 20

// Holder is a process and the device memory that is reserved for it: for a replica, a parked child,
// or a part of a worker. Several holders may share one process.
type Holder struct {
	Replica  string           // empty: a worker's context, or a parked child
	PID      int              // 0: not yet known
	Reserved map[string]int64 // bytes by device
	Parks    bool             // a child that is parked, or is being parked
	Parked   string           // function whose child is parked; empty: no child is parked yet
}

// parents returns a function that returns the parent of a process. A process in the cgroup of a
// holder is its child: the program of a watchdog may be in a container, which descends from
// containerd.
func parents(holders []Holder) func(pid int) int {
	inGroup := sync.OnceValue(func() map[string]int {
		all := map[string]int{}
		for _, h := range holders {
			for group := range ownGroups(h.PID) {
				if other, shared := all[group]; shared && other != h.PID {
					all[group] = 0 // it tells nothing
					continue
				}
				all[group] = h.PID
			}
		}
		return all
	})
	return func(pid int) int {
		for group := range ownGroups(pid) {
			if holder := inGroup()[group]; holder != 0 && holder != pid {
				return holder
			}
		}
		return ParentOf(pid)
	}
}

// ownGroups returns the cgroups of a process that are not also those of this process, as lines of
// /proc/PID/cgroup.
func ownGroups(pid int) map[string]bool {
	own := map[string]bool{}
	theirs, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup") // it may have ended
	for line := range strings.Lines(string(theirs)) {
		own[line] = true
	}
	ours, _ := os.ReadFile("/proc/self/cgroup") // fails only without /proc
	for line := range strings.Lines(string(ours)) {
		delete(own, line)
	}
	return own
}

// survey returns how much of each device is free. A holder takes its reservation, or what it uses
// if that is more. Usage that belongs to no holder counts as that of another program. So survey may
// overestimate the usage, but never underestimates it. Parked children count as free memory. parent
// returns the parent of a process; usage of a holder's descendants counts as the holder's.
func survey(seen []Device, holders []Holder, parent func(pid int) int) []DeviceInfo {
	out := make([]DeviceInfo, 0, len(seen))
	for _, d := range seen {
		info := DeviceInfo{Device: d}
		used := usage(d, holders, parent)
		taken, ours := int64(0), int64(0)
		for i, h := range holders {
			ours += used[i]
			bytes, ok := h.Reserved[d.ID]
			switch {
			case ok && h.Parks:
				if h.Parked != "" {
					info.ParkedFor = append(info.ParkedFor, h.Parked)
				}
				info.Parked += max(bytes, used[i])
				continue
			case ok && h.Replica != "":
				info.Replicas = append(info.Replicas, h.Replica)
			}
			info.Reserved += bytes
			taken += max(bytes, used[i])
		}
		slices.Sort(info.Replicas)
		slices.Sort(info.ParkedFor)
		info.Free = max(d.Memory-taken-max(d.Used-ours, 0), 0)
		out = append(out, info)
	}
	slices.SortFunc(out, func(a, b DeviceInfo) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// usage returns how many bytes of a device the processes of each Holder use.
func usage(d Device, holders []Holder, parent func(pid int) int) []int64 {
	owner := map[int]int{}
	for i, h := range slices.Backward(holders) {
		if h.PID > 0 {
			owner[h.PID] = i
		}
	}
	const generations = 16
	used := make([]int64, len(holders))
	for pid, bytes := range d.Processes {
		for range generations {
			if i, ok := owner[pid]; ok {
				used[i] += bytes
				break
			}
			if pid = parent(pid); pid <= 1 {
				break
			}
		}
	}
	// Each holder of a process is charged what is reserved for it. The first is charged the rest.
	for i, h := range holders {
		if first, ok := owner[h.PID]; ok && first != i {
			used[i] = min(h.Reserved[d.ID], max(0, used[first]-holders[first].Reserved[d.ID]))
			used[first] -= used[i]
		}
	}
	return used
}

// reserve returns the bytes that a replica gets of each device in ids: the given number, or, if
// bytes is 0, all free memory. In the latter case, no other replica may have memory of the device.
func reserve(all []DeviceInfo, ids []string, bytes int64) (map[string]int64, error) {
	got := map[string]int64{}
	for _, id := range ids {
		i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == id })
		if i < 0 {
			return nil, fmt.Errorf("device %q: %w: this node does not have it", id, ErrDevice)
		}
		d := all[i]
		need := plan.DeviceNeed(bytes, d.Memory)
		_, twice := got[id]
		switch {
		case d.Unhealthy != "":
			return nil, fmt.Errorf("device %q: %w: it is not well: %s", id, ErrDevice, d.Unhealthy)
		case twice:
			return nil, fmt.Errorf("device %q: %w: it is asked for twice", id, ErrDevice)
		case need > d.Free || bytes == 0 && len(d.Replicas) > 0:
			return nil, fmt.Errorf("device %q: %w: want %s, and %s of %s are free: %s are reserved for %d replicas, %s are in use",
				id, ErrDevice, plan.Size(need), plan.Size(d.Free), plan.Size(d.Memory), plan.Size(d.Reserved), len(d.Replicas), plan.Size(d.Used))
		case bytes == 0:
			need = d.Free
		}
		got[id] = need
	}
	return got, nil
}

// Takes reports whether a child may be parked on a device for replicas that take this many bytes of
// it; 0: all of it.
func (d DeviceInfo) Takes(bytes int64) bool {
	need := plan.DeviceNeed(bytes, d.Memory)
	return d.Unhealthy == "" && (bytes > 0 || len(d.Replicas) == 0) && d.Free >= max(need, d.Parked+ContextOverhead)
}

// ParentOf returns the parent of a process, or 0 if the process has ended.
func ParentOf(pid int) int {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:])) // state, parent, …
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(fields[1]) // 0 if it is not a number
	return parent
}

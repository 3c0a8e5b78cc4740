package keysmanager

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/plan"
)

// envDevices says to CUDA which devices a process may see, by UUID; empty: none.
const envDevices = "CUDA_VISIBLE_DEVICES"

// Device is an accelerator as it was seen last: a whole GPU, or a part of one (MIG).
type Device struct {
	ID          string // its UUID
	Index       string // of the GPU on the machine, such as 2; of a part GPU:PART, such as 2:0
	Name        string
	Memory      int64   // bytes
	Used        int64   // bytes, by all processes of the machine
	Utilisation float64 // share of the latest seconds in which it computed; negative: unknown
	Unhealthy   string  // why nothing may run on it; empty: it is well
	Processes   map[int]int64
}

// DeviceInfo is a device and who has it.
type DeviceInfo struct {
	Device
	Reserved int64    // bytes, by this node's replicas
	Free     int64    // bytes that may still be reserved: what neither replicas have reserved nor others use
	Replicas []string // that have reserved some of it, sorted
}

// ErrDevice is the error of a replica for which there is no device, or too little memory on it.
var ErrDevice = errors.New("no room on its device")

// wholeShare: a replica that wants a device to itself puts up with what others use of it up to this part of its memory, which
// is what displays and the driver itself take.
const wholeShare = 16

// reservations is how much of which device replicas have reserved. It has no lock: the manager's guards it.
type reservations map[string]reservation // by replica

// reservation is a replica's.
type reservation struct {
	pid     int              // of its process; 0: not yet known
	devices map[string]int64 // bytes, by device
}

// take reserves bytes on each of the devices for a replica, or on none. 0 bytes is a whole device: all that is free of one that
// no other replica has.
func (r reservations) take(seen []Device, replica string, ids []string, bytes int64, parent func(pid int) int) error {
	got := map[string]int64{}
	all := r.look(seen, parent)
	for _, id := range ids {
		i := slices.IndexFunc(all, func(d DeviceInfo) bool { return d.ID == id })
		if i < 0 {
			return fmt.Errorf("device %q: %w: not one of this node's (%s)", id, ErrDevice, strings.Join(names(all), ", "))
		}
		d := all[i]
		need := bytes
		if need == 0 {
			need = d.Memory - d.Memory/wholeShare
		}
		switch {
		case d.Unhealthy != "":
			return fmt.Errorf("device %q: %w: it is not well: %s", id, ErrDevice, d.Unhealthy)
		case got[id] > 0:
			return fmt.Errorf("device %q: %w: asked for twice", id, ErrDevice)
		case need > d.Free:
			return fmt.Errorf("device %q: %w: it has %s free of %s, want %s: replicas have reserved %s, and %s are in use",
				id, ErrDevice, plan.Size(d.Free), plan.Size(d.Memory), plan.Size(need), plan.Size(d.Reserved), plan.Size(d.Used))
		case bytes == 0:
			need = d.Free
		}
		got[id] = need
	}
	if len(got) > 0 {
		r[replica] = reservation{devices: got}
	}
	return nil
}

func names(all []DeviceInfo) (out []string) {
	for _, d := range all {
		out = append(out, d.ID)
	}
	return out
}

// started says which process is the replica's, so that what it uses is not taken for another's.
func (r reservations) started(replica string, pid int) {
	if own, ok := r[replica]; ok {
		own.pid = pid
		r[replica] = own
	}
}

// look says what is free of each device. What a replica uses beyond what it has reserved is not free either, and what cannot be
// told to be a replica's counts as somebody else's: too much is taken as used then, never too little. parent returns the parent of
// a process, 0 when it has none, so that a replica's children are its own; nil: children are not looked for.
func (r reservations) look(seen []Device, parent func(pid int) int) []DeviceInfo {
	out := make([]DeviceInfo, 0, len(seen))
	for _, d := range seen {
		info := DeviceInfo{Device: d}
		used := r.usage(d, parent)
		taken, ours := int64(0), int64(0)
		for _, replica := range slices.Sorted(maps.Keys(r)) {
			bytes, ok := r[replica].devices[d.ID]
			if !ok {
				continue
			}
			info.Replicas = append(info.Replicas, replica)
			info.Reserved += bytes
			taken += max(bytes, used[replica])
			ours += used[replica]
		}
		info.Free = max(d.Memory-taken-max(d.Used-ours, 0), 0)
		out = append(out, info)
	}
	slices.SortFunc(out, func(a, b DeviceInfo) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// usage returns how many bytes of a device the processes of each replica use.
func (r reservations) usage(d Device, parent func(pid int) int) map[string]int64 {
	owner := map[int]string{}
	for replica, own := range r {
		if own.pid > 0 {
			owner[own.pid] = replica
		}
	}
	const generations = 16
	used := map[string]int64{}
	for pid, bytes := range d.Processes {
		for range generations {
			if replica, ok := owner[pid]; ok {
				used[replica] += bytes
				break
			}
			if parent == nil || pid <= 1 {
				break
			}
			pid = parent(pid)
		}
	}
	return used
}

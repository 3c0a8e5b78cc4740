package plan

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"
)

// Function finds a function by name. ok is false if the snapshot does not have it. The pointer is
// into s and must not be written through.
func (s *Snapshot) Function(name string) (f *Function, ok bool) {
	// By index, because copies would be slow.
	i := sort.Search(len(s.Functions), func(i int) bool { return s.Functions[i].Name >= name })
	if i == len(s.Functions) || s.Functions[i].Name != name {
		return nil, false
	}
	return &s.Functions[i], true
}

// Pipeline finds a pipeline by name, as Function finds a function.
func (s *Snapshot) Pipeline(name string) (p *Pipeline, ok bool) {
	i := sort.Search(len(s.Pipelines), func(i int) bool { return s.Pipelines[i].Name >= name })
	if i == len(s.Pipelines) || s.Pipelines[i].Name != name {
		return nil, false
	}
	return &s.Pipelines[i], true
}

// Finder finds functions of a snapshot by name. It tries the latest hit and the function after it
// first, so lookups in the snapshot's order are the fastest. Lines, wants and most domains are in
// that order. The zero value finds nothing.
type Finder struct {
	all []Function
	at  int // index of the latest hit, or where the search ended
}

// Finder returns a Finder of s.
func (s *Snapshot) Finder() Finder { return Finder{all: s.Functions} }

// Function works like [Snapshot.Function].
func (f *Finder) Function(name string) (*Function, bool) {
	i, ok := f.Index(name)
	if !ok {
		return nil, false
	}
	return &f.all[i], true
}

// Index returns a function's index in the snapshot.
func (f *Finder) Index(name string) (int, bool) {
	is := func(i int) bool { return i < len(f.all) && f.all[i].Name == name }
	switch {
	case is(f.at):
	case is(f.at + 1):
		f.at++
	default:
		f.at = sort.Search(len(f.all), func(i int) bool { return f.all[i].Name >= name })
	}
	return f.at, is(f.at)
}

// Current counts the replicas of f's own revision that are ready or starting. Draining replicas and
// those of an older revision do not count.
func (f *Function) Current() (ready, starting int) {
	for i := range f.Replicas {
		switch r := &f.Replicas[i]; {
		case r.Revision != f.Revision:
		case r.State == Ready:
			ready++
		case r.State == Starting:
			starting++
		}
	}
	return ready, starting
}

// Ahead reports whether a replica of f would be started ahead of need: f has none, and all its
// tasks are still expected. Such a replica may use only resources that nobody else wants.
func (f *Function) Ahead() bool {
	ready, starting := f.Current()
	return f.Expected > 0 && f.Waiting <= 0 && f.Running <= 0 && f.Zero && ready+starting == 0
}

// Bounds returns the smallest and the largest number of replicas that f may have. A function that
// may not scale to zero has at least one.
func (f *Function) Bounds() (least, most int) {
	if f.Zero {
		return 0, max(f.Max, 1)
	}
	least = max(f.Min, 1)
	return least, max(f.Max, least)
}

// wholeShare limits how much of a device others may use while it still counts as free for exclusive
// use: one in wholeShare of its memory. Displays and the driver take some.
const wholeShare = 16

// DeviceNeed returns how many bytes of a device must be free for a replica. The arguments are the
// number of bytes that the replica takes, and the size of the device. 0 bytes mean that the replica
// takes the whole device, of which others may use a sixteenth.
func DeviceNeed(takes, size int64) int64 {
	if takes == 0 {
		return size - size/wholeShare
	}
	return takes
}

// Unfit returns why no replica can be on the node with the given devices, or "" if one can. It
// applies to existing replicas too. device has the form of Slot.Device.
func (n *Node) Unfit(device string) string {
	if n.Leaving {
		return fmt.Sprintf("node %s is leaving: %s", n.Name, n.Unavailable)
	}
	if n.Moving {
		return fmt.Sprintf("node %s is being drained", n.Name)
	}
	for _, id := range (Slot{Device: device}).Devices() {
		i := slices.IndexFunc(n.Devices, func(d Device) bool { return d.ID == id })
		switch {
		case i < 0:
			return fmt.Sprintf("device %s of node %s is no more", id, n.Name)
		case n.Devices[i].Unavailable != "":
			return fmt.Sprintf("device %s of node %s is not well: %s", id, n.Name, n.Devices[i].Unavailable)
		}
	}
	return ""
}

// Barred returns why no replica of f may be on any of these devices of a node, or "" if a replica
// may. device has the form of Slot.Device.
func (f *Function) Barred(node, device string) string {
	for _, b := range f.Bars {
		if b.Node == node && (Slot{Device: device}).On(b.Device) {
			return fmt.Sprintf("device %s of node %s is not tried until %s: %s", b.Device, b.Node, b.Until.UTC().Format(time.TimeOnly), b.Cause)
		}
	}
	return ""
}

// Devices splits the devices of a slot, which are joined by commas.
func (s Slot) Devices() []string {
	if s.Device == "" {
		return nil
	}
	return strings.Split(s.Device, ",")
}

// On reports whether the slot has a device.
func (s Slot) On(id string) bool {
	for rest := s.Device; rest != ""; {
		var first string
		if first, rest, _ = strings.Cut(rest, ","); first == id {
			return true
		}
	}
	return false
}

var (
	stateNames  = [...]string{Starting: "starting", Ready: "ready", Draining: "draining"}
	warmthNames = [...]string{Cold: "cold", File: "file", Host: "host", Parked: "parked"}
)

// String returns the state's name in lower case.
func (s State) String() string { return name(stateNames[:], int(s), "state") }

// MarshalText returns the state's name, so that recorded snapshots do not depend on the numbers.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses the result of MarshalText.
func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(stateNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("plan: state %q, want one of %s", text, strings.Join(stateNames[:], ", "))
	}
	*s = State(i)
	return nil
}

// String returns the warmth's name in lower case.
func (w Warmth) String() string { return name(warmthNames[:], int(w), "warmth") }

// MarshalText returns the warmth's name.
func (w Warmth) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText parses the result of MarshalText.
func (w *Warmth) UnmarshalText(text []byte) error {
	i := slices.Index(warmthNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("plan: warmth %q, want one of %s", text, strings.Join(warmthNames[:], ", "))
	}
	*w = Warmth(i)
	return nil
}

func name(names []string, i int, kind string) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%s(%d)", kind, i)
}

package plan

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"
)

// Function finds a function by name; ok is false when the snapshot has none of that name. The pointer is into s: read only.
func (s *Snapshot) Function(name string) (f *Function, ok bool) {
	i := sort.Search(len(s.Functions), func(i int) bool { return s.Functions[i].Name >= name }) // copies none of them
	if i == len(s.Functions) || s.Functions[i].Name != name {
		return nil, false
	}
	return &s.Functions[i], true
}

// Pipeline finds a pipeline by name, as Function does a function.
func (s *Snapshot) Pipeline(name string) (p *Pipeline, ok bool) {
	i := sort.Search(len(s.Pipelines), func(i int) bool { return s.Pipelines[i].Name >= name })
	if i == len(s.Pipelines) || s.Pipelines[i].Name != name {
		return nil, false
	}
	return &s.Pipelines[i], true
}

// Finder finds functions of a snapshot by name. It is quickest with the next one in the snapshot's order, as lines, wants and most domains
// have them. The zero value finds none.
type Finder struct {
	all []Function
	at  int // the latest that was found, or where the search for it ended
}

// Finder returns a Finder of s.
func (s *Snapshot) Finder() Finder { return Finder{all: s.Functions} }

// Function is as [Snapshot.Function].
func (f *Finder) Function(name string) (*Function, bool) {
	i, ok := f.Index(name)
	if !ok {
		return nil, false
	}
	return &f.all[i], true
}

// Index finds a function's index in the snapshot.
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

// Current counts the replicas of f's own revision that serve and those that will. Draining ones and ones of an older
// revision are on their way out and count as neither.
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

// Ahead reports whether a replica of f would be started ahead of need: f has none, and all tasks
// for it are still expected. Such a replica only takes what nobody else asks for.
func (f *Function) Ahead() bool {
	ready, starting := f.Current()
	return f.Expected > 0 && f.Waiting <= 0 && f.Running <= 0 && f.Zero && ready+starting == 0
}

// Bounds are the least and the most replicas that f may have. A function that may not sleep has at least one.
func (f *Function) Bounds() (least, most int) {
	if f.Zero {
		return 0, max(f.Max, 1)
	}
	least = max(f.Min, 1)
	return least, max(f.Max, least)
}

// wholeShare: what wants a device for itself puts up with what others use of it up to this part of its memory: displays and the
// driver itself take some.
const wholeShare = 16

// DeviceNeed is how many bytes of a device of this size have to be free for a replica that takes so many of it; 0 is a whole
// device, of which a sixteenth may be in use by others.
func DeviceNeed(takes, size int64) int64 {
	if takes == 0 {
		return size - size/wholeShare
	}
	return takes
}

// Unfit says why a replica cannot be on n and these devices of it, whether it is there already or not; device is as Slot has it. Empty:
// it can.
func (n *Node) Unfit(device string) string {
	if n.Leaving {
		return fmt.Sprintf("node %s is leaving: %s", n.Name, n.Unavailable)
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

// Barred says why no replica of f may be on any of these devices of a node; device is as Slot has it. Empty: it may.
func (f *Function) Barred(node, device string) string {
	for _, b := range f.Bars {
		if b.Node == node && (Slot{Device: device}).On(b.Device) {
			return fmt.Sprintf("device %s of node %s is not tried until %s: %s", b.Device, b.Node, b.Until.UTC().Format(time.TimeOnly), b.Cause)
		}
	}
	return ""
}

// Devices are the devices of a slot; a replica that needs several has their names joined by commas.
func (s Slot) Devices() []string {
	if s.Device == "" {
		return nil
	}
	return strings.Split(s.Device, ",")
}

// On says whether the slot has a device.
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

// String is the state's name in lower case.
func (s State) String() string { return name(stateNames[:], int(s), "state") }

// MarshalText writes the state's name, so that recorded snapshots outlive a renumbering.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(stateNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("plan: state %q, want one of %s", text, strings.Join(stateNames[:], ", "))
	}
	*s = State(i)
	return nil
}

// String is the warmth's name in lower case.
func (w Warmth) String() string { return name(warmthNames[:], int(w), "warmth") }

// MarshalText writes the warmth's name.
func (w Warmth) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText reads what MarshalText wrote.
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

package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Function finds a function by name; ok is false when the snapshot has none of that name. The pointer is into s: read only.
func (s *Snapshot) Function(name string) (f *Function, ok bool) {
	i, ok := slices.BinarySearchFunc(s.Functions, name, func(f Function, n string) int { return cmp.Compare(f.Name, n) })
	if !ok {
		return nil, false
	}
	return &s.Functions[i], true
}

// Current counts the replicas of f's own revision that serve and those that will. Draining ones and ones of an older
// revision are on their way out and count as neither.
func (f *Function) Current() (ready, starting int) {
	for _, r := range f.Replicas {
		switch {
		case r.Revision != f.Revision:
		case r.State == Ready:
			ready++
		case r.State == Starting:
			starting++
		}
	}
	return ready, starting
}

// Bounds are the least and the most replicas that f may have. A function that may not sleep has at least one.
func (f *Function) Bounds() (least, most int) {
	if f.Zero {
		return 0, max(f.Max, 1)
	}
	least = max(f.Min, 1)
	return least, max(f.Max, least)
}

// Devices are the devices of a slot; a replica that needs several has their names joined by commas.
func (s Slot) Devices() []string {
	if s.Device == "" {
		return nil
	}
	return strings.Split(s.Device, ",")
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

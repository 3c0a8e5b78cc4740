package device

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Share selects devices of a machine. The zero Share selects all.
type Share struct {
	none  bool
	names []string
}

// nameForm is the form of a device's name: its index, that of an instance, or a UUID.
var nameForm = regexp.MustCompile(`^(\d{1,3}(:\d{1,3})?|(GPU|MIG)-[-0-9a-fA-F/]+)$`)

// ParseShare parses "all", "none", or a comma-separated list of devices. The empty string means
// "all". An item is a UUID (GPU-… or MIG-…), the index of a GPU such as 2, or the index of an
// instance such as 2:0. A GPU that is divided (MIG) stands for all its instances.
func ParseShare(s string) (Share, error) {
	switch s {
	case "", "all":
		return Share{}, nil
	case "none":
		return Share{none: true}, nil
	}
	var out Share
	for name := range strings.SplitSeq(s, ",") {
		name = strings.TrimSpace(name)
		if !nameForm.MatchString(name) {
			return Share{}, fmt.Errorf("%q, want all, none, or UUIDs and indices by commas, such as 0,2 or 0:1 or GPU-5f…", s)
		}
		out.names = append(out.names, name)
	}
	return out, nil
}

// has reports whether a device of the GPU with this UUID is selected.
func (s Share) has(d Info, gpu string) bool {
	if s.none || len(s.names) == 0 {
		return !s.none
	}
	index, _, _ := strings.Cut(d.Index, ":")
	return slices.ContainsFunc([]string{d.UUID, d.Index, gpu, index}, func(name string) bool { return slices.Contains(s.names, name) })
}

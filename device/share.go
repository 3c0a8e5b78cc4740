package device

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Share says which of a machine's devices are meant. The zero Share is all of them.
type Share struct {
	none  bool
	names []string
}

// nameForm is what names a device: its index, that of an instance, or a UUID.
var nameForm = regexp.MustCompile(`^(\d{1,3}(:\d{1,3})?|(GPU|MIG)-[-0-9a-fA-F/]+)$`)

// ParseShare reads "all", "none", or devices by commas: a UUID (GPU-… or MIG-…), a GPU's index such as 2, or that of an instance
// such as 2:0. A GPU that is divided stands for all its instances. Empty is all.
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

// has tells whether a device is meant, of the GPU with this UUID.
func (s Share) has(d Info, gpu string) bool {
	if s.none || len(s.names) == 0 {
		return !s.none
	}
	index, _, _ := strings.Cut(d.Index, ":")
	return slices.ContainsFunc([]string{d.UUID, d.Index, gpu, index}, func(name string) bool { return slices.Contains(s.names, name) })
}

package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Options are what a function asks for its processes. Not every Runtime can give all of them.
type Options struct {
	// Class names the operator's runtime of containers; empty: the default. Only containers have one.
	Class string `json:"class,omitempty"`
	// Drop lists capabilities that a program gives up of those that it would keep as root, such as
	// CAP_CHOWN, or is ALL. Processes with an account have none.
	Drop []string `json:"drop,omitempty"`
	// Devices are CDI's names of devices, such as vendor.com/class=name. Only containers get them.
	Devices []string `json:"devices,omitempty"`
	// Memory and CPUMilli are the limits of a pod: bytes, and thousandths of a core; 0: none.
	// Elsewhere, cgroups of the node limit the processes.
	Memory   int64 `json:"memory,omitempty"`
	CPUMilli int   `json:"cpuMilli,omitempty"`
}

// DropAll stands for all capabilities in Options.Drop.
const DropAll = "ALL"

// Text returns a text that differs for processes that must not share a container.
func (o Options) Text() string {
	if o.Class == "" && len(o.Devices) == 0 {
		return ""
	}
	return o.Class + " " + strings.Join(o.Devices, ",")
}

// inProcess returns an error if a process that is in no container cannot have the options.
func (o Options) inProcess() error {
	const want = "and this node starts processes: want none, or start the node with --runtime containerd"
	var errs []error
	if o.Class != "" {
		errs = append(errs, fmt.Errorf("annotation stagecoach.dev/runtime-class is %s, %s", o.Class, want))
	}
	if len(o.Devices) > 0 {
		errs = append(errs, fmt.Errorf("annotation stagecoach.dev/cdi-devices is %s, %s", strings.Join(o.Devices, ","), want))
	}
	return errors.Join(errs...)
}

// kept returns the capabilities that a program keeps if it runs as root, by their numbers.
func (o Options) kept() map[uintptr]string {
	out := map[uintptr]string{}
	for number, name := range kept {
		if !slices.Contains(o.Drop, name) && !slices.Contains(o.Drop, DropAll) {
			out[number] = name
		}
	}
	return out
}

// Kept returns the names of the capabilities that a program keeps if it runs as root, sorted.
func (o Options) Kept() []string {
	var out []string
	for _, name := range o.kept() {
		out = append(out, name)
	}
	slices.SortFunc(out, cmp.Compare[string])
	return out
}

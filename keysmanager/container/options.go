package container

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// handler returns the name of containerd's runtime for a class.
func (r *Runtime) handler(class string) (string, error) {
	if class == "" {
		return runc, nil
	}
	if h := r.cfg.Classes[class]; h != "" {
		return h, nil
	}
	return "", fmt.Errorf("runtime class %q: this node has %s (--runtime-classes)", class, list(slices.Sorted(maps.Keys(r.cfg.Classes))))
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// registry has what the CDI specs of this machine say. Its mutex is held while they are read and
// used.
var registry struct {
	sync.Mutex
	cache *cdi.Cache // nil: none yet
}

// nvidia is the kind that NVIDIA's CDI specs have.
const nvidia = "nvidia.com/gpu="

// cdiNames returns CDI's names of the devices that a command gets. gpus says that NVIDIA's are
// among them; else the command gets the device files of the machine.
func (r *Runtime) cdiNames(c sandbox.Command) (names []string, gpus bool, err error) {
	for _, name := range c.Options.Devices {
		kind, _, _ := strings.Cut(name, "=")
		if !slices.Contains(r.cfg.Devices, name) && !slices.Contains(r.cfg.Devices, kind+"=*") {
			return nil, false, fmt.Errorf("CDI device %s: this node gives functions %s (--cdi-devices)", name, list(r.cfg.Devices))
		}
	}
	names = slices.Clone(c.Options.Devices)
	// A program without a root of its own has the machine's files of the driver, and its device files.
	if c.Chroot == "" || !c.GPUs {
		return names, false, nil
	}
	theirs := gpuNames(c.Env[envGPUs])
	if len(theirs) == 0 {
		return names, false, nil
	}
	err = withCDI(func(cache *cdi.Cache, _ error) error {
		gpus = !slices.ContainsFunc(theirs, func(name string) bool { return cache.GetDevice(name) == nil })
		return nil
	})
	if gpus {
		names = append(names, theirs...)
	}
	return names, gpus, err
}

// withCDI calls f with what the CDI specs of this machine say now, and with what is wrong with
// them. One bad spec does not hide the others.
func withCDI(f func(cache *cdi.Cache, wrong error) error) (err error) {
	registry.Lock()
	defer registry.Unlock()
	if registry.cache == nil {
		if registry.cache, err = cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(specFolders...)); err != nil {
			return fmt.Errorf("CDI: %w", err)
		}
	}
	return f(registry.cache, registry.cache.Refresh())
}

// addCDI adds devices to the spec of a container. It returns the variables that they add to the
// program's environment.
func addCDI(s *specs.Spec, names []string) (env []string, err error) {
	if len(names) == 0 {
		return nil, nil
	}
	had := len(s.Process.Env)
	err = withCDI(func(cache *cdi.Cache, wrong error) error {
		missing, err := cache.InjectDevices(s, names...)
		if len(missing) > 0 {
			err = fmt.Errorf("no spec in %s has %s: want one of %s", strings.Join(specFolders, ", "), strings.Join(missing, ", "), list(cache.ListDevices()))
		}
		if err != nil {
			return fmt.Errorf("CDI devices: %w", errors.Join(err, wrong))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	env = slices.Clone(s.Process.Env[had:])
	s.Process.Env = s.Process.Env[:had]
	return env, nil
}

// specFolders are where CDI specs are.
var specFolders = slices.Clone(cdi.DefaultSpecDirs)

// envGPUs names the GPUs of a program.
const envGPUs = "CUDA_VISIBLE_DEVICES"

// gpuNames returns CDI's names of GPUs, from their UUIDs or indices with commas between.
func gpuNames(ids string) (out []string) {
	for id := range strings.SplitSeq(ids, ",") {
		if id = strings.TrimSpace(id); id != "" {
			out = append(out, nvidia+id)
		}
	}
	return out
}

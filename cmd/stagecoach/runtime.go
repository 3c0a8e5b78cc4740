package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// RuntimeConfig says in what the processes of functions run.
type RuntimeConfig struct {
	Name      string `yaml:"name"`      // process, containerd; pod for a pod of a DaemonSet
	Address   string `yaml:"address"`   // path of containerd's socket
	Namespace string `yaml:"namespace"` // of containerd, in which the containers are
	// Snapshotter of containerd that unpacks images.
	Snapshotter string `yaml:"snapshotter"`
	// Folder with a hosts.toml per registry, for containerd's images.
	HostsDir string `yaml:"hostsDir"`
	// NAME=RUNTIME,…: containerd's runtimes by the names that functions may ask for.
	Classes string `yaml:"classes"`
	// CDI devices that functions may ask for: vendor.com/class=name, or * for the name, with commas
	// between.
	CDIDevices string `yaml:"cdiDevices"`
	// Spare containers that a function may have on each node.
	Spares int `yaml:"spares"`

	pods podsConfig // of a daemon that is a pod of Kubernetes
}

// The runtimes.
const (
	runtimeProcess    = "process"
	runtimeContainerd = "containerd"
	runtimePod        = "pod"
)

func defaultRuntime() RuntimeConfig {
	return RuntimeConfig{Name: runtimeProcess, pods: podsConfig{api: kube.Address(), folder: "/var/lib/kubelet/pods"}, Address: container.Address, Namespace: container.Namespace, Snapshotter: contained.DefaultSnapshotter, HostsDir: contained.DefaultHostsDir}
}

// String names the runtime; empty: processes.
func (c RuntimeConfig) String() string {
	switch c.Name {
	case runtimePod:
		return "pods of Kubernetes"
	case runtimeProcess:
		return ""
	}
	return fmt.Sprintf("containers of containerd at %s, namespace %s", c.Address, c.Namespace)
}

// runtimeFlags has the flags of a RuntimeConfig's fields.
var runtimeFlags = map[string]string{
	"name": "runtime", "address": "containerd-address", "namespace": "containerd-namespace", "snapshotter": "containerd-snapshotter",
	"hostsDir": "containerd-hosts-dir", "classes": "runtime-classes", "cdiDevices": "cdi-devices",
	"spares": "spares",
}

func (c *RuntimeConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Name, runtimeFlags["name"], c.Name, "in what functions run: process, containerd, or pod (with --pod)")
	fs.StringVar(&c.Address, runtimeFlags["address"], c.Address, "path of containerd's socket")
	fs.StringVar(&c.Namespace, runtimeFlags["namespace"], c.Namespace, "namespace of containerd for the containers")
	fs.StringVar(&c.Classes, runtimeFlags["classes"], c.Classes, "NAME=RUNTIME, with commas between: containerd's runtimes that functions may ask for (annotation stagecoach.dev/runtime-class)")
	fs.StringVar(&c.CDIDevices, runtimeFlags["cdiDevices"], c.CDIDevices, "CDI devices that functions may ask for (annotation stagecoach.dev/cdi-devices): vendor.com/class=name, or * for the name")
}

// addSparesFlag adds the flag of spare containers.
func (c *RuntimeConfig) addSparesFlag(fs *flag.FlagSet) {
	fs.IntVar(&c.Spares, runtimeFlags["spares"], c.Spares, "containers that may wait for the next starts of a function on each node (annotation stagecoach.dev/spares), at most")
}

// spares returns how many containers may wait for the next starts of a function. As a process, a
// start needs none.
func (c RuntimeConfig) spares() int {
	if c.Name != runtimeContainerd {
		return 0
	}
	return c.Spares
}

// addImageFlags adds the flags of images in containerd.
func (c *RuntimeConfig) addImageFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Snapshotter, runtimeFlags["snapshotter"], c.Snapshotter, "snapshotter of containerd that unpacks images")
	fs.StringVar(&c.HostsDir, runtimeFlags["hostsDir"], c.HostsDir, "folder with a hosts.toml per registry, for images in containerd")
}

// openImages opens the images of a node in containerd. With another runtime, it returns nil.
func (c RuntimeConfig) openImages(ctx context.Context, state string, of contained.Config) (*contained.Store, error) {
	if c.Name != runtimeContainerd {
		return nil, nil
	}
	of.Address, of.Namespace, of.Snapshotter, of.HostsDir = c.Address, c.Namespace, c.Snapshotter, c.HostsDir
	of.Dir = filepath.Join(state, "containerd", "images")
	return contained.Open(ctx, of)
}

// nodeFlag is the flag of programs of the platform with the name of the node, which no other node
// of the machine has.
const nodeFlag = "node"

// arguments returns the flags of c and of the node for another program of the platform.
func (c RuntimeConfig) arguments(node string) []string {
	own := []string{
		"--" + runtimeFlags["name"], c.Name, "--" + runtimeFlags["address"], c.Address, "--" + runtimeFlags["namespace"], c.Namespace,
		"--" + runtimeFlags["classes"], c.Classes, "--" + runtimeFlags["cdiDevices"], c.CDIDevices, "--" + nodeFlag, node,
	}
	return append(own, c.pods.arguments()...)
}

// containerdNamespace matches the namespaces that containerd accepts.
var containerdNamespace = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$`)

// maxContainerdNamespace is the longest namespace that containerd accepts, in bytes.
const maxContainerdNamespace = 76

// validate reports the invalid fields.
func (c RuntimeConfig) validate(bad func(field string, got any, want string)) {
	if !slices.Contains([]string{runtimeProcess, runtimeContainerd, runtimePod}, c.Name) || c.Name == runtimePod && !c.pods.is() {
		bad("name", fmt.Sprintf("%q", c.Name), runtimeProcess+" or "+runtimeContainerd+", or "+runtimePod+" for a `stagecoach keysmanager --pod` with --pod-image and --pod-machine")
	}
	if !filepath.IsAbs(c.Address) {
		bad("address", fmt.Sprintf("%q", c.Address), "the absolute path of containerd's socket, such as "+container.Address)
	}
	if c.Snapshotter == "" {
		bad("snapshotter", `""`, "the name of one, such as "+contained.DefaultSnapshotter)
	}
	if c.HostsDir == "" {
		bad("hostsDir", `""`, "a folder, such as "+contained.DefaultHostsDir)
	}
	if _, err := c.classes(); err != nil {
		bad("classes", fmt.Sprintf("%q", c.Classes), err.Error())
	}
	if c.Spares < 0 || c.Spares > pipeline.MaxSpares {
		bad("spares", c.Spares, fmt.Sprintf("0 to %d", pipeline.MaxSpares))
	}
	if _, err := c.devices(); err != nil {
		bad("cdiDevices", fmt.Sprintf("%q", c.CDIDevices), err.Error())
	}
	if len(c.Namespace) > maxContainerdNamespace || !containerdNamespace.MatchString(c.Namespace) {
		bad("namespace", fmt.Sprintf("%q", c.Namespace), fmt.Sprintf("letters and digits, with single dots, dashes or underscores between, such as %s", container.Namespace))
	}
}

// Forms of the names in Classes and CDIDevices.
var (
	className  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	shimName   = regexp.MustCompile(`^[a-z0-9]+(\.[A-Za-z0-9_-]+)*\.[A-Za-z0-9_-]+\.v[0-9]+$`)
	deviceName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]*/[A-Za-z][A-Za-z0-9_-]*=(\*|[A-Za-z0-9][A-Za-z0-9._:-]*)$`)
)

// classes returns containerd's runtimes by their names for functions.
func (c RuntimeConfig) classes() (map[string]string, error) {
	out := map[string]string{}
	for _, part := range parts(c.Classes) {
		name, shim, _ := strings.Cut(part, "=")
		switch {
		case !className.MatchString(name) || !shimName.MatchString(shim):
			return nil, fmt.Errorf("NAME=RUNTIME with commas between, such as runc=io.containerd.runc.v2,gvisor=io.containerd.runsc.v1; got %q", part)
		case out[name] != "":
			return nil, fmt.Errorf("each name once; %s is there twice", name)
		}
		out[name] = shim
	}
	return out, nil
}

// devices returns the CDI devices that functions may ask for.
func (c RuntimeConfig) devices() ([]string, error) {
	all := parts(c.CDIDevices)
	for _, part := range all {
		if !deviceName.MatchString(part) {
			return nil, fmt.Errorf("CDI's names, vendor.com/class=name or vendor.com/class=*, with commas between; got %q", part)
		}
	}
	return all, nil
}

// parts returns the parts of a list with commas between.
func parts(list string) (out []string) {
	for part := range strings.SplitSeq(list, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// lists returns a function that lists the containers of a node; nil: its functions run in none.
func (c RuntimeConfig) lists(name string) func() []node.Container {
	if c.Name != runtimeContainerd {
		return nil
	}
	return func() (out []node.Container) {
		for _, i := range container.List(name) {
			out = append(out, node.Container(i))
		}
		return out
	}
}

// open opens the runtime of a node, or of one of the node's watchdogs. labels are those of all
// containers of a watchdog; nil: it is the node's. The caller closes it.
func (c RuntimeConfig) open(ctx context.Context, node string, labels map[string]string, log *slog.Logger) (sandbox.Runtime, error) {
	switch c.Name {
	case runtimePod:
		return c.pods.open(ctx, labels, log)
	case runtimeProcess:
		return sandbox.NewSpawner(), nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("runtime containerd: %w", err)
	}
	classes, err := c.classes()
	if err != nil {
		return nil, fmt.Errorf("--%s: want %w", runtimeFlags["classes"], err)
	}
	devices, err := c.devices()
	if err != nil {
		return nil, fmt.Errorf("--%s: want %w", runtimeFlags["cdiDevices"], err)
	}
	init := filepath.Join(filepath.Dir(self), "stagecoach-init")
	r, err := container.Open(ctx, container.Config{Address: c.Address, Namespace: c.Namespace, Node: node, Init: init, Classes: classes, Devices: devices, Labels: labels, Log: log})
	if err != nil {
		return nil, err
	}
	if labels == nil {
		r.Sweep(ctx)
	}
	return r, nil
}

// watchdog returns the command of a node's watchdogs.
func (c RuntimeConfig) watchdog(node string) []string {
	if c.Name == runtimeProcess {
		return watchdogLine[:]
	}
	return slices.Concat(watchdogLine[:], c.arguments(node))
}

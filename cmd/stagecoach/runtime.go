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

	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// RuntimeConfig says in what the processes of functions run.
type RuntimeConfig struct {
	Name      string `yaml:"name"`      // process, containerd
	Address   string `yaml:"address"`   // path of containerd's socket
	Namespace string `yaml:"namespace"` // of containerd, in which the containers are
}

// The runtimes.
const (
	runtimeProcess    = "process"
	runtimeContainerd = "containerd"
)

func defaultRuntime() RuntimeConfig {
	return RuntimeConfig{Name: runtimeProcess, Address: container.Address, Namespace: container.Namespace}
}

// String names the runtime; empty: processes.
func (c RuntimeConfig) String() string {
	if c.Name != runtimeContainerd {
		return ""
	}
	return fmt.Sprintf("containers of containerd at %s, namespace %s", c.Address, c.Namespace)
}

// runtimeFlags has the flags of a RuntimeConfig's fields.
var runtimeFlags = map[string]string{"name": "runtime", "address": "containerd-address", "namespace": "containerd-namespace"}

func (c *RuntimeConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Name, runtimeFlags["name"], c.Name, "in what functions run: process or containerd")
	fs.StringVar(&c.Address, runtimeFlags["address"], c.Address, "path of containerd's socket")
	fs.StringVar(&c.Namespace, runtimeFlags["namespace"], c.Namespace, "namespace of containerd for the containers")
}

// nodeFlag is the flag of programs of the platform with the name of the node, which no other node
// of the machine has.
const nodeFlag = "node"

// arguments returns the flags of c and of the node for another program of the platform.
func (c RuntimeConfig) arguments(node string) []string {
	return []string{
		"--" + runtimeFlags["name"], c.Name, "--" + runtimeFlags["address"], c.Address, "--" + runtimeFlags["namespace"], c.Namespace, "--" + nodeFlag, node,
	}
}

// containerdNamespace matches the namespaces that containerd accepts.
var containerdNamespace = regexp.MustCompile(`^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$`)

// maxContainerdNamespace is the longest namespace that containerd accepts, in bytes.
const maxContainerdNamespace = 76

// validate reports the invalid fields.
func (c RuntimeConfig) validate(bad func(field string, got any, want string)) {
	if c.Name != runtimeProcess && c.Name != runtimeContainerd {
		bad("name", fmt.Sprintf("%q", c.Name), runtimeProcess+" or "+runtimeContainerd)
	}
	if !filepath.IsAbs(c.Address) {
		bad("address", fmt.Sprintf("%q", c.Address), "the absolute path of containerd's socket, such as "+container.Address)
	}
	if len(c.Namespace) > maxContainerdNamespace || !containerdNamespace.MatchString(c.Namespace) {
		bad("namespace", fmt.Sprintf("%q", c.Namespace), fmt.Sprintf("letters and digits, with single dots, dashes or underscores between, such as %s", container.Namespace))
	}
}

// open opens the runtime of a node, or of one of the node's watchdogs. labels are those of all
// containers of a watchdog; nil: it is the node's. The caller closes it.
func (c RuntimeConfig) open(ctx context.Context, node string, labels map[string]string, log *slog.Logger) (sandbox.Runtime, error) {
	if c.Name != runtimeContainerd {
		return sandbox.NewSpawner(), nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("runtime containerd: %w", err)
	}
	init := filepath.Join(filepath.Dir(self), "stagecoach-init")
	r, err := container.Open(ctx, container.Config{Address: c.Address, Namespace: c.Namespace, Node: node, Init: init, Labels: labels, Log: log})
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
	if c.Name != runtimeContainerd {
		return watchdogLine[:]
	}
	return slices.Concat(watchdogLine[:], c.arguments(node))
}

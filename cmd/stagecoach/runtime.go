package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// RuntimeConfig says in what the processes of functions run.
type RuntimeConfig struct {
	Name      string `yaml:"name"`      // process, containerd
	Address   string `yaml:"address"`   // path of containerd's socket
	Namespace string `yaml:"namespace"` // of containerd, in which the containers are
	// Snapshotter of containerd that unpacks images.
	Snapshotter string `yaml:"snapshotter"`
	// Folder with a hosts.toml per registry, for containerd's images.
	HostsDir string `yaml:"hostsDir"`
}

// The runtimes.
const (
	runtimeProcess    = "process"
	runtimeContainerd = "containerd"
)

func defaultRuntime() RuntimeConfig {
	return RuntimeConfig{Name: runtimeProcess, Address: container.Address, Namespace: container.Namespace, Snapshotter: contained.DefaultSnapshotter, HostsDir: contained.DefaultHostsDir}
}

// runtimeFlags has the flags of a RuntimeConfig's fields.
var runtimeFlags = map[string]string{"name": "runtime", "address": "containerd-address", "namespace": "containerd-namespace", "snapshotter": "containerd-snapshotter", "hostsDir": "containerd-hosts-dir"}

func (c *RuntimeConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Name, runtimeFlags["name"], c.Name, "in what functions run: process or containerd")
	fs.StringVar(&c.Address, runtimeFlags["address"], c.Address, "path of containerd's socket")
	fs.StringVar(&c.Namespace, runtimeFlags["namespace"], c.Namespace, "namespace of containerd for the containers")
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

// arguments returns the flags of c that a warden needs.
func (c RuntimeConfig) arguments() []string {
	return []string{"--" + runtimeFlags["name"], c.Name, "--" + runtimeFlags["address"], c.Address, "--" + runtimeFlags["namespace"], c.Namespace}
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
	if c.Snapshotter == "" {
		bad("snapshotter", `""`, "the name of one, such as "+contained.DefaultSnapshotter)
	}
	if len(c.Namespace) > maxContainerdNamespace || !containerdNamespace.MatchString(c.Namespace) {
		bad("namespace", fmt.Sprintf("%q", c.Namespace), fmt.Sprintf("letters and digits, with single dots, dashes or underscores between, such as %s", container.Namespace))
	}
}

// containers returns the configuration of containers for a node.
func (c RuntimeConfig) containers(node string) (container.Config, error) {
	self, err := os.Executable()
	if err != nil {
		return container.Config{}, fmt.Errorf("runtime containerd: %w", err)
	}
	return container.Config{Address: c.Address, Namespace: c.Namespace, Node: node, Init: filepath.Join(filepath.Dir(self), "stagecoach-init")}, nil
}

// open opens the runtime of a node, and removes what killed processes of the node have left. The
// caller closes it.
func (c RuntimeConfig) open(ctx context.Context, node string, log *slog.Logger) (sandbox.Runtime, error) {
	if c.Name != runtimeContainerd {
		return sandbox.NewSpawner(), nil
	}
	cfg, err := c.containers(node)
	if err != nil {
		return nil, err
	}
	cfg.Log = log
	r, err := container.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	r.Sweep(ctx)
	return r, nil
}

// forWatchdogs returns wire.EnvContainers of a node's watchdogs.
func (c RuntimeConfig) forWatchdogs(node string) (string, error) {
	if c.Name != runtimeContainerd {
		return "", nil
	}
	cfg, err := c.containers(node)
	if err != nil {
		return "", err
	}
	b, err := json.Marshal(cfg)
	return string(b), err
}

// runtimeOfWatchdog opens the runtime that a watchdog's environment names. The caller closes it.
func runtimeOfWatchdog(ctx context.Context) (sandbox.Runtime, error) {
	text := os.Getenv(wire.EnvContainers)
	if text == "" {
		return sandbox.NewSpawner(), nil
	}
	cfg := container.Config{Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return nil, fmt.Errorf("environment %s: %w", wire.EnvContainers, err)
	}
	cfg.Labels = map[string]string{sandbox.LabelFunction: os.Getenv(wire.EnvFunction), sandbox.LabelReplica: os.Getenv(wire.EnvReplica)}
	return container.Open(ctx, cfg)
}

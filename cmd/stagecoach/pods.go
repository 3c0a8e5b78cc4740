package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/pods"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// podsConfig says where a daemon makes pods of functions.
type podsConfig struct {
	api, image, machine, namespaces, folder, pullSecrets, tolerations, installation string
}

// flags returns the flags of c's fields.
func (c *podsConfig) flags() []struct {
	name, usage string
	to          *string
} {
	return []struct {
		name, usage string
		to          *string
	}{
		{"pod-api", "URL of Kubernetes' API server; default that of the cluster that this process is in", &c.api},
		{"pod-image", "image of Stagecoach, for pods of functions", &c.image},
		{"pod-machine", "name of this machine in Kubernetes", &c.machine},
		{"pod-namespaces", "namespaces of functions that are namespaces of Kubernetes, in which pods are made, with commas between", &c.namespaces},
		{"pod-folder", "folder in which the kubelet has the volumes of pods", &c.folder},
		{"pod-installation", "name of this release of Stagecoach, which no other one has in those namespaces", &c.installation},
		{"pod-tolerations", "tolerations of pods of functions, as a JSON array", &c.tolerations},
		{"pod-pull-secrets", "Secrets in those namespaces for registries, with commas between", &c.pullSecrets},
	}
}

func (c *podsConfig) addFlags(fs *flag.FlagSet) {
	for _, f := range c.flags() {
		fs.StringVar(f.to, f.name, *f.to, f.usage)
	}
}

// openLogs shows functions' lines to kubectl logs. It returns what takes the lines.
func (d *daemon) openLogs() func(replica, line string) {
	if d.cfg.runtime.Name != runtimePod {
		return func(string, string) {}
	}
	logs := pods.NewLogs(d.processOf)
	d.onClose(logs.Close)
	return logs.Add
}

// processOf returns the process of a replica; 0: none is known.
func (d *daemon) processOf(replica string) int {
	keys := d.adopted.Load()
	if keys == nil {
		return 0
	}
	for _, r := range keys.Inventory().Replicas {
		if r.Name == replica {
			return r.PID
		}
	}
	return 0
}

// is reports whether pods can be made.
func (c *podsConfig) is() bool { return c.image != "" && c.machine != "" && c.namespaces != "" }

// arguments returns the flags for another program of the platform.
func (c *podsConfig) arguments() (out []string) {
	for _, f := range c.flags() {
		if *f.to != "" {
			out = append(out, "--"+f.name, *f.to)
		}
	}
	return out
}

// openGroups returns what resizes pods.
func (c *podsConfig) openGroups(log *slog.Logger) (keysmanager.Groups, func(), error) {
	client, err := c.client()
	if err != nil {
		return nil, nil, fmt.Errorf("runtime pod: %w", err)
	}
	return podGroups{pods.NewGroups(pods.GroupsConfig{Cluster: client, Namespaces: parts(c.namespaces), Named: keyParts, Cores: runtime.NumCPU(), Log: log})}, func() {}, nil
}

// podGroups gives a KeysManager shares of pods in place of cgroups.
type podGroups struct{ *pods.Groups }

type podGroup struct{ *pods.Share }

// Create implements keysmanager.Groups.
func (g podGroups) Create(name, function string, l keysmanager.GroupLimits) (keysmanager.Group, error) {
	share, err := g.Groups.Create(name, function, pods.Limits{Memory: l.Memory, Watched: l.Platform > 0})
	if err != nil {
		return nil, err
	}
	return podGroup{share}, nil
}

// Adopt implements keysmanager.Groups. Pods end with the daemon, so there is nothing to adopt.
func (podGroups) Adopt(name string) (keysmanager.Group, error) {
	return nil, fmt.Errorf("group %s: pods do not outlive their daemon", name)
}

// Retain implements keysmanager.Groups.
func (podGroups) Retain([]string) error { return nil }

// Usage implements keysmanager.Group.
func (g podGroup) Usage() (keysmanager.GroupUsage, error) {
	u := g.Share.Usage()
	return keysmanager.GroupUsage{CPU: u.CPU, Memory: u.Memory}, nil
}

// client returns a client of the cluster, with the service account of this process's pod. A
// watchdog has no environment that names the API server.
func (c *podsConfig) client() (*kube.Client, error) {
	if c.api == "" {
		return kube.InPod()
	}
	return kube.New(c.api, kube.AccountFolder)
}

func keyParts(key string) (name, namespace string) {
	k := pipeline.ParseKey(key)
	return k.Name, k.Namespace
}

// open opens the runtime of a node, or of one of the node's watchdogs.
func (c *podsConfig) open(ctx context.Context, labels map[string]string, log *slog.Logger) (sandbox.Runtime, error) {
	client, err := c.client()
	if err != nil {
		return nil, fmt.Errorf("runtime pod: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("runtime pod: %w", err)
	}
	var tolerations []map[string]any
	if err := json.Unmarshal([]byte(cmp.Or(c.tolerations, "[]")), &tolerations); err != nil {
		return nil, fmt.Errorf("--pod-tolerations: %w, want a JSON array of objects", err)
	}
	r, err := pods.Open(pods.Config{
		Cluster: client, Machine: c.machine, Namespaces: parts(c.namespaces), Named: keyParts, Image: c.image, Init: filepath.Join(filepath.Dir(self), "stagecoach-init"),
		Folder: c.folder, Installation: c.installation, PullSecrets: parts(c.pullSecrets), Tolerations: tolerations, Labels: labels, Run: os.Getenv(pods.EnvRun), Log: log,
	})
	if err != nil {
		return nil, err
	}
	if labels == nil {
		r.Sweep(ctx)
	}
	return r, nil
}

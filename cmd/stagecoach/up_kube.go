package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/kubernetes"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// KubernetesConfig configures what a control plane in a pod keeps in Kubernetes.
type KubernetesConfig struct {
	// Namespaces of functions, which are namespaces of Kubernetes; empty: functions have nothing to
	// do with Kubernetes.
	Namespaces []string `yaml:"namespaces"`
	Secrets    bool     `yaml:"secrets"` // secrets of functions are Secrets
	Objects    bool     `yaml:"objects"` // each function has a ConfigMap, which owns its pods
	// Functions may only be in those of Namespaces that have the annotation openfaas: "1", and in
	// the default one.
	OptIn bool `yaml:"optIn"`
}

func (c *KubernetesConfig) addFlags(fs *flag.FlagSet) {
	fs.Func("kube-namespaces", "namespaces of Kubernetes that functions may be in, with commas between; functions may be in no others", func(list string) error {
		c.Namespaces = parts(list)
		return nil
	})
	fs.BoolVar(&c.Secrets, "kube-secrets", c.Secrets, "keep secrets of functions as Secrets of Kubernetes in --kube-namespaces, and not on the disk")
	fs.BoolVar(&c.Objects, "kube-objects", c.Objects, "keep a ConfigMap per function in --kube-namespaces, which owns the function's pods")
	fs.BoolVar(&c.OptIn, "kube-opt-in", c.OptIn, `let functions only into those of --kube-namespaces that have the annotation openfaas: "1"`)
}

var kubeNamespace = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// validate reports the invalid fields of kubernetes.
func (c *KubernetesConfig) validate(bad func(path string, got any, want string)) {
	for _, name := range c.Namespaces {
		if !kubeNamespace.MatchString(name) {
			bad("kubernetes.namespaces", fmt.Sprintf("%q", name), "names of namespaces")
		}
	}
	if len(c.Namespaces) > 0 {
		if !slices.Contains(c.Namespaces, pipeline.DefaultNamespace) {
			bad("kubernetes.namespaces", c.Namespaces, pipeline.DefaultNamespace+" too: functions are there by default")
		}
		return
	}
	for _, field := range []struct {
		path string
		set  bool
	}{{"secrets", c.Secrets}, {"objects", c.Objects}, {"optIn", c.OptIn}} {
		if field.set {
			bad("kubernetes."+field.path, true, "kubernetes.namespaces too")
		}
	}
}

// kubeParts are the parts of a control plane that use the API server of Kubernetes.
type kubeParts struct {
	client     *kube.Client
	namespaces *kubernetes.Namespaces // nil: functions may be in any namespace
	secrets    *kubernetes.Secrets    // nil: secrets are files
	objects    *kubernetes.Objects    // nil: there are none
}

// openKube connects to the API server, if anything is kept there.
func openKube(u *up) error {
	c := u.cfg.Kubernetes
	if len(c.Namespaces) == 0 {
		return nil
	}
	k := &u.leading.kube
	k.namespaces = kubernetes.NewNamespaces(c.Namespaces, pipeline.DefaultNamespace, u.log)
	u.onClose(func() error { k.namespaces.Close(); return nil })
	if !c.Secrets && !c.Objects && !c.OptIn {
		return nil
	}
	var err error
	if k.client, err = kube.InPod(); err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	if c.OptIn {
		k.namespaces.Follow(k.client)
	}
	return nil
}

// outside returns the namespaces for the provider.
func (k *kubeParts) outside() provider.Outside {
	if k.namespaces == nil {
		return nil
	}
	return k.namespaces
}

// openKubeSecrets opens the copies of the secrets of Kubernetes, in a folder in memory, and reads
// all secrets.
func openKubeSecrets(ctx context.Context, u *up) error {
	folder, err := kubeSecretsFolder(u)
	if err != nil {
		return fmt.Errorf("kubernetes.secrets: %w", err)
	}
	if u.accounts.open == nil {
		u.secrets, err = secret.Open(folder)
	} else {
		u.secrets, err = secret.OpenShared(folder, filepath.Join(folder, "shared"), u.secretsGroup)
	}
	if err != nil {
		return err
	}
	if left, _ := fs.Glob(os.DirFS(u.cfg.State), "secrets/*/*"); len(left) > 0 {
		u.log.Warn("secrets of an earlier start are on the disk, and are not used: create them again as Secrets of Kubernetes (faas-cli secret create), and remove the folder",
			"folder", filepath.Join(u.cfg.State, "secrets"), "secrets", len(left))
	}
	k := &u.leading.kube
	k.secrets = kubernetes.OpenSecrets(ctx, kubernetes.SecretsConfig{Cluster: k.client, Namespaces: u.cfg.Kubernetes.Namespaces, Copies: u.secrets, Log: u.log})
	return nil
}

// kubeSecretsFolder makes the folder for copies of secrets. It warns if the folder is on a disk.
func kubeSecretsFolder(u *up) (string, error) {
	state, err := filepath.Abs(u.cfg.State)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(state))
	folder := filepath.Join(sandbox.RunFolder, "kube-"+hex.EncodeToString(sum[:8]))
	if err := os.MkdirAll(sandbox.RunFolder, 0o755); err != nil {
		return "", fmt.Errorf("%w; want a folder in memory, that this process can write to", err)
	}
	if err := os.Mkdir(folder, 0o700); err != nil && !os.IsExist(err) {
		return "", err
	}
	var is unix.Statfs_t
	if err := unix.Statfs(folder, &is); err != nil {
		return "", err
	}
	if is.Type != unix.TMPFS_MAGIC && is.Type != unix.RAMFS_MAGIC {
		u.log.Warn("copies of secrets are on a disk, want a folder in memory", "folder", folder)
	}
	return folder, nil
}

// followKube begins to follow changes in Kubernetes.
func followKube(u *up) {
	k := &u.leading.kube
	if k.secrets != nil {
		k.secrets.Follow(func(namespace, name string) { showSecret(u, namespace, name) })
		u.onClose(func() error { k.secrets.Close(); return nil })
	}
	if !u.cfg.Kubernetes.Objects {
		return
	}
	identity := "alone" // without an authority, no other control plane shares the functions
	if u.nodes.authority != nil {
		identity = u.nodes.authority.Source().Me().Cluster
	}
	k.objects = kubernetes.NewObjects(kubernetes.ObjectsConfig{
		Cluster: k.client, Namespaces: u.cfg.Kubernetes.Namespaces, Identity: identity, Log: u.log,
		Spec: func(key pipeline.Key) (string, bool) { return specText(u.registry.Function(key)) },
		Functions: func() (keys []pipeline.Key) {
			for _, f := range u.registry.Functions() {
				keys = append(keys, f.Key)
			}
			return keys
		},
		Acts: func() bool { _, err := u.leading.epoch(); return err == nil },
		Busy: func(key pipeline.Key) bool { return len(u.local.Replicas(key)) > 0 },
	})
}

// specText returns a function as JSON, in the form of the API.
func specText(f provider.Deployed, deployed bool) (string, bool) {
	if !deployed {
		return "", false
	}
	b, err := json.MarshalIndent(f.Answer(), "", "  ")
	return string(b) + "\n", err == nil
}

// startObjects keeps the objects of functions until stop is called. Only the leader does this.
func (k *kubeParts) startObjects() (stop func()) {
	if k.objects == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { k.objects.Run(ctx) })
	return func() { cancel(); running.Wait() }
}

// deployed notes that a function was deployed or removed.
func (k *kubeParts) deployed(key pipeline.Key) {
	if k.objects != nil {
		k.objects.Deployed(key)
	}
}

// explain returns why a function would start without its secrets. While the API server has not
// listed the secrets, nobody needs to create them again.
func (k *kubeParts) explain(spec node.Spec, err error) error {
	if k.secrets == nil {
		return err
	}
	if _, unlisted := k.secrets.List(spec.Namespace); unlisted != nil {
		return unlisted
	}
	return err
}

// objectTimeout bounds how long a start waits for the function's ConfigMap.
const objectTimeout = 2 * time.Second

// before returns what is checked before each start on a daemon. The ConfigMap of a new function is
// made first, because it owns the function's pods. If it cannot be made, they have no owner.
func (k *kubeParts) before(check func(node.Spec) error) func(node.Spec) error {
	return func(spec node.Spec) error {
		if err := check(spec); err != nil {
			return k.explain(spec, err)
		}
		if k.objects == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), objectTimeout)
		defer cancel()
		k.objects.Await(ctx, pipeline.ParseKey(spec.Function))
		return nil
	}
}

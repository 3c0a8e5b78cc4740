package kubetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// loadStack has the functions that the load calls, and one for a burst.
const loadStack = `
version: 1.0
provider: {name: openfaas}
functions:
  noop: {image: stagecoach/noop:0.1.0, labels: {com.openfaas.scale.min: "3", com.openfaas.scale.max: "3"}}
  hold:
    image: stagecoach/wait:0.1.0
    labels: {com.openfaas.scale.min: "6", com.openfaas.scale.max: "6"} # as holds says
    environment: {wait_mean: 20ms}
  burst:
    image: stagecoach/wait:0.1.0
    labels: {com.openfaas.scale.min: "0", com.openfaas.scale.max: "20", com.openfaas.scale.zero: "true"}
    environment: {wait_mean: 1ms, STAGECOACH_MODEL: model/rec.onnx}
`

// holds is how many replicas the function hold has.
const holds = 6

// TestLoad changes a cluster while requests come: it drains a machine, deletes pods and rolls all
// of them. No request may fail that a client tries twice, and no async request may be lost.
func TestLoad(t *testing.T) { underLoad(t, "process") }

// TestLoadInPods is TestLoad with functions in pods of their own. Some of these are evicted and
// deleted, too.
func TestLoadInPods(t *testing.T) { underLoad(t, "pod") }

func underLoad(t *testing.T, runtime string) {
	if os.Getenv("STAGECOACH_KUBERNETES_TEST") == "" {
		t.Skip("make test-kubernetes runs it")
	}
	c := Start(t, Options{Nodes: 3})
	volumes(c, 6)
	c.Kubectl("create", "namespace", "openfaas-fn")
	c.Kubectl("label", "namespace", "openfaas-fn", "pod-security.kubernetes.io/enforce=restricted")
	i := install(t, c, "--set", "keysManager.runtime="+runtime, "--set", "keysManager.ort="+ortPath, "--set", "keysManager.drain=40s,gateway.replicas=3,gateway.persistence.enabled=true,gateway.persistence.storageClass=shared,nats.persistence.enabled=true,nats.persistence.storageClass=shared")
	for _, name := range []string{"noop", "wait", "ocr-detect", "ocr-recognise", "ocr-text"} {
		i.stage(name)
	}
	i.deploy(loadStack)
	c.Took("functions")
	i.ocr(t)
	c.Took("OCR pipeline")
	i.burst(t)
	c.Took("burst")
	i.cordons(t)
	c.Took("cordons")
	back := serveCallbacks(t, c)
	t.Log("| while | time | requests | failed | tried again | p50 | p99 | longest | async | lost | twice |")
	t.Log("|---|---|---|---|---|---|---|---|---|---|---|")
	i.under(t, "nothing else happens", 2000, back, func() {})
	c.Took("load alone")
	i.under(t, "a machine is drained", 10000, back, func() { i.drain() })
	c.Took("load and a drain")
	i.under(t, "a pod of each kind is deleted", 2000, back, func() {
		begun := time.Now()
		i.deletePod("keysmanager", 3)
		if least := i.least("hold", holds, begun); least < holds {
			t.Errorf("%d of %d replicas were ready while a daemon ended, want replacements first", least, holds)
		}
		i.deletePod("control", 3)
		if runtime == "pod" {
			i.deleteFunctionPod("hold")
		}
		i.deletePod("nats", 3)
	})
	c.Took("load and deleted pods")
	i.under(t, "all pods are replaced", 10000, back, func() {
		c.Helm("upgrade", "y", "../../charts/stagecoach", "-n", "faas", "--reuse-values", "--set", "gateway.logLevel=debug,keysManager.logLevel=debug", "--wait", "--timeout", "5m")
	})
	c.Took("load and an upgrade")
	i.uninstall()
	c.Took("helm uninstall")
}

// volumes makes volumes that all nodes can mount, because they share this machine's disk.
func volumes(c *Cluster, n int) {
	c.t.Helper()
	var all strings.Builder
	for k := range n {
		path := filepath.Join(c.dir, fmt.Sprint("volume-", k))
		//nolint:gosec // pods choose their user
		if err := errors.Join(os.Mkdir(path, 0o700), os.Chmod(path, 0o777)); err != nil {
			c.t.Fatal(err)
		}
		fmt.Fprintf(&all, `---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: volume-%d}, spec: {capacity: {storage: 10Gi}, accessModes: [ReadWriteOnce],
storageClassName: shared, persistentVolumeReclaimPolicy: Retain, hostPath: {path: %q}}}
`, k, path)
	}
	c.Apply(all.String())
}

// stage pushes one of the built stages.
func (i *installed) stage(name string) {
	i.t.Helper()
	dir, files := proctest.Built(i.t, "images", "stagecoach", name, "0.1.0"), map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			files[strings.TrimPrefix(path, dir)] = path
		}
		return err
	})
	if err != nil {
		i.t.Fatal(err)
	}
	i.Stage("stagecoach/"+name+":0.1.0", files)
}

// deploy deploys the functions of a stack file, with the images of the cluster's registry.
func (i *installed) deploy(stack string) {
	i.t.Helper()
	path := filepath.Join(i.dir, "stack.yml")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(stack, "image: stagecoach/", "image: "+i.Registry+"/stagecoach/")), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.t.Log(i.stagecoach("deploy", "-f", path, "--wait"))
}

// drain drains the machine on which the control plane runs that leads, and opens it again.
func (i *installed) drain() {
	i.t.Helper()
	leader := ""
	for line := range strings.Lines(i.stagecoach("node", "list")) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "leads" {
			leader = f[0]
		}
	}
	machine := i.Kubectl("get", "pod", leader, "-n", "faas", "-o", "jsonpath={.spec.nodeName}")
	i.t.Log(i.Kubectl("drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=3m"))
	i.awaitNode(machine, "drained: its machine is cordoned")
	i.Kubectl("uncordon", machine)
	i.awaitNode(machine, "ready")
}

// deleteFunctionPod deletes a pod of a function, and waits for the next one.
func (i *installed) deleteFunctionPod(function string) {
	i.t.Helper()
	pods := func() []string {
		return strings.Fields(i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "faas_function="+function, "-o", "jsonpath={.items[*].metadata.name}"))
	}
	first := pods()[0]
	i.Kubectl("delete", "pod", first, "-n", "openfaas-fn")
	i.Await("a pod of "+function+" in place of "+first, func() (string, bool) {
		_, ready := i.replicas(function)
		return fmt.Sprint(pods(), ready), ready == holds
	})
}

// deletePod deletes a pod of a component, and waits for the next one.
func (i *installed) deletePod(component string, n int) {
	i.t.Helper()
	selector := "app.kubernetes.io/component=" + component
	pods := strings.Fields(i.Kubectl("get", "pods", "-n", "faas", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}"))
	if len(pods) != n {
		i.t.Fatalf("pods of %s: %v, want %d", component, pods, n)
	}
	i.Kubectl("delete", "pod", pods[0], "-n", "faas")
	i.AwaitPods("faas", selector, n)
}

package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// resize changes the limits of a running pod, first of CPU and then of memory.
func (e echo) resize(t *testing.T) {
	e.Cluster = e.In(t)
	e.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: small, labels: {app: small}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: %s/pod:1
    resources: {requests: {cpu: 100m, memory: 32Mi}, limits: {cpu: 100m, memory: 32Mi}}
`, e.Registry))
	e.AwaitPods("default", "app=small", 1)
	for _, step := range []struct{ what, cpu, memory, file, want string }{
		{"more CPU", "300m", "32Mi", "cpu.cfs_quota_us", "30000"},
		{"more memory", "300m", "96Mi", "memory.limit_in_bytes", fmt.Sprint(96 << 20)},
		{"less memory", "300m", "48Mi", "memory.limit_in_bytes", fmt.Sprint(48 << 20)},
		{"less CPU", "50m", "48Mi", "cpu.cfs_quota_us", "5000"},
	} {
		size := fmt.Sprintf("{cpu: %s, memory: %s}", step.cpu, step.memory)
		e.Took("before the resize")
		e.Kubectl("patch", "pod", "small", "--subresource", "resize", "-p", fmt.Sprintf("spec: {containers: [{name: c, resources: {requests: %s, limits: %s}}]}", size, size))
		e.Await(step.what, func() (string, bool) {
			got := e.group("small", step.file)
			return got + "\n" + e.list("pod", "{.status.conditions} {.status.containerStatuses}", "small"), got == step.want
		})
		e.Took(step.what)
	}
	if n := e.list("pod", "{.status.containerStatuses[0].restartCount}", "small"); n != "0" {
		t.Errorf("%s restarts, want none", n)
	}
	// More than the node has: the API server refuses it at once.
	_, err := e.Try("", "kubectl", "patch", "pod", "small", "--subresource", "resize", "-p", "spec: {containers: [{name: c, resources: {requests: {cpu: 999}, limits: {cpu: 999}}}]}")
	if err == nil || !strings.Contains(err.Error(), "node didn't have enough allocatable resources: cpu") {
		t.Errorf("a resize beyond the node: %v", err)
	}
	t.Logf("a resize beyond the node: %v", err)
	e.Took("a resize that is refused")
}

// group reads a file of a pod's container's cgroup. Names are of cgroup v1.
func (e echo) group(pod, file string) string {
	id := e.list("pod", "{.status.containerStatuses[0].containerID}", pod)
	id = id[strings.LastIndexByte(id, '/')+1:]
	controller, _, _ := strings.Cut(file, ".")
	all, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", controller, e.cgroups, "node-*/kubepods*/pod*", id, file))
	more, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", controller, e.cgroups, "node-*/kubepods*/*/pod*", id, file))
	for _, path := range append(all, more...) {
		b, err := os.ReadFile(path)
		if err == nil {
			return strings.TrimSpace(string(b))
		}
	}
	return "no " + file + " of " + id
}

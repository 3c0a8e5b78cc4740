package kubetest

import (
	"fmt"
	"path/filepath"
	"strings"
)

// FakeTaint is the key of the taint of fake nodes, which keeps pods off that do not tolerate it.
const FakeTaint = "stagecoach.test/fake"

// startFake makes nodes named fake-0, fake-1, …, and waits until they are Ready.
func (c *Cluster) startFake(n int) {
	c.t.Helper()
	c.run(c.net.Clients, filepath.Join(c.dir, "fake"), `"$BIN/kwok" --kubeconfig="$KUBECONFIG" --config="$BIN/stages.yaml" --manage-all-nodes=false \
  --manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake --node-lease-duration-seconds=40 --server-address= >kwok.log 2>&1 &
wait`, "KUBECONFIG="+c.Kubeconfig)
	var nodes strings.Builder
	for i := range n {
		fmt.Fprintf(&nodes, `---
apiVersion: v1
kind: Node
metadata:
  name: fake-%d
  annotations: {kwok.x-k8s.io/node: fake}
  labels: {type: fake, kubernetes.io/hostname: fake-%d, kubernetes.io/os: linux}
spec:
  taints: [{key: %s, effect: NoSchedule}]
status:
  allocatable: {cpu: 8, memory: 32Gi, pods: 110}
  capacity: {cpu: 8, memory: 32Gi, pods: 110}
`, i, i, FakeTaint)
	}
	c.Apply(nodes.String())
	c.Await(fmt.Sprintf("%d fake nodes to be Ready", n), func() (string, bool) {
		out := c.list("nodes", `{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`, "-l", "type=fake")
		return out, strings.Count(out, " True\n") == n
	})
}

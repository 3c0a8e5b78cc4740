package kubetest

import (
	"fmt"
	"strings"
	"testing"
)

// awaitNode waits until `stagecoach node list` shows the node of a machine with a status. It
// returns the node's name.
func (i *installed) awaitNode(machine, status string) (name string) {
	i.t.Helper()
	i.Await(fmt.Sprintf("the node of %s to be %q", machine, status), func() (string, bool) {
		out, err := i.try("node", "list")
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); err == nil && strings.HasPrefix(line, machine+"-") && strings.Contains(line, "daemon  "+status+"  ") {
				name = f[0]
				return out, true
			}
		}
		return out, false
	})
	return name
}

// cordons closes a machine by a cordon and by a taint. What Kubernetes and an operator say about a
// node is independent.
func (i *installed) cordons(t *testing.T) {
	t.Helper()
	const machine, cordoned = "node-1", "drained: its machine is cordoned"
	i.Kubectl("cordon", machine)
	node := i.awaitNode(machine, cordoned)
	if out, err := i.try("node", "uncordon", node); err == nil || !strings.Contains(out, "kubectl uncordon "+machine) {
		t.Errorf("uncordon of a node whose machine is cordoned: %v, %s", err, out)
	}
	if out := i.stagecoach("node", "describe", node); !strings.Contains(out, cordoned) {
		t.Errorf("describe: %s", out)
	}
	i.stagecoach("node", "drain", node)
	i.Kubectl("uncordon", machine)
	i.awaitNode(machine, "drained") // by the operator
	i.Kubectl("taint", "node", machine, "ToBeDeletedByClusterAutoscaler=1:NoSchedule")
	i.awaitNode(machine, "drained: its machine has the taint ToBeDeletedByClusterAutoscaler")
	if out, err := i.try("node", "uncordon", node); err == nil || !strings.Contains(out, "ToBeDeletedByClusterAutoscaler") {
		t.Errorf("uncordon of a node whose machine has a taint: %v, %s", err, out)
	}
	i.Kubectl("taint", "node", machine, "ToBeDeletedByClusterAutoscaler-")
	i.awaitNode(machine, "ready")
}

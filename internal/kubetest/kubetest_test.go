package kubetest

import (
	"os"
	"testing"
)

func TestCluster(t *testing.T) {
	if os.Getenv("STAGECOACH_KUBERNETES_TEST") == "" {
		t.Skip("make test-kubernetes runs it")
	}
	c := Start(t, Options{Nodes: 3})
	t.Log(c.Kubectl("get", "pods,nodes,svc", "-A", "-o", "wide"))
}

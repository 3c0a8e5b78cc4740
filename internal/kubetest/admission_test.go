package kubetest

import (
	"fmt"
	"strings"
	"testing"
)

// foreign is a pod of a function, as a daemon makes them. %s are the machine in its label, that in
// its affinity, and more of its spec.
const foreign = `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "foreign", "labels": {"stagecoach.dev/machine": %q, "stagecoach.dev/installation": "y.faas"}},
  "spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
      {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [%q]}]}]}}}, %s
    "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "c", "image": "none", "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]}}`

// daemonsReachOwnMachine uses the credentials of a daemon for pods of its machine, and of another.
func (i *installed) daemonsReachOwnMachine(t *testing.T) {
	i.Cluster = i.In(t)
	daemon := strings.Fields(i.Kubectl("get", "pods", "-n", "faas", "-l", "app.kubernetes.io/component=keysmanager", "-o", "jsonpath={.items[0].metadata.name} {.items[0].spec.nodeName} {.items[1].spec.nodeName}"))
	token := i.Kubectl("create", "token", "y-keysmanager", "-n", "faas", "--bound-object-kind", "Pod", "--bound-object-name", daemon[0])
	own, other := daemon[1], daemon[2]
	i.Kubectl("create", "serviceaccount", "other", "-n", "openfaas-fn")
	as := func(stdin string, args ...string) error {
		_, err := i.Try(stdin, "kubectl", append([]string{"--token", token, "-n", "openfaas-fn"}, args...)...)
		return err
	}
	for what, c := range map[string]struct{ pod, want string }{
		"another machine's label":    {fmt.Sprintf(foreign, other, own, ""), "the pod is of machine " + other},
		"another machine's affinity": {fmt.Sprintf(foreign, own, other, ""), "the daemon's machine alone"},
		"a service account":          {fmt.Sprintf(foreign, own, own, `"serviceAccountName": "other",`), "without a service account"},
		"a Secret's volume":          {fmt.Sprintf(foreign, own, own, `"volumes": [{"name": "v", "secret": {"secretName": "other"}}],`), "without volumes of Secrets"},
		"its own machine":            {fmt.Sprintf(foreign, own, own, ""), ""},
	} {
		err := as(c.pod, "create", "--dry-run=server", "-f", "-")
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("a pod with %s: %v, want %q", what, err, c.want)
		}
	}
	for machine, want := range map[string]string{own: "", other: "the pod is of machine " + other} {
		pod := i.Kubectl("get", "pods", "-n", "openfaas-fn", "-l", "stagecoach.dev/machine="+machine, "-o", "jsonpath={.items[0].metadata.name}")
		err := as("", "delete", "pod", pod, "--dry-run=server")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("the deletion of a pod on %s: %v, want %q", machine, err, want)
		}
	}
	i.Took("what a daemon may do with pods")
}

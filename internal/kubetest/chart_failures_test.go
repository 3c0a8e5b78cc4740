package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// failing is a cluster in which installations fail, and the page that explains the failures.
type failing struct {
	*Cluster
	values string
	page   string
}

// explained checks that text has a message, and that the page has it, too.
func (f failing) explained(what, text, message string) {
	f.t.Helper()
	if !strings.Contains(text, message) {
		f.t.Errorf("%s: %s, want %q", what, text, message)
	}
	if !strings.Contains(f.page, message) {
		f.t.Errorf("docs/kubernetes-failures.md lacks %q", message)
	}
}

// install installs the chart in a namespace of the release's name.
func (f failing) install(name string, args ...string) {
	f.t.Helper()
	f.Helm(append([]string{"install", name, "../../charts/stagecoach", "-n", name, "-f", f.values}, args...)...)
}

// sees waits for a message of an event or of a container's state in a namespace.
func (f failing) sees(namespace, message string) {
	f.t.Helper()
	var seen string
	f.Await(message, func() (string, bool) {
		seen = f.list("events", `{range .items[*]}{.involvedObject.kind} {.reason}: {.message}{"\n"}{end}`, "-n", namespace) +
			f.list("pods", `{range .items[*]}{.metadata.name} {.status}{"\n"}{end}`, "-n", namespace)
		return seen, strings.Contains(seen, message)
	})
	f.explained(namespace, seen, message)
}

// TestChartFailures makes the failures that docs/kubernetes-failures.md explains, and compares the
// messages.
func TestChartFailures(t *testing.T) {
	if os.Getenv("STAGECOACH_KUBERNETES_TEST") == "" {
		t.Skip("make test-kubernetes runs it")
	}
	page, err := os.ReadFile("../../docs/kubernetes-failures.md")
	if err != nil {
		t.Fatal(err)
	}
	c := Start(t, Options{Nodes: 1})
	dir := t.TempDir()
	image := images(t, c, dir)
	nats := c.Image("nats:1", map[string]string{"/nats-server": program(t, dir, "nats-server", "github.com/nats-io/nats-server/v2")}, "/nats-server")
	f := failing{Cluster: c, page: string(page), values: filepath.Join(dir, "values.yaml")}
	if err := os.WriteFile(f.values, fmt.Appendf(nil, chartValues+"antiAffinity: none\n", image, nats, c.Registry), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Took("images")
	f.refused()
	c.Took("values that are refused")
	for _, name := range []string{"pull", "pending", "quota", "strict", "crash"} {
		c.Kubectl("create", "namespace", name)
	}
	c.Kubectl("create", "quota", "small", "-n", "quota", "--hard=requests.memory=200Mi")
	c.Kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
	f.install("pull", "--set", "image.tag=none")
	f.install("pending", "--set", "gateway.persistence.enabled=true,nats.resources.requests.cpu=999")
	f.install("quota")
	f.install("strict")
	f.install("crash", "--set", "gateway.config.journl=1")
	f.sees("pull", "Back-off pulling image")
	f.sees("pull", "ImagePullBackOff")
	f.sees("pending", "pod has unbound immediate PersistentVolumeClaims")
	f.sees("pending", "no persistent volumes available for this claim and no storage class is set")
	f.sees("pending", "Insufficient cpu")
	f.sees("quota", "exceeded quota: small, requested: requests.memory=256Mi")
	f.sees("strict", `violates PodSecurity "restricted:latest"`)
	f.sees("crash", "references non-existent secret key: token")
	f.sees("crash", "CrashLoopBackOff")
	log := ""
	c.Await("the cause in the log", func() (string, bool) {
		// The kubelet keeps the log of the latest container that has ended.
		for _, of := range []string{"--previous=true", "--previous=false"} {
			log, err = c.Try("", "kubectl", "logs", "-n", "crash", "crash-control-0", of)
			if err == nil && strings.Contains(log, "field journl") {
				return log, true
			}
		}
		return log, false
	})
	f.explained("log", log, "field journl not found")
	c.Took("installations that fail")
	_, err = c.Try("", "helm", "install", "second", "../../charts/stagecoach", "-n", "crash", "-f", f.values)
	f.explained("a second release in a namespace", fmt.Sprint(err), "exists and cannot be imported into the current release")
	f.rights("crash")
	c.Took("rights")
}

// refused installs with values and in places that are refused.
func (f failing) refused() {
	for message, args := range map[string][]string{
		`namespaces "none" not found`:                                                          {"install", "-n", "none"},
		"at '/gateway/replicas': got string, want integer":                                     {"install", "--set-string", "gateway.replicas=2"},
		"at '/functionNamespace': value must be 'openfaas-fn'":                                 {"install", "--set", "functionNamespace=mine"},
		"additional properties 'gatway' not allowed":                                           {"install", "--set", "gatway.replicas=2"},
		"chart requires kubeVersion: >=1.30.0-0 which is incompatible with Kubernetes v1.29.0": {"template", "--kube-version", "1.29.0"},
	} {
		out, err := f.Try("", "helm", append(args, "y", "../../charts/stagecoach", "-f", f.values)...)
		f.explained(fmt.Sprint(args), out+fmt.Sprint(err), message)
	}
}

// rights takes each verb away that the chart's Role has, and checks that control planes have no
// others.
func (f failing) rights(release string) {
	as := []string{"-n", release, "--as=system:serviceaccount:" + release + ":" + release + "-control"}
	secret := release + "-join"
	verbs := strings.Fields(f.Kubectl("get", "role", release+"-control", "-n", release, "-o", "jsonpath={.rules[*].verbs[*]}"))
	use := map[string][]string{
		"get":   {"get", "secret", secret},
		"patch": {"patch", "secret", secret, "--type=merge", "-p", `{"stringData":{"token":"x"}}`},
	}
	if len(verbs) != len(use) {
		f.t.Errorf("verbs of the Role: %v, want get and patch", verbs)
	}
	for _, verb := range verbs {
		if _, err := f.Try("", "kubectl", append(use[verb], as...)...); err != nil {
			f.t.Errorf("with all verbs: %v", err)
		}
		others := slices.DeleteFunc(slices.Clone(verbs), func(v string) bool { return v == verb })
		set := func(verbs []string) {
			f.Kubectl("patch", "role", release+"-control", "-n", release, "--type=json", "-p", fmt.Sprintf(`[{"op":"replace","path":"/rules/0/verbs","value":["%s"]}]`, strings.Join(verbs, `","`)))
		}
		set(others)
		f.Await("the right to be gone", func() (string, bool) {
			out, err := f.Try("", "kubectl", append(use[verb], as...)...)
			return out + fmt.Sprint(err), err != nil
		})
		_, err := f.Try("", "kubectl", append(use[verb], as...)...)
		f.explained("without "+verb, fmt.Sprint(err), fmt.Sprintf("cannot %s resource \"secrets\"", verb))
		set(verbs)
		f.Await("the right to be back", func() (string, bool) {
			out, err := f.Try("", "kubectl", append(use[verb], as...)...)
			return out + fmt.Sprint(err), err == nil
		})
	}
	for _, no := range [][]string{{"list", "secrets"}, {"create", "secrets"}, {"get", "secret/basic-auth"}, {"delete", "secret/" + secret}, {"list", "pods"}} {
		out, _ := f.Try("", "kubectl", append(append([]string{"auth", "can-i"}, no...), as...)...)
		if strings.TrimSpace(out) != "no" {
			f.t.Errorf("a control plane may %v: %s", no, out)
		}
	}
	for _, account := range []string{"keysmanager", "nats"} {
		out, _ := f.Try("", "kubectl", "auth", "can-i", "get", "secret/"+secret, "-n", release, "--as=system:serviceaccount:"+release+":"+release+"-"+account)
		if strings.TrimSpace(out) != "no" {
			f.t.Errorf("%s may read the join token over the API: %s", account, out)
		}
	}
}

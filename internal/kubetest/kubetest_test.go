package kubetest

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

func gate(t *testing.T) {
	t.Helper()
	if os.Getenv("STAGECOACH_KUBERNETES_TEST") == "" {
		t.Skip("make test-kubernetes runs it")
	}
}

const echoObjects = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: echo}
spec:
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: echo
        image: IMAGE
        args: [serve, ":8080"]
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec: {selector: {app: echo}, ports: [{port: 80, targetPort: 8080}]}
`

// echo is the cluster with a pod per node that answers with its name.
type echo struct {
	*Cluster
	pods []string // sorted
	ips  map[string]string
}

// get requests a URL from a pod.
func (e echo) get(pod, url string) string {
	e.t.Helper()
	return e.Kubectl("exec", pod, "--", "/pod", "get", url)
}

func TestCluster(t *testing.T) {
	gate(t)
	c := Start(t, Options{Nodes: 3, Fake: 24})
	// Only the registry has this image.
	image := c.Image("echo:1", map[string]string{"/pod": filepath.Join(c.dir, "pod")}, "/pod")
	c.Apply(strings.ReplaceAll(echoObjects, "IMAGE", image))
	c.AwaitPods("default", "app=echo", 3)
	e := echo{Cluster: c, ips: map[string]string{}}
	for line := range strings.Lines(c.list("pods", `{range .items[*]}{.metadata.name} {.status.podIP} {.spec.nodeName}{"\n"}{end}`, "-l", "app=echo")) {
		var pod, ip, node string
		if _, err := fmt.Sscan(line, &pod, &ip, &node); err != nil {
			t.Fatal(err)
		}
		e.pods, e.ips[pod] = append(e.pods, pod), ip
	}
	slices.Sort(e.pods)
	c.Took("three pods with an image from the registry")
	t.Run("pods", e.reachEachOther)
	t.Run("service", e.reachService)
	t.Run("helm", e.installChart)
	t.Run("policy", e.policyIsNotEnforced)
	t.Run("resize", e.resize)
	t.Run("fake", e.fakeNodes)
	t.Run("kill", e.killNode)
}

func (e echo) reachEachOther(t *testing.T) {
	e.Cluster = e.In(t)
	for _, from := range e.pods {
		for _, to := range e.pods {
			if got := e.get(from, "http://"+e.ips[to]+":8080/"); got != to {
				t.Errorf("from %s, %s (%s) answers %q", from, to, e.ips[to], got)
			}
		}
	}
	e.Took("pods reach each other")
}

func (e echo) reachService(t *testing.T) {
	e.Cluster = e.In(t)
	ip := e.list("service", "{.spec.clusterIP}", "echo")
	for _, host := range []string{ip, "echo", "echo.default.svc.cluster.local"} {
		seen := map[string]bool{}
		for _, from := range e.pods {
			got := e.get(from, "http://"+host+"/")
			if !slices.Contains(e.pods, got) {
				t.Errorf("from %s, %s answers %q, want one of %q", from, host, got, e.pods)
			}
			seen[got] = true
		}
		t.Logf("%s: %d of 3 pods answered", host, len(seen))
	}
	way := &http.Transport{DialContext: e.Dial, DisableKeepAlives: true}
	seen := map[string]bool{}
	e.Await("all pods to answer for the service", func() (string, bool) {
		r, err := (&http.Client{Transport: way}).Get("http://" + ip + "/")
		if err != nil {
			return err.Error(), false
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		seen[string(b)] = true
		return fmt.Sprint(seen, err), len(seen) == len(e.pods)
	})
	e.Took("a Service by address and by name")
}

func (e echo) installChart(t *testing.T) {
	e.Cluster = e.In(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "Chart.yaml"), "{apiVersion: v2, name: small, version: 0.1.0}\n")
	write(t, filepath.Join(dir, "templates", "map.yaml"),
		`{apiVersion: v1, kind: ConfigMap, metadata: {name: "{{ .Release.Name }}"}, data: {of: "{{ .Release.Namespace }}"}}`)
	e.Helm("install", "try", dir, "--wait", "--create-namespace", "--namespace", "charts")
	if got := e.Kubectl("get", "configmap", "try", "-n", "charts", "-o", "jsonpath={.data.of}"); got != "charts" {
		t.Errorf("the chart's object has %q", got)
	}
	e.Helm("uninstall", "try", "--wait", "--namespace", "charts")
	if got := e.Kubectl("get", "configmap", "try", "-n", "charts", "--ignore-not-found"); got != "" {
		t.Errorf("after the uninstall: %s", got)
	}
	e.Took("a chart is installed and uninstalled")
}

// policyIsNotEnforced shows what tests with this cluster cannot show.
func (e echo) policyIsNotEnforced(t *testing.T) {
	e.Cluster = e.In(t)
	e.Apply(`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: nobody}, spec: {podSelector: {}, policyTypes: [Ingress, Egress]}}`)
	if got := e.get(e.pods[0], "http://"+e.ips[e.pods[1]]+":8080/"); got != e.pods[1] {
		t.Errorf("got %q", got)
	}
	e.Kubectl("delete", "networkpolicy", "nobody")
	t.Log("a NetworkPolicy that forbids all is not enforced")
	e.Took("a NetworkPolicy")
}

func (e echo) fakeNodes(t *testing.T) {
	e.Cluster = e.In(t)
	e.Apply(fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: many}
spec:
  replicas: 200
  selector: {matchLabels: {app: many}}
  template:
    metadata: {labels: {app: many}}
    spec:
      nodeSelector: {type: fake}
      tolerations: [{key: %s, operator: Exists}]
      containers: [{name: c, image: none, resources: {requests: {cpu: 500m}}}]
`, FakeTaint))
	e.AwaitPods("default", "app=many", 200)
	e.Took("200 pods on 24 fake nodes")
	e.Kubectl("delete", "deployment", "many")
}

func (e echo) killNode(t *testing.T) {
	e.Cluster = e.In(t)
	e.Nodes[2].Kill()
	e.Await("the killed node not to be Ready", func() (string, bool) {
		s := e.list("node", `{.status.conditions[?(@.type=="Ready")].status}`, e.Nodes[2].Name)
		return s, s == "Unknown"
	})
	if got := e.list("node", `{.status.conditions[?(@.type=="Ready")].status}`, e.Nodes[1].Name); got != "True" {
		t.Errorf("another node: Ready %q", got)
	}
	e.Took("a killed node is not Ready")
}

// TestAKilledTestLeavesNoProcess kills a process that has a cluster.
func TestAKilledTestLeavesNoProcess(t *testing.T) {
	gate(t)
	if sign := os.Getenv("KUBETEST_VICTIM"); sign != "" {
		c := Start(t, Options{Nodes: 1})
		if err := os.WriteFile(sign, []byte(c.dir), 0o600); err != nil {
			t.Fatal(err)
		}
		select {} // until it is killed
	}
	sign := filepath.Join(t.TempDir(), "sign")
	cmd := exec.Command(os.Args[0], "-test.run=^TestAKilledTestLeavesNoProcess$", "-test.v")
	cmd.Env = append(os.Environ(), "KUBETEST_VICTIM="+sign)
	out := &proctest.Buffer{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := proctest.Start(cmd); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	var dir string
	proctest.Until(t, "a cluster", func() bool {
		select {
		case <-ended:
			t.Fatal(out)
		default:
		}
		b, _ := os.ReadFile(sign)
		dir = string(b)
		return dir != ""
	})
	removeLeft(t, dir) // it is in use
	if n := len(processes(dir)); n < 5 {
		t.Fatalf("%d processes of a cluster in %s, want more", n, dir)
	}
	_ = cmd.Process.Kill()
	<-ended
	left := 0
	proctest.Until(t, "the cluster's processes to end", func() bool { left = len(processes(dir)); return left == 0 })
	removeLeft(t, dir) // as the next cluster would
	for _, path := range []string{dir, "/sys/fs/cgroup/memory/" + filepath.Base(dir), "/sys/fs/cgroup/" + filepath.Base(dir)} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
}

// processes returns the processes whose command or environment names a folder.
func processes(dir string) (all []string) {
	files, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range files {
		command, _ := os.ReadFile(p + "/cmdline")
		environment, _ := os.ReadFile(p + "/environ")
		if strings.Contains(string(command)+string(environment), dir) {
			all = append(all, p)
		}
	}
	return all
}

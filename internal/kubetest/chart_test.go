package kubetest

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// chartValues are the values of the chart in the test. Nodes of the test share the disk, but for
// some folders, and have no storage class.
const chartValues = `
image: {repository: %q}
dataPolicy: delete
gateway: {replicas: 2, persistence: {enabled: false}}
nats: {image: %q, replicas: 3, persistence: {enabled: false}}
keysManager: {hostPath: /var/lib/cni/stagecoach, devices: none, drain: 5s, resources: {requests: {cpu: 50m, memory: 64Mi}}}
registry: {insecure: [%q]}
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true}
`

// chartStack has a function of each kind:
//   - upper reads its standard input. Its image has its own files.
//   - double is a stage with a model, which runs in the ONNX Runtime of Stagecoach's image.
//   - echo is an HTTP server that runs among the files of Stagecoach's image.
const chartStack = `
version: 1.0
provider: {name: openfaas}
functions:
  upper: {image: "REGISTRY/upper:1", fprocess: /upper, labels: {com.openfaas.scale.min: "3"}}
  double: {image: "REGISTRY/double:1"}
  echo: {image: "REGISTRY/echo:1", fprocess: ./echo-http, environment: {mode: http}}
`

// upper is a function that speaks HTTP by its standard input and output.
const upper = `package main

import ("bytes"; "fmt"; "io"; "os")

func main() {
	b, _ := io.ReadAll(os.Stdin)
	fmt.Fprintf(os.Stderr, "upper has read %s\n", b)
	os.Stdout.Write(bytes.ToUpper(b))
}
`

// installed is a cluster with the chart.
type installed struct {
	*Cluster
	dir, gateway string // gateway is host:port
	password     string
	http         *http.Client
}

// program builds a static program, and returns its path.
func program(t *testing.T, dir, name, pkg string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	cmd := exec.Command("go", "build", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// images pushes the image that `make images-oci` has made, with the tag that the chart expects, and
// images of functions. It returns the repository of the first one.
func images(t *testing.T, c *Cluster, dir string) string {
	t.Helper()
	folder := proctest.Built(t, "oci", "stagecoach")
	var found []v1.Image
	all, err := layout.ImageIndexFromPath(folder)
	if err == nil {
		var tagged []v1.ImageIndex
		if tagged, err = partial.FindIndexes(all, func(v1.Descriptor) bool { return true }); err == nil && len(tagged) == 1 {
			found, err = partial.FindImages(tagged[0], func(d v1.Descriptor) bool { return d.Platform.Architecture == "amd64" })
		}
	}
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %d images for amd64, %v, want one: run make images-oci", folder, len(found), err)
	}
	image := c.Push("stagecoach:0.1.0", found[0])
	text := filepath.Join(dir, "upper.go")
	if err := os.WriteFile(text, []byte(upper), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Image("upper:1", map[string]string{"/upper": program(t, dir, "upper", text)}, "/upper")
	c.image("double:1", map[string]string{"/stage": proctest.Built(t, "functions", "onnx"), "/model/model.onnx": "../../templates/onnx-stage/function/model/model.onnx"},
		v1.Config{Entrypoint: []string{"/stage"}, Labels: map[string]string{"dev.stagecoach.protocol": "1"}, Env: []string{"STAGECOACH_MODEL=model/model.onnx"}})
	c.image("echo:1", map[string]string{"/echo-http": proctest.Built(t, "functions", "echo-http")}, v1.Config{Labels: map[string]string{"dev.stagecoach.folder": "1"}})
	return strings.TrimSuffix(image, ":0.1.0")
}

// install installs the chart from the built programs.
func install(t *testing.T, c *Cluster, more ...string) *installed {
	t.Helper()
	dir := t.TempDir()
	image := images(t, c, dir)
	nats := c.Image("nats:1", map[string]string{"/usr/local/bin/nats-server": program(t, dir, "nats-server", "github.com/nats-io/nats-server/v2")}, "nats-server")
	c.Took("images")
	c.Kubectl("create", "namespace", "faas")
	values := filepath.Join(dir, "values.yaml")
	if err := os.WriteFile(values, fmt.Appendf(nil, chartValues, image, nats, c.Registry), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Helm(append([]string{"install", "y", "../../charts/stagecoach", "-n", "faas", "-f", values, "--wait", "--timeout", "4m"}, more...)...)
	c.Took("helm install --wait")
	c.Helm("test", "y", "-n", "faas", "--timeout", "1m")
	c.Took("helm test")
	password, err := base64.StdEncoding.DecodeString(c.Kubectl("get", "secret", "basic-auth", "-n", "faas", "-o", "jsonpath={.data.basic-auth-password}"))
	if err != nil {
		t.Fatal(err)
	}
	ip := c.Kubectl("get", "service", "gateway", "-n", "faas", "-o", "jsonpath={.spec.clusterIP}")
	way := &http.Transport{DialContext: c.Dial, DisableKeepAlives: true}
	t.Cleanup(way.CloseIdleConnections)
	return &installed{Cluster: c, dir: dir, gateway: net.JoinHostPort(ip, "8080"), password: string(password), http: &http.Client{Transport: way, Timeout: 30 * time.Second}}
}

// stagecoach runs a command on a node.
func (i *installed) stagecoach(args ...string) string {
	i.t.Helper()
	out, err := i.try(args...)
	if err != nil {
		i.t.Fatalf("stagecoach %q: %v\n%s", args, err, out)
	}
	return out
}

// try runs a command on a node, which may fail.
func (i *installed) try(args ...string) (string, error) {
	i.t.Helper()
	cmd := i.Nodes[0].machine.Command(proctest.Built(i.t, "bin", "stagecoach"), args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Env = append(os.Environ(), "OPENFAAS_URL=http://admin:"+i.password+"@"+i.gateway)
	err := proctest.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	return out.String(), err
}

// call calls the function upper, and returns what it answers, or the error.
func (i *installed) call() string { return i.send("upper", "text/plain", "hello") }

func (i *installed) send(function, kind, body string) string {
	resp, err := i.http.Post("http://"+i.gateway+"/function/"+function, kind, strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return fmt.Sprint(resp.StatusCode, " ", string(b), err)
}

const answered = "200 HELLO<nil>"

// answers waits until the function answers.
func (i *installed) answers(when string) {
	i.t.Helper()
	i.Await("an answer "+when, func() (string, bool) { got := i.call(); return got, got == answered })
}

// TestChart installs the chart, deploys a function, and calls it. It deletes pods of each kind,
// upgrades the release, and uninstalls it.
func TestChart(t *testing.T) {
	if os.Getenv("STAGECOACH_KUBERNETES_TEST") == "" {
		t.Skip("make test-kubernetes runs it")
	}
	c := Start(t, Options{Nodes: 3})
	examples, err := filepath.Glob("../../scripts/chart/testdata/values/*.yaml")
	if err != nil || len(examples) < 4 {
		t.Fatalf("examples of values: %v, %v", examples, err)
	}
	for _, values := range examples {
		c.Helm("lint", "--strict", "../../charts/stagecoach", "-f", values)
	}
	i := install(t, c)
	t.Log(i.stagecoach("node", "list"))
	stack := filepath.Join(i.dir, "stack.yml")
	if err := os.WriteFile(stack, []byte(strings.ReplaceAll(chartStack, "REGISTRY", c.Registry)), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Log(i.stagecoach("deploy", "-f", stack, "--wait"))
	if got := i.call(); got != answered {
		t.Fatalf("the function answers %q, want %q", got, answered)
	}
	if got := i.send("double", "application/json", `{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[1,2,3]}]}`); !strings.HasPrefix(got, "200") || !strings.Contains(got, "[3,5,7]") {
		t.Errorf("a function with a model answers %q, want 3, 5 and 7", got)
	}
	if got := i.send("echo", "text/plain", "hello"); !strings.HasPrefix(got, `200 {"body":"hello"`) {
		t.Errorf("a function that speaks HTTP answers %q, want the body", got)
	}
	c.Took("deploy --wait, and calls")
	for _, component := range []string{"keysmanager", "control", "nats"} {
		selector := "app.kubernetes.io/component=" + component
		n := map[string]int{"keysmanager": 3, "control": 2, "nats": 3}[component]
		pods := strings.Fields(c.Kubectl("get", "pods", "-n", "faas", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}"))
		if len(pods) != n {
			t.Fatalf("pods of %s: %v, want %d", component, pods, n)
		}
		c.Kubectl("delete", "pod", pods[0], "-n", "faas", "--now")
		i.answers("without " + pods[0])
		c.AwaitPods("faas", selector, n)
		i.answers("with a new " + pods[0])
		c.Took("a new pod of " + component)
	}
	key := c.Kubectl("get", "secrets", "y-cluster-key", "basic-auth", "y-join", "-n", "faas", "-o", "jsonpath={.items[*].data}")
	c.Helm("upgrade", "y", "../../charts/stagecoach", "-n", "faas", "--reuse-values", "--set", "gateway.replicas=1", "--wait", "--timeout", "4m")
	if now := c.Kubectl("get", "secrets", "y-cluster-key", "basic-auth", "y-join", "-n", "faas", "-o", "jsonpath={.items[*].data}"); now != key {
		t.Error("an upgrade has changed the Secrets")
	}
	i.answers("after an upgrade")
	c.Took("helm upgrade")
	c.Helm("rollback", "y", "1", "-n", "faas", "--wait", "--timeout", "4m")
	i.answers("after a rollback")
	c.AwaitPods("faas", "app.kubernetes.io/component=control", 2)
	c.Took("helm rollback")
	i.uninstall()
	c.Took("helm uninstall")
}

// uninstall removes the release, whose dataPolicy is delete, and waits until nothing is left.
func (i *installed) uninstall() {
	i.t.Helper()
	i.Helm("uninstall", "y", "-n", "faas", "--wait", "--timeout", "3m")
	i.Await("nothing to be left", func() (string, bool) {
		left := i.Kubectl("get", "all,secrets,configmaps,pvc,roles,rolebindings,clusterroles,clusterrolebindings,serviceaccounts,networkpolicies,pdb", "-n", "faas", "-l", "app.kubernetes.io/instance=y", "-o", "name")
		return left, left == ""
	})
}

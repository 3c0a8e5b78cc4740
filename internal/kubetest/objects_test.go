package kubetest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// plane is a control plane beside the API server, with the rights that the chart gives it.
type plane struct {
	*Cluster
	http *http.Client
}

const planeAddress = "127.0.0.1:8089"

// startPlane starts a control plane as in a pod: the credentials of a service account are in their
// folder, and /run is empty.
func (c *Cluster) startPlane(t *testing.T) *plane {
	t.Helper()
	c.Kubectl("create", "namespace", "faas")
	c.Kubectl("create", "serviceaccount", "y-control", "-n", "faas")
	c.Apply(c.Helm("template", "y", "../../charts/stagecoach", "-n", "faas", "-s", "templates/functions.yaml", "--kube-version", "1.36.0", "--set", "image.repository=x,keysManager.runtime=pod,kubernetes.optIn=true,keysManager.podNamespaces={openfaas-fn,team-a,team-b}"))
	account, state := t.TempDir(), t.TempDir()
	write(t, filepath.Join(account, "token"), c.Kubectl("create", "token", "y-control", "-n", "faas"))
	ca, err := os.ReadFile(filepath.Join(c.dir, "control", "certs", "apiserver.crt"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(account, "ca.crt"), string(ca))
	write(t, filepath.Join(state, "up.yaml"), fmt.Sprintf("registry: {insecure: [%q]}\n", c.Registry))
	host, port, _ := strings.Cut(strings.TrimPrefix(c.Server, "https://"), ":")
	const script = `mount -t tmpfs none /run && mkdir -p /var/run/secrets/kubernetes.io/serviceaccount &&
mount --bind "$0" /var/run/secrets/kubernetes.io/serviceaccount && exec "$@"`
	cmd := c.Command("/usr/bin/unshare", "--mount", "sh", "-c", script, account, proctest.Built(t, "bin", "stagecoach"), "up", "--config", filepath.Join(state, "up.yaml"),
		"--state", filepath.Join(state, "state"), "--listen", planeAddress, "--no-node", "--nats-listen", "127.0.0.1:0",
		"--kube-namespaces", "openfaas-fn,team-a,team-b", "--kube-secrets", "--kube-objects", "--kube-opt-in")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.Env = append(cmd.Env, "KUBERNETES_SERVICE_HOST="+host, "KUBERNETES_SERVICE_PORT="+port)
	if err := proctest.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("log of the control plane:\n%s", &log)
		}
		if left, _ := filepath.Glob(filepath.Join(state, "state", "secrets", "*", "*")); len(left) > 0 {
			t.Errorf("secrets are on the disk: %v", left)
		}
	})
	way := &http.Transport{DialContext: c.net.Clients.Dial, DisableKeepAlives: true}
	t.Cleanup(way.CloseIdleConnections)
	p := &plane{c, &http.Client{Transport: way, Timeout: 30 * time.Second}}
	c.Await("the control plane", func() (string, bool) {
		text := p.ask(http.MethodGet, "/readyz", "")
		return text, strings.HasPrefix(text, "200")
	})
	return p
}

// ask returns the status and the body of an answer, or the error.
func (p *plane) ask(method, path, body string) string {
	req, err := http.NewRequest(method, "http://"+planeAddress+path, strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	resp, err := p.http.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s", resp.StatusCode, bytes.TrimSpace(b))
}

// wants fails the test unless an answer begins with a status, and has all texts.
func (p *plane) wants(answer, status string, texts ...string) {
	p.t.Helper()
	if !strings.HasPrefix(answer, status) {
		p.t.Fatalf("answer %q, want status %s", answer, status)
	}
	for _, text := range texts {
		if !strings.Contains(answer, text) {
			p.t.Errorf("answer %q, want %q in it", answer, text)
		}
	}
}

// TestObjects keeps secrets, namespaces and objects of functions in a real API server.
func TestObjects(t *testing.T) {
	gate(t)
	c := Start(t, Options{Fake: 1})
	for _, name := range []string{"openfaas-fn", "team-a", "team-b"} {
		c.Kubectl("create", "namespace", name)
	}
	c.Kubectl("annotate", "namespace", "team-a", "openfaas=1")
	p := c.startPlane(t)
	c.Took("control plane of functions")
	p.secrets()
	c.Took("secrets")
	image := c.Stage("noop:1", map[string]string{"/stage": proctest.Built(t, "functions", "noop")})
	p.namespaces(image)
	c.Took("namespaces")
	p.objects(image)
	c.Took("objects")
}

func (p *plane) secrets() {
	p.Kubectl("create", "secret", "generic", "alien", "-n", "openfaas-fn", "--from-literal=alien=x")
	p.Kubectl("create", "secret", "generic", "by-hand", "-n", "openfaas-fn", "--from-literal=by-hand=first")
	p.Kubectl("label", "secret", "by-hand", "-n", "openfaas-fn", "app.kubernetes.io/managed-by=openfaas")
	p.wants(p.ask(http.MethodPost, "/system/secrets", `{"name": "token", "value": "one"}`), "201")
	get := func(name string) string {
		return p.list("secret", `{.type} {.metadata.labels} {.data}`, "-n", "openfaas-fn", name)
	}
	if got := get("token"); got != `Opaque {"app.kubernetes.io/managed-by":"stagecoach"} {"token":"b25l"}` {
		p.t.Errorf("the Secret of a new secret: %s", got)
	}
	p.Await("the Secret of an operator to be listed", func() (string, bool) {
		text := p.ask(http.MethodGet, "/system/secrets", "")
		return text, strings.Contains(text, `"by-hand"`) && strings.Contains(text, `"token"`)
	})
	p.wants(p.ask(http.MethodPost, "/system/secrets", `{"name": "alien", "value": "v"}`), "409", "belongs to somebody else")
	p.wants(p.ask(http.MethodPut, "/system/secrets", `{"name": "by-hand", "value": "two"}`), "202")
	if got := get("by-hand") + get("alien"); !strings.Contains(got, `{"by-hand":"dHdv"}`) || !strings.Contains(got, `{"alien":"eA=="}`) {
		p.t.Errorf("Secrets after updates: %s", got)
	}
	p.wants(p.ask(http.MethodDelete, "/system/secrets", `{"name": "by-hand"}`), "202")
	if got := get("by-hand"); !strings.Contains(got, "not found") {
		p.t.Errorf("a deleted secret: %s", got)
	}
	p.Kubectl("patch", "role", "y-faas-functions", "-n", "team-b", "--type=json", "-p", `[{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch"]}]`)
	p.Kubectl("annotate", "namespace", "team-b", "openfaas=1")
	p.Await("the API server to refuse a creation", func() (string, bool) {
		text := p.ask(http.MethodPost, "/system/secrets", `{"name": "token", "namespace": "team-b", "value": "v"}`)
		return text, strings.HasPrefix(text, "503") && strings.Contains(text, `cannot create resource "secrets"`)
	})
	p.Kubectl("annotate", "namespace", "team-b", "openfaas-")
}

func (p *plane) namespaces(image string) {
	p.Await("the namespaces that opt in", func() (string, bool) {
		text := p.ask(http.MethodGet, "/system/namespaces", "")
		return text, text == `200 ["openfaas-fn","team-a"]`
	})
	deploy := func(namespace string) string {
		return p.ask(http.MethodPost, "/system/functions", fmt.Sprintf(`{"service": "here", "image": %q, "namespace": %q}`, image, namespace))
	}
	p.wants(deploy("team-b"), "400", "kubectl annotate namespace team-b openfaas=1")
	p.wants(deploy("default"), "400", "--kube-namespaces")
	p.wants(deploy("team-a"), "202")
	p.wants(p.ask(http.MethodDelete, "/system/functions", `{"functionName": "here", "namespace": "team-a"}`), "202")
}

func (p *plane) objects(image string) {
	p.wants(p.ask(http.MethodPost, "/system/functions", fmt.Sprintf(`{"service": "fn", "image": %q, "secrets": ["token"], "labels": {"com.openfaas.scale.min": "1"}}`, image)), "202")
	uid := p.made("")
	begun := time.Now()
	p.Kubectl("patch", "configmap", "fn", "-n", "openfaas-fn", "--type=merge", "-p", `{"data": {"function.json": "edited", "more": "x"}, "metadata": {"labels": {"faas_function": null}}}`)
	if now := p.made(""); now != uid {
		p.t.Errorf("after an edit, the ConfigMap is another one")
	}
	p.t.Logf("an edit is repaired after %v", time.Since(begun))

	pod := func() {
		p.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: fn-pod
  namespace: openfaas-fn
  ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: fn, uid: %s, controller: true}]
spec:
  nodeName: fake-0
  terminationGracePeriodSeconds: 0
  containers: [{name: c, image: x}]
`, uid))
	}
	gone := func() (string, bool) {
		text := p.list("pods", "{.items[*].metadata.name}", "-n", "openfaas-fn")
		return text, text == ""
	}
	pod()
	p.Kubectl("drain", "fake-0", "--timeout=60s") // without --force
	p.Await("the evicted pod to be gone", gone)
	pod()
	begun = time.Now()
	p.Kubectl("delete", "configmap", "fn", "-n", "openfaas-fn")
	uid = p.made(uid)
	p.t.Logf("a deletion is repaired after %v", time.Since(begun))
	p.Await("the pod of the deleted ConfigMap to be gone", gone)
	p.t.Logf("its pod is gone after %v", time.Since(begun))

	p.wants(p.ask(http.MethodDelete, "/system/functions", `{"functionName": "fn"}`), "202")
	p.Await("the ConfigMap to go with its function", func() (string, bool) {
		text := p.list("configmaps", "{.items[*].metadata.name}", "-n", "openfaas-fn", "-l", "faas_function")
		return text, text == ""
	})
}

// made waits until the ConfigMap of function fn is as it has to be and has another uid, and returns
// its uid.
func (p *plane) made(before string) (uid string) {
	p.t.Helper()
	p.Await("the ConfigMap of the function", func() (string, bool) {
		text := p.list("configmap", "{.metadata.uid}\n{.metadata.labels}\n{.data}", "-n", "openfaas-fn", "fn")
		lines := strings.SplitN(text, "\n", 3)
		if len(lines) < 3 || lines[0] == before {
			return text, false
		}
		uid = lines[0]
		return text, strings.Contains(lines[1], `"faas_function":"fn"`) && strings.Contains(lines[1], `"app.kubernetes.io/managed-by":"stagecoach"`) &&
			strings.HasPrefix(lines[2], `{"function.json":`) && strings.Contains(lines[2], `\"name\": \"fn\"`) && !strings.Contains(lines[2], "more")
	})
	return uid
}

// owned checks that the pods of a function have its ConfigMap as their controller. So a drain needs
// no --force, and a deletion of the ConfigMap deletes the pods, which start again.
func (i *installed) owned(function, answer string) {
	i.t.Helper()
	owners := func() string {
		return i.list("pods", `{range .items[*]}{.metadata.ownerReferences}{"\n"}{end}`, "-n", "openfaas-fn", "-l", "faas_function="+function)
	}
	uid := i.Kubectl("get", "configmap", function, "-n", "openfaas-fn", "-o", "jsonpath={.metadata.uid}")
	text := owners()
	if n := strings.Count(text, "\n"); n == 0 || strings.Count(text, uid) != n || strings.Count(text, `"controller":true`) != n {
		i.t.Fatalf("owners of the pods: %s, want the ConfigMap with uid %s", text, uid)
	}
	node := i.list("pods", "{.items[0].spec.nodeName}", "-n", "openfaas-fn", "-l", "faas_function="+function)
	i.Kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--grace-period=1", "--pod-selector=faas_function="+function, "--timeout=90s")
	i.Kubectl("uncordon", node)
	i.Await("an answer after a drain", func() (string, bool) { got := i.ask(function, "hello"); return got, got == answer })
	i.Took("drain of pods with owners")

	i.Kubectl("delete", "configmap", function, "-n", "openfaas-fn")
	i.Await("the pods of the earlier ConfigMap to be deleted", func() (string, bool) {
		text := i.list("pods", `{range .items[*]}{.metadata.ownerReferences} deleted:{.metadata.deletionTimestamp}{"\n"}{end}`, "-n", "openfaas-fn", "-l", "faas_function="+function)
		for line := range strings.Lines(text) {
			if strings.Contains(line, uid) && strings.HasSuffix(strings.TrimSpace(line), "deleted:") {
				return text, false
			}
		}
		return text, true
	})
	i.Await("a pod of the new ConfigMap", func() (string, bool) {
		text := i.list("pods", `{range .items[*]}{.metadata.ownerReferences} {.status.phase}{"\n"}{end}`, "-n", "openfaas-fn", "-l", "faas_function="+function)
		for line := range strings.Lines(text) {
			if strings.Contains(line, `"controller":true`) && !strings.Contains(line, uid) && strings.HasSuffix(line, " Running\n") {
				return text, true
			}
		}
		return text, false
	})
	i.Await("an answer of new pods", func() (string, bool) { got := i.ask(function, "hello"); return got, got == answer })
	i.Took("deletion of a ConfigMap with pods")
}

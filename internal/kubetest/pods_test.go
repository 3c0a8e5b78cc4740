package kubetest

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// ask calls a function, and returns what it answers, or the error.
func (i *installed) ask(function, body string) string {
	resp, err := i.http.Post("http://"+i.gateway+"/function/"+function, "text/plain", strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return fmt.Sprint(resp.StatusCode, " ", string(b), err)
}

// TestPods runs functions in pods of their own.
func TestPods(t *testing.T) {
	gate(t)
	c := Start(t, Options{Nodes: 2})
	c.Kubectl("create", "namespace", "openfaas-fn")
	c.Kubectl("label", "namespace", "openfaas-fn", "pod-security.kubernetes.io/enforce=restricted")
	i := install(t, c, "--set", "keysManager.runtime=pod,keysManager.ort=/usr/lib/stagecoach/libonnxruntime.so.1")
	noop := c.Stage("noop:1", map[string]string{"/stage": proctest.Built(t, "functions", "noop")})
	model := c.Stage("model:1", map[string]string{"/stage": proctest.Built(t, "functions", "onnx"), "/model.onnx": proctest.Built(t, "models", "minilm", "whole.onnx")}, "STAGECOACH_MODEL=model.onnx")
	stack := filepath.Join(i.dir, "stack.yml")
	text := fmt.Sprintf("version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  noop: {image: %q, labels: {com.openfaas.scale.min: \"2\"}}\n  model: {image: %q, labels: {com.openfaas.scale.min: \"4\"}, limits: {memory: 200Mi, cpu: 500m}}\n", noop, model)
	if err := os.WriteFile(stack, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Log(i.stagecoach("deploy", "-f", stack, "--wait"))
	i.sharesPods(4)
	answer := i.ask("noop", "hello")
	if want := "200 hello<nil>"; answer != want {
		t.Errorf("noop answers %q, want %q", answer, want)
	}
	i.owned("noop", answer)
	t.Run("admission", i.daemonsReachOwnMachine)
	t.Run("http", i.speaksHTTP)
}

// sharesPods checks that the model has one pod per machine, in which its replicas there are forks,
// n in all, and that each pod has been resized for them.
func (i *installed) sharesPods(n int) {
	i.t.Helper()
	i.Await("a pod per machine with forks", func() (string, bool) {
		described := i.stagecoach("describe", "model")
		pods := i.list("pods", `{range .items[*]}{.spec.nodeName} {.spec.containers[0].resources.limits.cpu} {.spec.containers[0].resources.limits.memory}{"\n"}{end}`,
			"-n", "openfaas-fn", "-l", "faas_function=model")
		seen, all := described+pods, 0
		for line := range strings.Lines(pods) {
			var machine, cpu string
			var memory int64
			if _, err := fmt.Sscan(line, &machine, &cpu, &memory); err != nil {
				return seen + err.Error(), false // not resized yet
			}
			here := 0
			for replica := range strings.Lines(described) {
				if strings.Contains(replica, " on "+machine+"-") && strings.Contains(replica, ": ready, fork,") {
					here++
				}
			}
			// Each replica has limits of 500m and 200 MiB.
			if strings.Count(pods, machine+" ") != 1 || cpu != fmt.Sprintf("%dm", 100+500*here) || memory < int64(here)*200<<20 {
				return seen, false
			}
			all += here
		}
		return seen, all == n
	})
	i.Took("forks in pods")
}

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
	i := install(t, c, "--set", "keysManager.runtime=pod,keysManager.ort=/usr/lib/stagecoach/libonnxruntime.so.1,keysManager.logLevel=debug")
	noop := c.Stage("noop:1", map[string]string{"/stage": proctest.Built(t, "functions", "noop")})
	model := c.Stage("model:1", map[string]string{"/stage": proctest.Built(t, "functions", "onnx"), "/model.onnx": proctest.Built(t, "models", "minilm", "whole.onnx")}, "STAGECOACH_MODEL=model.onnx")
	stack := filepath.Join(i.dir, "stack.yml")
	text := fmt.Sprintf("version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  noop: {image: %q, labels: {com.openfaas.scale.min: \"2\"}}\n  model: {image: %q, labels: {com.openfaas.scale.min: \"4\"}, limits: {memory: 200Mi, cpu: 500m}}\n", noop, model)
	if err := os.WriteFile(stack, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Log(i.stagecoach("deploy", "-f", stack, "--wait"))
	t.Log(i.stagecoach("describe", "noop"))
	t.Log(i.stagecoach("describe", "model"))
	t.Log(c.Kubectl("logs", "-n", "faas", "-l", "app.kubernetes.io/component=keysmanager", "--tail=-1", "--prefix"))
	t.Log(c.Kubectl("get", "pods", "-n", "openfaas-fn", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.generation} {.status.observedGeneration} {.spec.containers[0].resources} {.status.containerStatuses[0].resources} {.status.conditions}{"\n"}{end}`))
	t.Log(c.Kubectl("get", "pods", "-n", "openfaas-fn", "-o", "wide", "--show-labels"))
	answer := i.ask("noop", "hello")
	t.Log(answer)
	i.owned("noop", answer)
	t.Run("admission", i.daemonsReachOwnMachine)
	t.Run("http", i.speaksHTTP)
}

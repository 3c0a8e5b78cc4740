package kubetest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// bert is a request for MiniLM, with three tokens.
const bert = `{"inputs": [
  {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [101, 7592, 102]},
  {"name": "attention_mask", "datatype": "INT64", "shape": [1, 3], "data": [1, 1, 1]}]}`

// took calls the model, and returns how long the answer took.
func (i *installed) took() time.Duration {
	i.t.Helper()
	begin := time.Now()
	resp, err := i.http.Post("http://"+i.gateway+"/v2/models/model/infer", "application/json", strings.NewReader(bert))
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		i.t.Fatalf("the model answers %s %s, %v", resp.Status, b, err)
	}
	return time.Since(begin)
}

// replicas returns how many replicas of a function there are, and how many are ready.
func (i *installed) replicas(function string) (all, ready int) {
	i.t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+i.gateway+"/system/function/"+function, nil)
	if err != nil {
		i.t.Fatal(err)
	}
	req.SetBasicAuth("admin", i.password)
	resp, err := i.http.Do(req)
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close()
	var f struct{ Replicas, AvailableReplicas int }
	if err := json.NewDecoder(resp.Body).Decode(&f); err != nil {
		i.t.Fatal(err)
	}
	return f.Replicas, f.AvailableReplicas
}

// evict ends all zygotes of the model.
func (i *installed) evict() {
	i.t.Helper()
	i.Await("no parameters in memory", func() (string, bool) {
		out, err := i.try("cache", "evict", "model") // fails while a node still loads them
		list, _ := i.try("cache", "list")
		return fmt.Sprint(out, err, list), !strings.Contains(list, "model")
	})
}

// scale sets the number of replicas, and returns how long it took until they were ready.
func (i *installed) scale(function string, n int) time.Duration {
	i.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+i.gateway+"/system/scale-function/"+function, strings.NewReader(fmt.Sprintf(`{"replicas": %d}`, n)))
	if err != nil {
		i.t.Fatal(err)
	}
	req.SetBasicAuth("admin", i.password)
	begin := time.Now()
	resp, err := i.http.Do(req)
	if err != nil {
		i.t.Fatal(err)
	}
	if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusAccepted {
		i.t.Fatalf("scale to %d: %s, %v", n, resp.Status, err)
	}
	i.Await(fmt.Sprint(n, " replicas"), func() (string, bool) {
		all, ready := i.replicas(function)
		return fmt.Sprint(all, ready), all == n && ready == n
	})
	return time.Since(begin)
}

// deployModel deploys the model with at least n replicas.
func (i *installed) deployModel(stack, image string, n int) {
	i.t.Helper()
	text := fmt.Sprintf("version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  model: {image: %q, limits: {memory: 200Mi}, labels: "+
		"{com.openfaas.scale.min: \"%d\", com.openfaas.scale.max: \"40\", com.openfaas.scale.zero: \"%t\"}}\n", image, n, n == 0)
	if err := os.WriteFile(stack, []byte(text), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.stagecoach("deploy", "-f", stack)
}

// atLeast deploys the model with at least n replicas, and returns how long it took until they were
// ready. It returns when there are no others.
func (i *installed) atLeast(stack, image string, n int) time.Duration {
	i.t.Helper()
	begin, took := time.Now(), time.Duration(0)
	i.deployModel(stack, image, n)
	i.Await(fmt.Sprint(n, " replicas"), func() (string, bool) {
		all, ready := i.replicas("model")
		if ready >= n && took == 0 {
			took = time.Since(begin)
		}
		return fmt.Sprint(all, ready), all == n && ready == n
	})
	return took
}

// TestDesigns measures the two ways to run functions: in pods of their own, and in the pods of the
// DaemonSet. docs/RESULTS.md has the figures.
func TestDesigns(t *testing.T) {
	if os.Getenv("STAGECOACH_KUBERNETES_BENCH") == "" {
		t.Skip("make bench-kubernetes runs it")
	}
	c := Start(t, Options{Nodes: 3})
	c.Kubectl("create", "namespace", "openfaas-fn")
	const ort = "keysManager.ort=/usr/lib/stagecoach/libonnxruntime.so.1"
	i := install(t, c, "--set", ort)
	files := map[string]string{"/stage": proctest.Built(t, "functions", "onnx"), "/model.onnx": proctest.Built(t, "models", "minilm", "whole.onnx")}
	for turn, design := range []string{"process", "pod", "process", "pod"} {
		c.Helm("upgrade", "y", "../../charts/stagecoach", "-n", "faas", "--reuse-values", "--set", "keysManager.runtime="+design, "--wait", "--timeout", "4m")
		c.Took("helm upgrade to " + design)
		marker := filepath.Join(i.dir, fmt.Sprint("turn-", turn))
		if err := os.WriteFile(marker, []byte(design), 0o600); err != nil {
			t.Fatal(err)
		}
		files["/turn"] = marker // so that no machine has the image
		image := c.Stage(fmt.Sprintf("model:turn-%d", turn), files, "STAGECOACH_MODEL=model.onnx")
		stack := filepath.Join(i.dir, "stack.yml")
		i.deployModel(stack, image, 0)
		figures := map[string][]time.Duration{"nothing is there": {i.took()}}
		for range 10 {
			i.scale("model", 0)
			figures["parameters in memory"] = append(figures["parameters in memory"], i.took())
		}
		for range 3 {
			i.scale("model", 0)
			i.evict()
			figures["image is there"] = append(figures["image is there"], i.took())
		}
		for range 10 {
			figures["replica is there"] = append(figures["replica is there"], i.took())
		}
		for range 3 {
			i.atLeast(stack, image, 3)
			figures["3 to 23 replicas"] = append(figures["3 to 23 replicas"], i.atLeast(stack, image, 23))
		}
		for _, what := range []string{"replica is there", "parameters in memory", "image is there", "nothing is there", "3 to 23 replicas"} {
			all := figures[what]
			slices.Sort(all)
			t.Logf("%-8s %-22s n %2d  least %8s  median %8s  most %8s", design, what, len(all), all[0].Round(100*time.Microsecond), all[len(all)/2].Round(100*time.Microsecond), all[len(all)-1].Round(100*time.Microsecond))
		}
		t.Log(i.stagecoach("describe", "model"))
		c.Took("figures of " + design)
		i.stagecoach("remove", "-f", stack)
	}
}

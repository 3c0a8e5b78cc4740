package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// popular is a model of a popular library, with random weights, as testdata/popular/make.py prints
// it.
type popular struct {
	Name, Library string
	Model         string // its file
	Bytes         int64  // of the file
	Env           map[string]string
	Body          string    // of a request: JSON, otherwise text
	Want          []float64 // what the library computes for it, outside of any stage
}

// popularPaths are the start paths of some models. All other models fork from a zygote that has
// mapped the parameters.
var popularPaths = map[string]string{
	"sklearn-skl2onnx": keysmanager.PathHeap, // ONNX Runtime copies the parameters
	"onnxruntime":      keysmanager.PathHeap,
	"lightgbm":         keysmanager.PathHeap, // LightGBM parses text
}

// popularReplicas is how many replicas each model has while its memory is measured.
const popularReplicas = 3

// TestPopularModels builds and deploys models of popular libraries as stages, whose replicas fork
// from a zygote. Their answers must match those of the libraries alone. If STAGECOACH_MODELS_TABLE
// names a file, the test writes a table with each model's start path and the cost of one more
// replica.
func TestPopularModels(t *testing.T) {
	t.Parallel()
	python := proctest.Torch(t)
	const lacks = `import importlib.util as u, sys
print(*[m for m in "transformers torchvision sentence_transformers timm sklearn skl2onnx onnxruntime lightgbm".split() if u.find_spec(m) is None])`
	if out, err := exec.CommandContext(t.Context(), python, "-c", lacks).Output(); err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Skipf("%s lacks %s, which `make test-torch` has (%v)", python, bytes.TrimSpace(out), err)
	}
	images := t.TempDir()
	r := start(t, "--images", images, "--ort", "")
	c := &operator{t, t.TempDir(), r.Base}
	models := makePopular(t, python, c.dir)
	c.write("stack.yml", popularStack(python, models))
	c.run("", "", "build", "--images", images, "--check-imports=false")
	var rows []string
	for _, m := range models {
		t.Run(m.Name, func(t *testing.T) {
			row := r.measure(t, c, m)
			t.Log(row)
			rows = append(rows, row)
		})
	}
	if file := os.Getenv("STAGECOACH_MODELS_TABLE"); file != "" {
		if err := os.WriteFile(file, []byte(popularHeader+strings.Join(rows, "\n")+"\n"), 0o644); err != nil {
			t.Error(err)
		}
	}
}

// makePopular makes the models' folders in dir.
func makePopular(t *testing.T, python, dir string) (models []popular) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), python, "-W", "ignore", "testdata/popular/make.py", dir)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	for line := range strings.Lines(string(out)) {
		var m popular
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		models = append(models, m)
	}
	if err != nil || len(models) == 0 {
		t.Fatalf("%d models, %v:\n%s", len(models), err, &said)
	}
	return models
}

func popularStack(python string, models []popular) string {
	var b strings.Builder
	b.WriteString("version: 1.0\nprovider: {name: openfaas, gateway: \"http://127.0.0.1:8080\"}\nfunctions:\n")
	for _, m := range models {
		var env []string
		for name, value := range m.Env {
			env = append(env, name+": "+value)
		}
		fmt.Fprintf(&b, "  %[1]s: {lang: python3-stage, handler: ./%[1]s, image: \"example/%[1]s:1\", fprocess: %[2]s ./stage, environment: {%[3]s}, "+
			"labels: {com.openfaas.scale.min: \"0\", com.openfaas.scale.zero: \"true\", com.openfaas.scale.max: \"%[4]d\"}}\n", m.Name, python, strings.Join(env, ", "), popularReplicas)
	}
	return b.String()
}

// measure runs a model with some replicas, compares their answers, and returns its row of the
// table.
func (r *rig) measure(t *testing.T, c *operator, m popular) string {
	t.Helper()
	c.run(m.Name+": created", "", "deploy", "--filter", m.Name)
	r.infer(t, m)
	r.must(http.StatusAccepted, http.MethodPost, "/system/scale-function/"+m.Name, fmt.Sprintf(`{"serviceName":%q,"replicas":%d}`, m.Name, popularReplicas))
	r.until(late, "all replicas", func() bool { return r.shows(m.Name).AvailableReplicas == popularReplicas })
	var calls sync.WaitGroup
	for range 3 * popularReplicas { // so that each replica has computed something
		calls.Go(func() { r.infer(t, m) })
	}
	calls.Wait()
	starts := slices.DeleteFunc(client.ReplicaStarts(r.line(m.Name).Events), func(s client.ReplicaStart) bool {
		return s.Path == "" // it was not wanted any more before it had a process
	})
	want := popularPaths[m.Name]
	if want == "" {
		want = keysmanager.PathFork
	}
	path := ""
	for _, s := range starts {
		if path = s.Path; path != want {
			t.Errorf("replica %s started by path %s, want %s", s.Replica, path, want)
		}
	}
	var replicas []int
	for _, p := range r.descendants() {
		if !p.zygote {
			replicas = append(replicas, p.pid)
		}
	}
	if len(replicas) != popularReplicas {
		t.Fatalf("processes %v, want %d replicas", replicas, popularReplicas)
	}
	var most memory // of any replica
	for _, pid := range replicas {
		now := memoryOf(t, pid, filepath.Base(m.Model))
		most = memory{max(most.private, now.private), max(most.pss, now.pss), max(most.rss, now.rss), max(most.mapped, now.mapped)}
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", fmt.Sprintf(`{"functionName":%q}`, m.Name))
	r.until(late, "no replica to be left", func() bool {
		return !slices.ContainsFunc(r.descendants(), func(p process) bool { return !p.zygote })
	})
	shared := "no"
	if most.mapped > m.Bytes/2 {
		shared = "yes"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s | %s |", m.Name, m.Library, megabytes(m.Bytes), path, shared,
		megabytes(most.private), megabytes(most.pss), megabytes(most.rss))
}

const popularHeader = "| model | library | parameters, MB | start path | parameters mapped | private to a replica, MB | its PSS, MB | its RSS, MB |\n|---|---|---|---|---|---|---|---|\n"

func megabytes(bytes int64) string { return fmt.Sprintf("%.1f", float64(bytes)/1e6) }

// infer sends a model's request and compares the answer.
func (r *rig) infer(t *testing.T, m popular) {
	t.Helper()
	kind := "application/json"
	if !strings.HasPrefix(m.Body, "{") {
		kind = "text/plain"
	}
	a, err := r.trySend(http.MethodPost, "/function/"+m.Name, m.Body, "Content-Type", kind, "X-Timeout", "10m")
	var got struct{ Outputs []struct{ Data []float64 } }
	if err == nil && a.Status == http.StatusOK {
		err = json.Unmarshal(a.Body, &got)
	}
	if err != nil || len(got.Outputs) != 1 || len(got.Outputs[0].Data) != len(m.Want) {
		t.Errorf("%v, status %d, %.2000s; want %d numbers", err, a.Status, a.Body, len(m.Want))
		return
	}
	for i, want := range m.Want {
		if got := got.Outputs[0].Data[i]; !(math.Abs(got-want) <= 1e-4*max(1, math.Abs(want))) {
			t.Errorf("number %d is %v, want %v", i, got, want)
			return
		}
	}
}

// memory is what a process has in memory, in bytes.
type memory struct {
	private int64 // in pages that no other process has: what the process costs beside its siblings
	pss     int64 // with its share of pages that others have, too
	rss     int64 // with all of these pages
	mapped  int64 // address space of the file of its parameters
}

func memoryOf(t *testing.T, pid int, model string) (m memory) {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	of := ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || !strings.HasSuffix(words[0], ":") {
			of = words[len(words)-1] // the header of a mapping
			continue
		}
		kilobytes, err := strconv.ParseInt(words[min(1, len(words)-1)], 10, 64)
		if err != nil {
			continue
		}
		switch n := kilobytes << 10; words[0] {
		case "Pss:":
			m.pss += n
		case "Private_Clean:", "Private_Dirty:":
			m.private += n
		case "Rss:":
			m.rss += n
		case "Size:":
			if filepath.Base(of) == model {
				m.mapped += n
			}
		}
	}
	return m
}

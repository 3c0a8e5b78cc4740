// Package stagecoach_test holds the repository's own rules as tests: which packages may depend on what, and that each says
// what it is for.
package stagecoach_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/stagecoach-serving/stagecoach/"

type pkg struct {
	ImportPath string
	Dir        string
	Doc        string
	Deps       []string
	Imports    []string
	GoFiles    []string
	CgoFiles   []string
}

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps=false", "-json=ImportPath,Dir,Doc,Deps,Imports,GoFiles,CgoFiles", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]pkg{}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(p.ImportPath, module)] = p
	}
}

// TestArrowsPointOneWay checks, transitively, what each room must not reach and why.
func TestArrowsPointOneWay(t *testing.T) {
	all := packages(t)
	forbidden := []struct {
		rooms []string
		deps  []string
		why   string
	}{
		{[]string{"pipeline", "plan", "autoscaler", "autoscaler/baseline", "placement", "policy", "profile"}, []string{"os"}, "pure packages do no I/O"}, // task reaches tensor's store of files
		{[]string{"pipeline", "task", "plan", "autoscaler", "autoscaler/baseline", "placement", "policy", "profile"}, []string{"net", "net/http", "log/slog", "math/rand/v2"}, "pure packages do no I/O and draw no chance"},
		{[]string{"pipeline"}, []string{module}, "pipeline imports the standard library only"},
		{[]string{"load/arrivals"}, []string{"os", "net", "net/http", "log/slog", module}, "when requests arrive is drawn from a seed alone; simulators use it too"},
		{[]string{"sketch"}, []string{"os", "net", "net/http", "log/slog", module}, "quantiles are counted by shells, simulators and reports alike"},
		{[]string{"sim", "sim/qna", "sim/study", "sim/study/cv", "sim/study/quart"}, []string{module + "control", module + "cluster", module + "gateway", module + "provider", module + "queue", module + "keysmanager", module + "node", module + "sandbox", "github.com/nats-io"}, "a simulation runs pure cores and policies, and models the shells"},
		{[]string{"autoscaler"}, []string{module + "autoscaler/baseline"}, "ours does not lean on what it is compared with"},
		{[]string{"plan"}, []string{module + "flow", module + "dispatch", module + "queue"}, "policies know no shells"},
		{[]string{"flow", "dispatch", "gateway", "keysmanager", "control", "cluster", "stage"}, []string{"github.com/nats-io"}, "package queue is the only importer of NATS"},
		{[]string{"flow", "dispatch", "gateway", "keysmanager", "control", "cluster", "stage", "queue"}, []string{"github.com/openfaas"}, "package provider is the only importer of faas-provider"},
		{[]string{"flow", "dispatch", "queue", "keysmanager", "sandbox", "secret", "logbook", "control", "wire", "tensor", "events", "telemetry"}, []string{module + "gateway", module + "provider", module + "cluster"}, "shells meet in cmd"},
		{[]string{"cgroup"}, []string{module}, "cgroup knows the kernel's files and nothing of who uses them"},
		{[]string{"device"}, []string{module}, "what a machine has, anybody may ask"},
		{[]string{"network"}, []string{module}, "network knows the kernel's links and filters and nothing of what runs behind them"},
		{[]string{"warden"}, []string{module + "keysmanager", module + "queue", "net/http", "github.com/prometheus"}, "what outlives all else knows nothing of it"},
		{[]string{"node"}, []string{module, "github.com/nats-io"}, "the node protocol is of both sides, and of neither"},
		{[]string{"stack"}, []string{module, "net", "net/http"}, "stack reads files and nothing else"},
		{[]string{"builder"}, []string{module + "gateway", module + "provider", module + "queue", module + "keysmanager", module + "flow", module + "dispatch"}, "images are built without a running stagecoach"},
		{[]string{"stage"}, []string{module + "dispatch", module + "flow", module + "keysmanager", "github.com/prometheus"}, "a stage binary is small"},
		{[]string{"safetensors"}, []string{module + "wire", module + "stage", module + "sandbox", module + "keysmanager", "net", "net/http"}, "who reads a model needs nobody who serves it"},
		{[]string{"functions/minilm/stages", "functions/ocr/stages"}, []string{module + "onnx", module + "safetensors", "google.golang.org/protobuf"}, "what builds a model has no place in its stages"},
	}
	for _, rule := range forbidden {
		for _, room := range rule.rooms {
			if _, ok := all[room]; !ok {
				t.Errorf("no package %s: mend this test or the tree", room)
			}
			for dep, by := range reach(all, room) {
				for _, bad := range rule.deps {
					if dep == bad || strings.HasSuffix(bad, "/") && strings.HasPrefix(dep, bad) || strings.Contains(bad, ".") && strings.HasPrefix(dep, bad+"/") {
						t.Errorf("%s reaches %s through %s: %s", room, dep, by, rule.why)
					}
				}
			}
		}
	}
}

// TestTheProductNeedsNoEvaluation checks that the product builds without the evaluation's folders.
func TestTheProductNeedsNoEvaluation(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", "noevaluation", "./cmd/stagecoach").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dep := range strings.FieldsSeq(string(out)) {
		for _, evaluation := range []string{"sim/study", "autoscaler/baseline", "bench/cv"} {
			if name := strings.TrimPrefix(dep, module); name == evaluation || strings.HasPrefix(name, evaluation+"/") {
				t.Errorf("with -tags noevaluation, cmd/stagecoach reaches %s, want the tag !noevaluation on the files that import it", name)
			}
		}
	}
}

// reach returns what a room and the rooms that it imports, directly or not, import themselves: the import and one of its
// importers. What the standard library imports in turn is its own business: fmt alone reaches os.
func reach(all map[string]pkg, room string) map[string]string {
	out := map[string]string{}
	for _, dep := range append(all[room].Deps, module+room) {
		name, ours := strings.CutPrefix(dep, module)
		if !ours {
			continue
		}
		if name != room {
			out[dep] = room
		}
		for _, imp := range all[name].Imports {
			out[imp] = name
		}
	}
	return out
}

// TestEachPackageSaysWhatItIsFor wants a package comment of more than a few words.
func TestEachPackageSaysWhatItIsFor(t *testing.T) {
	for name, p := range packages(t) {
		if len(p.GoFiles)+len(p.CgoFiles) == 0 || path.Dir(name) == "third_party/onnx" {
			continue
		}
		if len(strings.Fields(p.Doc)) < 5 {
			t.Errorf("package %s: comment %q, want a sentence or more on what it is for", name, p.Doc)
		}
	}
}

// byHand is how a key would be joined or split without package pipeline.
var byHand = regexp.MustCompile(`"\.openfaas-fn"|\+ ?"\." ?\+ ?(\w+\.)*([nN]amespace|ns)\b|LastIndex(Byte)?\([^)]*['"]\.['"]\)`)

// TestOnePackageKnowsKeys: nobody but package pipeline joins or splits the texts of keys.
func TestOnePackageKnowsKeys(t *testing.T) {
	for name, p := range packages(t) {
		if name == "pipeline" || strings.HasPrefix(name, "third_party/") {
			continue
		}
		for _, file := range append(p.GoFiles, p.CgoFiles...) {
			b, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range byHand.FindAllString(string(b), -1) {
				t.Errorf("%s/%s: %s, want pipeline.Key, pipeline.ParseKey or pipeline.Named", name, file, found)
			}
		}
	}
}

// TestOwnedModules checks the direct imports of modules that one package owns.
func TestOwnedModules(t *testing.T) {
	owners := map[string][]string{
		"github.com/nats-io/":                     {"queue"},
		"github.com/openfaas/":                    {"provider"},
		"github.com/containerd/cgroups/":          {"cgroup"},
		"github.com/opencontainers/runtime-spec/": {"cgroup"},
		"github.com/hashicorp/golang-lru/":        {"keysmanager", "node", "provider"},
		"github.com/google/go-containerregistry/": {"image"},
		"github.com/docker/cli/":                  {"image"},
		"github.com/NVIDIA/":                      {"device"},
		"github.com/vishvananda/":                 {"network"},
		"github.com/google/nftables":              {"network"},
		"go.opentelemetry.io/":                    {"telemetry", "internal/otlptest"},
	}
	for name, p := range packages(t) {
		for _, imp := range p.Imports {
			for prefix, rooms := range owners {
				if strings.HasPrefix(imp, prefix) && !slices.Contains(rooms, name) {
					t.Errorf("%s imports %s, which belongs to %v", name, imp, rooms)
				}
			}
		}
	}
}

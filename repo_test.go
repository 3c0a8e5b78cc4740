// Package stagecoach_test holds the repository's own rules as tests: which packages may depend on
// what, how large types may be, and that each package says what it is for.
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
	"strconv"
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

// groups lists the folders that hold Go packages. Packages of a group may import three things:
// their own group, internal, and the groups that the field imports lists. That field has only
// earlier groups, so imports point one way. All groups are top-level folders, except bench/chart
// and bench/load. These two come before sim, because simulators and running products share them;
// the rest of bench comes after sim.
var groups = []struct {
	name    string
	imports []string
}{
	{"internal", nil},
	{"pipeline", nil},
	{"tensor", nil},
	// Coordinators, policies, simulators and the product learn and read demand alike.
	{"demand", nil},
	{"autoscaler", []string{"pipeline"}},
	{"request", []string{"pipeline", "tensor", "demand", "autoscaler"}},
	{"stage", []string{"tensor", "request"}},
	{"keysmanager", []string{"tensor", "autoscaler", "request", "stage"}},
	{"image", []string{"tensor", "request", "keysmanager", "."}},
	{"provider", []string{"pipeline", "tensor", "demand", "autoscaler", "request", "keysmanager", "image"}},
	{"control", []string{"pipeline", "demand", "autoscaler", "request", "keysmanager"}},
	{"bench/chart", nil},
	{"bench/load", []string{"pipeline", "bench/chart"}},
	// sim imports only the pure core of keysmanager, see below.
	{"sim", []string{"pipeline", "tensor", "demand", "autoscaler", "request", "keysmanager", "bench/chart", "bench/load"}},
	{"functions", []string{"tensor", "request", "stage"}},
	{"templates", []string{"tensor", "stage"}},
	{"scripts", []string{"pipeline", "autoscaler"}}, // cpu-compensation reads records
	{"bench", []string{"pipeline", "tensor", "autoscaler", "request", "stage", "keysmanager", "image", "provider", "control", "bench/chart", "bench/load", "sim", "functions"}},
	{"cmd", []string{"pipeline", "tensor", "autoscaler", "request", "stage", "keysmanager", "image", "provider", "control", "bench/chart", "bench/load", "sim", "functions", "bench"}},
}

// groupOf returns the group of a package, or its folder at the top if it is in none.
func groupOf(name string) string {
	group, _, _ := strings.Cut(name, "/")
	for _, g := range groups {
		if len(g.name) > len(group) && strings.HasPrefix(name+"/", g.name+"/") {
			group = g.name
		}
	}
	return group
}

// TestGroupsImportOneWay checks the direct imports of each group of packages.
func TestGroupsImportOneWay(t *testing.T) {
	allowed, earlier := map[string][]string{}, []string{"."}
	for _, g := range groups {
		for _, name := range g.imports {
			if !slices.Contains(earlier, name) {
				t.Errorf("groups: %s may import %s, want groups that are listed before it", g.name, name)
			}
		}
		allowed[g.name] = append([]string{g.name, "internal"}, g.imports...)
		earlier = append(earlier, g.name)
	}
	for name, p := range packages(t) {
		if name+"/" == module || strings.HasPrefix(name, "internal/proctest") { // a helper of tests
			continue
		}
		group := groupOf(name)
		if allowed[group] == nil {
			t.Errorf("package %s: its group %s is not in the list of groups: move the package, or add the group with the reason", name, group)
		}
		for _, imp := range p.Imports {
			to, ours := strings.CutPrefix(imp+"/", module)
			if to = groupOf(strings.TrimSuffix(to, "/")); to == "" {
				to = "."
			}
			if ours && allowed[group] != nil && !slices.Contains(allowed[group], to) {
				t.Errorf("%s imports %s, but %s may import only %v", name, imp, group, allowed[group])
			}
		}
	}
}

// folders is how many folders the top level may have at most, those of git and of builds apart.
const folders = 19 // charts is where Helm's users look

// TestTheTopLevelShowsTheArchitecture counts the folders of the top level that git knows.
func TestTheTopLevelShowsTheArchitecture(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") && !slices.Contains([]string{"build", "node_modules"}, e.Name()) {
			have = append(have, e.Name())
		}
	}
	if len(have) > folders || len(have) < 10 {
		t.Errorf("%d folders at the top level: %v; want at most %d: put a new one into the group that it belongs to", len(have), have, folders)
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
		// Without task, which reaches tensor's store of files.
		{[]string{"pipeline", "autoscaler/plan", "autoscaler", "autoscaler/baseline", "autoscaler/placement", "autoscaler/policy", "autoscaler/profile"}, []string{"os"}, "pure packages do no I/O"},
		{[]string{"pipeline", "request/task", "autoscaler/plan", "autoscaler", "autoscaler/baseline", "autoscaler/placement", "autoscaler/policy", "autoscaler/profile"}, []string{"net", "net/http", "log/slog", "math/rand/v2"}, "pure packages do no I/O and draw no chance"},
		{[]string{"pipeline"}, []string{module}, "pipeline imports the standard library only"},
		{[]string{"bench/load/arrivals"}, []string{"os", "net", "net/http", "log/slog", module}, "when requests arrive is drawn from a seed alone; simulators use it too"},
		{[]string{"demand"}, []string{"os", "net", "net/http", "log/slog", "math/rand/v2", module + "pipeline", module + "request", module + "tensor"}, "what is learned is a pure core, for shells and simulators alike"},
		{[]string{"internal/sketch"}, []string{"os", "net", "net/http", "log/slog", module}, "quantiles are counted by shells, simulators and reports alike"},
		{[]string{"sim", "sim/qna", "sim/recorded", "sim/simulate", "sim/study", "sim/study/cv", "sim/study/paper", "sim/study/quart"}, []string{module + "control", module + "control/cluster", module + "request/gateway", module + "provider", module + "request/queue", module + "keysmanager", module + "keysmanager/node", module + "keysmanager/resources", module + "keysmanager/sandbox", module + "keysmanager/warden", module + "keysmanager/zygote", "github.com/nats-io"}, "a simulation runs pure cores and policies, and models the shells"},
		{[]string{"autoscaler"}, []string{module + "autoscaler/baseline"}, "ours does not lean on what it is compared with"},
		{[]string{"autoscaler/problem"}, []string{"os", "net", "net/http", "log/slog", "math/rand/v2", module + "autoscaler/baseline"}, "a problem is read, decided and valued without a shell"},
		{[]string{"autoscaler/plan"}, []string{module + "request/flow", module + "request/dispatch", module + "request/queue"}, "policies know no shells"},
		{[]string{"request/flow", "request/dispatch", "request/gateway", "keysmanager", "control", "control/cluster", "stage"}, []string{"github.com/nats-io"}, "package queue is the only importer of NATS"},
		{[]string{"request/flow", "request/dispatch", "request/gateway", "keysmanager", "control", "control/cluster", "stage", "request/queue"}, []string{"github.com/openfaas"}, "package provider is the only importer of faas-provider"},
		{[]string{"request/flow", "request/dispatch", "request/queue", "keysmanager", "keysmanager/sandbox", "provider/secret", "provider/logbook", "control", "request/wire", "tensor", "control/events", "control/telemetry"}, []string{module + "request/gateway", module + "provider", module + "control/cluster"}, "shells meet in cmd"},
		{[]string{"provider/schema"}, []string{"net/http", module + "provider", module + "provider/admin", module + "provider/client"}, "both sides of the API share its words, and nothing else"},
		{[]string{"provider/admin"}, []string{module + "control", module + "control/cluster", module + "control/events", module + "keysmanager", module + "provider/client"}, "shells meet in cmd: admin says in interfaces what it needs of them"},
		{[]string{"cmd/stagecoach/cli", "provider/client"}, []string{module + "request/queue", module + "request/gateway", module + "request/flow", module + "request/dispatch", module + "keysmanager", module + "control", module + "control/cluster", module + "provider/admin", "github.com/nats-io"}, "a command knows the gateway's API, and no part of the gateway"},
		{[]string{"keysmanager/cache"}, []string{module, "os", "net", "net/http", "log/slog", "math/rand/v2"}, "what a node caches is decided by a pure core, which simulators run too"},
		{[]string{"keysmanager/resources"}, []string{module + "keysmanager", module + "keysmanager/node", module + "keysmanager/zygote", module + "keysmanager/cgroup", module + "keysmanager/device", module + "keysmanager/network", "github.com/prometheus"}, "what a process holds does not depend on what it is"},
		{[]string{"keysmanager/zygote"}, []string{module + "keysmanager", module + "keysmanager/node", module + "stage/zygote", "github.com/prometheus"}, "the protocol with a zygote knows no orders, and not the other side's code"},
		{[]string{"keysmanager/cgroup"}, []string{module}, "cgroup knows the kernel's files and nothing of who uses them"},
		{[]string{"keysmanager/device"}, []string{module}, "what a machine has, anybody may ask"},
		{[]string{"keysmanager/network"}, []string{module}, "network knows the kernel's links and filters and nothing of what runs behind them"},
		{[]string{"keysmanager/network/cni"}, []string{module + "keysmanager", module + "keysmanager/resources", module + "keysmanager/sandbox", module + "keysmanager/node"}, "cni runs plugins and leaves the kernel to network"},
		{[]string{"keysmanager/warden"}, []string{module + "keysmanager", module + "request/queue", "net/http", "github.com/prometheus"}, "what outlives all else knows nothing of it"},
		{[]string{"keysmanager/container/entry"}, []string{module, "net/http", "log/slog"}, "a container's first program is small"},
		{[]string{"keysmanager/container", "keysmanager/pods"}, []string{module + "keysmanager", module + "keysmanager/node", module + "keysmanager/warden", module + "keysmanager/resources", module + "keysmanager/network", module + "request/wire"}, "a runtime knows no orders and no zygotes"},
		{[]string{"keysmanager", "keysmanager/warden", "keysmanager/watchdog", "keysmanager/zygote", "keysmanager/resources", "keysmanager/sandbox"}, []string{module + "keysmanager/container", module + "keysmanager/pods", "github.com/containerd/containerd/"}, "code above a runtime does not know which one runs"},
		{[]string{"keysmanager/node"}, []string{module + "keysmanager", module + "keysmanager/sandbox", module + "keysmanager/warden", module + "request/queue", module + "autoscaler/plan", module + "control/cluster", "github.com/nats-io"}, "the node protocol is of both sides, and of neither"},
		{[]string{"keysmanager/tunnel"}, []string{module + "keysmanager", module + "keysmanager/node", module + "request/wire", module + "request/queue", "net/http"}, "a tunnel carries bytes and knows nothing of what they are"},
		{[]string{"image/stack"}, []string{module, "net", "net/http"}, "stack reads files and nothing else"},
		{[]string{"image/builder"}, []string{module + "request/gateway", module + "provider", module + "request/queue", module + "keysmanager", module + "request/flow", module + "request/dispatch"}, "images are built without a running stagecoach"},
		{[]string{"stage"}, []string{module + "request/dispatch", module + "request/flow", module + "keysmanager", "github.com/prometheus"}, "a stage binary is small"},
		{[]string{"tensor/safetensors"}, []string{module + "request/wire", module + "stage", module + "keysmanager/sandbox", module + "keysmanager", "net", "net/http"}, "who reads a model needs nobody who serves it"},
		{[]string{"functions/minilm/stages", "functions/ocr/stages"}, []string{module + "tensor/onnx", module + "tensor/safetensors", "google.golang.org/protobuf"}, "what builds a model has no place in its stages"},
	}
	for _, rule := range forbidden {
		for _, room := range rule.rooms {
			if _, ok := all[room]; !ok {
				t.Errorf("no package %s: mend this test or the tree", room)
			}
			for dep, by := range reach(all, room) {
				for _, bad := range rule.deps {
					below := strings.HasSuffix(bad, "/") || strings.Contains(bad, ".") && !strings.HasPrefix(bad, module)
					if dep == bad || below && strings.HasPrefix(dep, strings.TrimSuffix(bad, "/")+"/") {
						t.Errorf("%s reaches %s through %s: %s", room, dep, by, rule.why)
					}
				}
			}
		}
	}
}

// TestOnlyNodesHaveUnixSockets checks that the rooms above wire take a replica's connection as a
// wire.Socket, because a replica may run on another machine one day.
func TestOnlyNodesHaveUnixSockets(t *testing.T) {
	for name, p := range packages(t) {
		switch group, _, _ := strings.Cut(name, "/"); {
		case group == "stage", group == "internal", group == "keysmanager", name == "request/wire":
			continue // in the replica's process or on its machine, and what hides the socket
		}
		for _, file := range append(p.GoFiles, p.CgoFiles...) {
			b, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(b), "net.UnixConn") {
				t.Errorf("%s/%s has a net.UnixConn, want a wire.Socket", name, file)
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
		for _, evaluation := range []string{"sim/study", "autoscaler/baseline"} {
			if name := strings.TrimPrefix(dep, module); name == evaluation || strings.HasPrefix(name, evaluation+"/") {
				t.Errorf("with -tags noevaluation, cmd/stagecoach reaches %s, want the tag !noevaluation on the files that import it", name)
			}
		}
	}
}

// reach returns what a room imports, directly or through other packages of this module, each with
// one of its importers. It leaves out what the standard library imports in turn: fmt alone reaches
// os.
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
		if len(p.GoFiles)+len(p.CgoFiles) == 0 || path.Dir(name) == "internal/third_party/onnx" {
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
		if name == "pipeline" || strings.HasPrefix(name, "internal/third_party/") {
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

// textOfError matches code that decides by the text of an error.
var textOfError = regexp.MustCompile(`strings\.(Contains|HasPrefix|HasSuffix|Cut|CutPrefix|CutSuffix|EqualFold|Index)\([^"\n]*\.Error\(\).*|[=!]= *(\w+\.)*[eE]rr\.Error\(\).*|[eE]rr\.Error\(\) == .*`)

// TestErrorsAreValues checks that code decides by the values of errors, not by their texts. The
// texts that may be read come from libraries that give no values, or are only shortened.
func TestErrorsAreValues(t *testing.T) {
	mayRead := []string{
		`"json: unknown field "`, // encoding/json
		`number.Error()`,         // of NATS's server and of containerd
		`, "\n")`,                // the rest is the stack of a panic
	}
	for name, p := range packages(t) {
		for _, file := range append(p.GoFiles, p.CgoFiles...) {
			b, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range textOfError.FindAllString(string(b), -1) {
				if !slices.ContainsFunc(mayRead, func(text string) bool { return strings.Contains(found, text) }) {
					t.Errorf("%s/%s: %s: want errors.Is or errors.As", name, file, found)
				}
			}
		}
	}
}

// TestOwnedModulesHaveOneImporter checks the direct imports of modules that one package owns.
func TestOwnedModulesHaveOneImporter(t *testing.T) {
	owners := map[string][]string{
		"github.com/nats-io/":                     {"request/queue", "internal/natstest"},
		"github.com/openfaas/":                    {"provider"},
		"github.com/containerd/cgroups/":          {"keysmanager/cgroup"},
		"github.com/opencontainers/runtime-spec/": {"keysmanager/cgroup", "keysmanager/container"},
		"github.com/containerd/containerd/":       {"keysmanager/container", "image/contained", "internal/containerdtest"},
		"github.com/containerd/errdefs":           {"keysmanager/container", "image/contained"},
		"github.com/hashicorp/golang-lru/":        {"keysmanager/node", "provider"},
		"github.com/google/go-containerregistry/": {"image", "internal/kubetest", "scripts/oci"},
		"github.com/docker/cli/":                  {"image"},
		"github.com/NVIDIA/":                      {"keysmanager/device"},
		"github.com/vishvananda/":                 {"keysmanager/network", "internal/netnstest"},
		"github.com/google/nftables":              {"keysmanager/network", "internal/netnstest"},
		"github.com/containernetworking/cni/":     {"keysmanager/network/cni"},
		"github.com/hashicorp/yamux":              {"keysmanager/tunnel"},
		"go.opentelemetry.io/":                    {"control/telemetry", "internal/otlptest"},
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

// pathRow is a row of the table in docs/deployment-path.md: its number, room, function and caller.
var pathRow = regexp.MustCompile("(?m)^\\| ([0-9]+) \\| `([a-z/]+)` \\| `([A-Za-z]+)\\.([A-Za-z]+)` \\| ([0-9A-Za-z]+) \\|")

// mostOnPath is how many functions a deployment may pass through.
const mostOnPath = 40

// TestTheDeploymentPathIsInTheCode checks that each function of docs/deployment-path.md exists, and
// that it is called by the function of the row that the page says it comes from.
func TestTheDeploymentPathIsInTheCode(t *testing.T) {
	page, err := os.ReadFile("docs/deployment-path.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := pathRow.FindAllStringSubmatch(string(page), -1)
	if len(rows) < 20 || len(rows) > mostOnPath {
		t.Errorf("%d rows, want 20 to %d: take out what only passes a deployment on", len(rows), mostOnPath)
	}
	bodies := map[string]string{} // by number
	for i, row := range rows {
		number, room, receiver, function, from := row[1], row[2], row[3], row[4], row[5]
		if number != strconv.Itoa(i+1) {
			t.Errorf("row %d has the number %s", i+1, number)
		}
		if bodies[number] = bodyOf(t, room, receiver, function); bodies[number] == "" {
			t.Errorf("row %s: no method %s of %s in %s: correct docs/deployment-path.md", number, function, receiver, room)
		}
		switch from {
		case "HTTP", "NATS", "callback", "channel":
			continue
		}
		if caller, ok := bodies[from]; !ok || !regexp.MustCompile(`\b`+function+`\(`).MatchString(caller) {
			t.Errorf("row %s: row %s does not call %s: correct docs/deployment-path.md", number, from, function)
		}
	}
}

// bodyOf returns the source of a method in a room; "": there is none.
func bodyOf(t *testing.T, room, receiver, method string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(room, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	head := regexp.MustCompile(`(?m)^func \(\w* ?\*?` + receiver + `(?:\[\w+\])?\) ` + method + `\(`)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if at := head.FindIndex(b); at != nil {
			rest := string(b[at[1]:])
			body, _, _ := strings.Cut(rest, "\n}\n")
			return body
		}
	}
	return ""
}

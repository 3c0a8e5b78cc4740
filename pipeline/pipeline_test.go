package pipeline

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseReadsEveryField(t *testing.T) {
	got, err := Parse("ocr-detect", "openfaas-fn",
		map[string]string{"com.openfaas.scale.min": "0", "com.openfaas.scale.max": "8", "com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "90", "app": "x"},
		map[string]string{
			"stagecoach.dev/pipeline": "ocr, b", "stagecoach.dev/next": "z , a", "stagecoach.dev/each": "true", "stagecoach.dev/join": "2",
			"stagecoach.dev/slo": "400ms", "stagecoach.dev/gpu": "1", "stagecoach.dev/gpu-memory": "8Gi", "stagecoach.dev/start": "map", "stagecoach.dev/network": " none", "stagecoach.dev/queue-limit": "5", "stagecoach.dev/weight": "3",
			"stagecoach.dev/idempotent": "false", "stagecoach.dev/batch": "4", "stagecoach.dev/accuracy": "0.9", "stagecoach.dev/items": "one", "stagecoach.dev/runtime-class": "gvisor",
			"stagecoach.dev/drop-capabilities": "NET_BIND_SERVICE, CAP_CHOWN", "stagecoach.dev/cdi-devices": "vendor.com/device=b, vendor.com/device=a:0", "other/x": "y",
			"stagecoach.dev/length": " tensor:input:0:1", "stagecoach.dev/rank": "least-slack ", "stagecoach.dev/allocator": "loki", "stagecoach.dev/route": "best", "stagecoach.dev/max-length": "128", "stagecoach.dev/min-accuracy": "0.75",
		})
	want := Function{
		Name: "ocr-detect", Namespace: "openfaas-fn", Pipelines: []string{"b", "ocr"}, Next: []Edge{{To: "a"}, {To: "z"}},
		Each: true, Items: "one", Join: 2, SLO: 400 * time.Millisecond, GPU: 1, GPUMemory: 8 << 30, Start: "map", QueueLimit: 5, Weight: 3, Batching: Batching{Batch: 4}, Variant: Variant{Accuracy: 0.9, MaxLength: 128, MinAccuracy: 0.75}, Length: "tensor:input:0:1", Policies: Policies{Allocator: "loki", Rank: RankLeastSlack, Route: "best"},
		Isolation: Isolation{Network: "none", RuntimeClass: "gvisor", DropCapabilities: []string{"CAP_CHOWN", "CAP_NET_BIND_SERVICE"}, CDIDevices: []string{"vendor.com/device=a:0", "vendor.com/device=b"}},
		Async:     defaultAsync(), Scale: Scale{Min: 0, Max: 8, Zero: true, ZeroAge: 90 * time.Second},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
}

func TestParseDefaultsAreOpenFaaS(t *testing.T) {
	f, err := Parse("f", "ns", nil, nil)
	if err != nil || f.Scale != (Scale{Min: 1, Max: 20, ZeroAge: 15 * time.Minute}) || !f.Idempotent || f.QueueLimit != 1000 || f.Weight != 1 {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestParseNamesEachBadField(t *testing.T) {
	for name, tc := range map[string]struct {
		labels, annotations map[string]string
		paths               []string
		want                string
	}{
		"unknown":           {nil, map[string]string{"stagecoach.dev/nxt": "a"}, []string{`annotations["stagecoach.dev/nxt"]`}, "one of accuracy"},
		"self":              {nil, map[string]string{"stagecoach.dev/pipeline": "p", "stagecoach.dev/next": "f"}, []string{`annotations["stagecoach.dev/next"]`}, "cannot follow itself"},
		"conditional":       {nil, map[string]string{"stagecoach.dev/pipeline": "p", "stagecoach.dev/next": "a if output.x"}, []string{`annotations["stagecoach.dev/next"]`}, "not supported yet"},
		"no pipeline":       {nil, map[string]string{"stagecoach.dev/next": "a"}, []string{`annotations["stagecoach.dev/next"]`}, "stagecoach.dev/pipeline beside it"},
		"twice":             {nil, map[string]string{"stagecoach.dev/pipeline": "p,p"}, []string{`annotations["stagecoach.dev/pipeline"]`}, "once"},
		"slo":               {nil, map[string]string{"stagecoach.dev/slo": "-3s"}, []string{`annotations["stagecoach.dev/slo"]`}, "above zero"},
		"network":           {nil, map[string]string{"stagecoach.dev/network": "bridge"}, []string{`annotations["stagecoach.dev/network"]`}, "default, host or none"},
		"class":             {nil, map[string]string{"stagecoach.dev/runtime-class": "My/Class"}, []string{`annotations["stagecoach.dev/runtime-class"]`}, "lower-case letters"},
		"capability":        {nil, map[string]string{"stagecoach.dev/drop-capabilities": "CHOWN,FLY"}, []string{`annotations["stagecoach.dev/drop-capabilities"]`}, "capabilities of Linux with commas between"},
		"all and more":      {nil, map[string]string{"stagecoach.dev/drop-capabilities": "CHOWN,ALL"}, []string{`annotations["stagecoach.dev/drop-capabilities"]`}, "ALL alone"},
		"device":            {nil, map[string]string{"stagecoach.dev/cdi-devices": "/dev/null"}, []string{`annotations["stagecoach.dev/cdi-devices"]`}, "vendor.com/class=name"},
		"device twice":      {nil, map[string]string{"stagecoach.dev/cdi-devices": "a.b/c=d,a.b/c=d"}, []string{`annotations["stagecoach.dev/cdi-devices"]`}, "each device once"},
		"items":             {nil, map[string]string{"stagecoach.dev/items": "all"}, []string{`annotations["stagecoach.dev/items"]`}, "many or one"},
		"start":             {nil, map[string]string{"stagecoach.dev/start": "warm"}, []string{`annotations["stagecoach.dev/start"]`}, "auto, fork, heap, map or cold"},
		"gpu memory":        {nil, map[string]string{"stagecoach.dev/gpu": "1", "stagecoach.dev/gpu-memory": "8GB"}, []string{`annotations["stagecoach.dev/gpu-memory"]`}, "a size such as 512Mi or 8Gi"},
		"too much":          {nil, map[string]string{"stagecoach.dev/gpu": "1", "stagecoach.dev/gpu-memory": "9999999Ti"}, []string{`annotations["stagecoach.dev/gpu-memory"]`}, "a size such as"},
		"process and gpus":  {nil, map[string]string{"stagecoach.dev/gpu": "2", "stagecoach.dev/process": "shared"}, []string{`annotations["stagecoach.dev/gpu"]`}, "0 or 1 beside stagecoach.dev/process"},
		"process and start": {nil, map[string]string{"stagecoach.dev/start": "cold", "stagecoach.dev/process": "shared"}, []string{`annotations["stagecoach.dev/start"]`}, "auto beside stagecoach.dev/process"},
		"process name":      {nil, map[string]string{"stagecoach.dev/process": "a b"}, []string{`annotations["stagecoach.dev/process"]`}, "letters, digits"},
		"no gpu":            {nil, map[string]string{"stagecoach.dev/gpu-memory": "8Gi"}, []string{`annotations["stagecoach.dev/gpu-memory"]`}, "stagecoach.dev/gpu beside it"},
		"rank":              {nil, map[string]string{"stagecoach.dev/rank": "lifo"}, []string{`annotations["stagecoach.dev/rank"]`}, "fifo, fair or least-slack"},
		"allocator":         {nil, map[string]string{"stagecoach.dev/allocator": "Lo ki"}, []string{`annotations["stagecoach.dev/allocator"]`}, "the name of a policy"},
		"route":             {nil, map[string]string{"stagecoach.dev/route": ""}, []string{`annotations["stagecoach.dev/route"]`}, "the name of a policy"},
		"length":            {nil, map[string]string{"stagecoach.dev/length": "tokens"}, []string{`annotations["stagecoach.dev/length"]`}, "tensor:NAME:DIMENSION with a dimension from 0 to 15, bytes or items"},
		"no length":         {nil, map[string]string{"stagecoach.dev/length": ""}, []string{`annotations["stagecoach.dev/length"]`}, "tensor:NAME:DIMENSION"},
		"length of a variant": {
			nil,
			map[string]string{"stagecoach.dev/variant-of": "s", "stagecoach.dev/length": "bytes", "stagecoach.dev/rank": "fair", "stagecoach.dev/route": "best", "stagecoach.dev/allocator": "loki", "stagecoach.dev/min-accuracy": "0.5"},
			[]string{`annotations["stagecoach.dev/allocator"]`, `annotations["stagecoach.dev/length"]`, `annotations["stagecoach.dev/min-accuracy"]`, `annotations["stagecoach.dev/rank"]`, `annotations["stagecoach.dev/route"]`},
			"declares it",
		},
		"own variant": {nil, map[string]string{"stagecoach.dev/variant-of": "f"}, []string{`annotations["stagecoach.dev/variant-of"]`}, "no variant of itself"},
		"variant in a graph": {
			nil,
			map[string]string{"stagecoach.dev/variant-of": "s", "stagecoach.dev/pipeline": "p", "stagecoach.dev/next": "x", "stagecoach.dev/each": "true", "stagecoach.dev/join": "all", "stagecoach.dev/slo": "1s"},
			[]string{`annotations["stagecoach.dev/each"]`, `annotations["stagecoach.dev/join"]`, `annotations["stagecoach.dev/next"]`, `annotations["stagecoach.dev/pipeline"]`, `annotations["stagecoach.dev/slo"]`},
			"declares it",
		},
		"min zero":    {map[string]string{"com.openfaas.scale.min": "0"}, nil, []string{`labels["com.openfaas.scale.min"]`}, "scale.zero"},
		"min and max": {map[string]string{"com.openfaas.scale.min": "9", "com.openfaas.scale.max": "3"}, nil, []string{`labels["com.openfaas.scale.min"]`}, "at most"},
		"type":        {map[string]string{"com.openfaas.scale.type": "magic"}, nil, []string{`labels["com.openfaas.scale.type"]`}, "rps"},
		"three at once": {
			map[string]string{"com.openfaas.scale.max": "x"},
			map[string]string{"stagecoach.dev/each": "maybe", "stagecoach.dev/join": "none"},
			[]string{`annotations["stagecoach.dev/each"]`, `annotations["stagecoach.dev/join"]`, `labels["com.openfaas.scale.max"]`},
			"true or false",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("f", "ns", tc.labels, tc.annotations)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got %v, want an error with %q", err, tc.want)
			}
			if paths := fieldPaths(err); !slices.Equal(paths, tc.paths) {
				t.Errorf("paths %q, want %q", paths, tc.paths)
			}
		})
	}
}

// TestNewNamesAreKubernetesLabels compares names of functions and pipelines with Kubernetes'
// labels. Names that earlier versions stored can still be read.
func TestNewNamesAreKubernetesLabels(t *testing.T) {
	long := strings.Repeat("a", 63)
	for _, name := range []string{"a", "0", "a-b", "0-9", long} {
		if _, err := Parse(name, "ns", nil, map[string]string{Prefix + "pipeline": name, Prefix + "next": name + "0"}); err != nil && len(name) < 63 {
			t.Errorf("%q: %v", name, err)
		}
		if !ValidName(name) {
			t.Errorf("%q is refused", name)
		}
	}
	for _, name := range []string{"A", "a.b", "a_b", "-a", "a-", "é", long + "a", ".", "a.b.c"} {
		for _, wrong := range []map[string]string{
			{Prefix + "pipeline": "p," + name, Prefix + "next": name + ",x"},
			{Prefix + "variant-of": name},
		} {
			want := []string{"name"}
			for _, annotation := range slices.Sorted(maps.Keys(wrong)) {
				want = append(want, fmt.Sprintf("annotations[%q]", annotation))
			}
			_, err := Parse(name, "ns", nil, wrong)
			if err == nil {
				t.Errorf("%q is accepted", name)
				continue
			}
			paths := slices.Compact(fieldPaths(err))
			if paths = slices.DeleteFunc(paths, func(p string) bool { return !slices.Contains(want, p) }); !slices.Equal(paths, want) {
				t.Errorf("%q: errors at %q, want %q", name, paths, want)
			}
		}
		if _, err := ParseStored(name, "ns", nil, map[string]string{Prefix + "pipeline": name}); err != nil && name != "é" {
			t.Errorf("%q, as it may be stored: %v", name, err)
		}
	}
	for _, name := range []string{"", "a b", "a/b", strings.Repeat("a", 254)} {
		if _, err := ParseStored(name, "ns", nil, nil); err == nil {
			t.Errorf("%q, which could never be stored, is accepted", name)
		}
	}
	if f, err := Parse("f", "ns", nil, map[string]string{Prefix + "process": "Shared.1"}); err != nil || f.Process != "Shared.1" {
		t.Errorf("process %q, %v: it is no function's name", f.Process, err)
	}
}

func fieldPaths(err error) []string {
	var out []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var f *FieldError
		if errors.As(e, &f) {
			out = append(out, f.Path)
		}
	}
	return out
}

// stage returns a function of pipeline p with the given successors.
func stage(t testing.TB, name, next string, more ...string) Function {
	t.Helper()
	a := map[string]string{Prefix + "pipeline": "p"}
	if next != "" {
		a[Prefix+"next"] = next
	}
	for i := 0; i < len(more); i += 2 {
		a[Prefix+more[i]] = more[i+1]
	}
	if a[Prefix+"variant-of"] != "" {
		delete(a, Prefix+"pipeline")
	}
	f, err := Parse(name, "ns", nil, a)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// permutations calls f with every order of fns.
func permutations(fns []Function, f func([]Function)) {
	if len(fns) == 0 {
		f(nil)
		return
	}
	for i := range fns {
		rest := append(slices.Clone(fns[:i]), fns[i+1:]...)
		permutations(rest, func(p []Function) { f(append([]Function{fns[i]}, p...)) })
	}
}

func TestDeployOrderDoesNotMatter(t *testing.T) {
	fns := []Function{
		stage(t, "e-entry", "c,d", "slo", "1s"), stage(t, "c", "b", "each", "true"), stage(t, "d", "b"),
		stage(t, "b", "a", "join", "1"), stage(t, "a", ""),
	}
	var first []Pipeline
	n := 0
	permutations(fns, func(order []Function) {
		n++
		// An incomplete deployment must never panic, and only the complete one has no faults.
		for k := range order {
			if ps := Assemble(order[:k]); k > 0 && len(ps) == 1 && len(ps[0].Faults) == 0 && k < len(fns) && hasDanglingEdge(order[:k]) {
				t.Fatalf("%d of %d stages deployed with an edge to nowhere, no faults", k, len(fns))
			}
		}
		got := Assemble(order)
		if first == nil {
			first = got
		}
		if !reflect.DeepEqual(got, first) {
			t.Fatalf("order %d gives another result:\n%+v\n%+v", n, got, first)
		}
	})
	if n != 120 {
		t.Fatalf("%d orders, want 120", n)
	}
	p := first[0]
	var names []string
	for _, s := range p.Stages {
		names = append(names, s.Name)
	}
	if len(p.Faults) > 0 || p.Entry != "e-entry" || p.SLO != time.Second || !slices.Equal(names, []string{"e-entry", "c", "d", "b", "a"}) {
		t.Errorf("entry %q, SLO %v, stages %v, faults %v", p.Entry, p.SLO, names, p.Faults)
	}
	if prev := p.Stages[3].Prev; !slices.Equal(prev, []string{"c", "d"}) {
		t.Errorf("predecessors of b: %v", prev)
	}
}

func TestTiesAreOrderedByName(t *testing.T) {
	p := Assemble([]Function{stage(t, "b", "a,c"), stage(t, "a", ""), stage(t, "c", "")})[0]
	var got []string
	for _, s := range p.Stages {
		got = append(got, s.Name)
	}
	if want := []string{"b", "a", "c"}; !slices.Equal(got, want) {
		t.Errorf("stages %v, want %v: a and c may both come second", got, want)
	}
}

func hasDanglingEdge(fns []Function) bool {
	have := map[string]bool{}
	for _, f := range fns {
		have[f.Name] = true
	}
	return slices.ContainsFunc(fns, func(f Function) bool {
		return slices.ContainsFunc(f.Next, func(e Edge) bool { return !have[e.To] })
	})
}

func TestFaultsNameFunctionAndAnnotation(t *testing.T) {
	other, err := Parse("alien", "ns", nil, map[string]string{Prefix + "pipeline": "q"})
	if err != nil {
		t.Fatal(err)
	}
	named, err := Parse("p", "ns", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		fns  []Function
		want string
	}{
		"missing":      {[]Function{stage(t, "a", "gone")}, `function "a", annotation stagecoach.dev/next: got "gone", which is not deployed`},
		"two entries":  {[]Function{stage(t, "a", "c"), stage(t, "b", "c"), stage(t, "c", "")}, `function "b", annotation stagecoach.dev/pipeline: got "p", which has the entry "a" already`},
		"the entry":    {[]Function{stage(t, "a", "c"), stage(t, "b", "c", "slo", "1s"), stage(t, "c", "")}, `function "a", annotation stagecoach.dev/pipeline: got "p", which has the entry "b" already`},
		"cycle":        {[]Function{stage(t, "a", "b"), stage(t, "b", "c"), stage(t, "c", "b")}, `function "b", annotation stagecoach.dev/next: got the cycle b > c > b`},
		"unreachable":  {[]Function{stage(t, "a", ""), stage(t, "b", "c"), stage(t, "c", "b")}, "got the cycle b > c > b"},
		"behind":       {[]Function{stage(t, "a", "z"), stage(t, "z", "y"), stage(t, "y", "x,b"), stage(t, "x", "z"), stage(t, "b", "")}, "got the cycle x > z > y > x"},
		"all a cycle":  {[]Function{stage(t, "a", "b"), stage(t, "b", "a")}, "no entry"},
		"join":         {[]Function{stage(t, "a", "b"), stage(t, "b", "", "join", "2")}, `annotation stagecoach.dev/join: got 2, want at most its 1`},
		"slo":          {[]Function{stage(t, "a", "b"), stage(t, "b", "", "slo", "1s")}, `function "b", annotation stagecoach.dev/slo`},
		"min-accuracy": {[]Function{stage(t, "a", "b"), stage(t, "b", "", "min-accuracy", "0.5")}, `function "b", annotation stagecoach.dev/min-accuracy: got "0.5", want it on the entry stage "a" alone`},
		"rank":         {[]Function{stage(t, "a", "b"), stage(t, "b", "", "rank", "fair")}, `function "b", annotation stagecoach.dev/rank: got "fair", want it on the entry stage "a" alone`},
		"route":        {[]Function{stage(t, "a", "b", "route", "best"), stage(t, "b", "", "route", "best")}, `function "b", annotation stagecoach.dev/route: got "best", want it on the entry stage "a" alone`},
		"allocator":    {[]Function{stage(t, "a", "b"), stage(t, "b", "", "allocator", "loki")}, `function "b", annotation stagecoach.dev/allocator: got "loki", want it on the entry stage "a" alone`},
		"alien":        {[]Function{stage(t, "a", "alien"), other}, "does not belong to the pipeline"},
		"name taken":   {[]Function{stage(t, "a", ""), named}, `function "a", annotation stagecoach.dev/pipeline: got "p", which is a function's name too`},
		"late name":    {[]Function{stage(t, "a", "p"), stage(t, "p", "")}, `function "p", annotation stagecoach.dev/pipeline: got "p", which is the name of this stage, and the stage follows others`},
		"variant":      {[]Function{stage(t, "a", "b"), stage(t, "b", "", "variant-of", "c")}, `a variant of "c"`},
	} {
		t.Run(name, func(t *testing.T) {
			for _, p := range Assemble(tc.fns) {
				if p.Name != "p" {
					continue
				}
				if !slices.ContainsFunc(p.Faults, func(f Fault) bool { return strings.Contains(f.String(), tc.want) }) {
					t.Errorf("faults %v, want one with %q", p.Faults, tc.want)
				}
				checkFaults(t, p)
				return
			}
			t.Error("no pipeline p")
		})
	}
}

// TestEntryMayHaveThePipelinesName also checks that the order of the functions does not matter.
func TestEntryMayHaveThePipelinesName(t *testing.T) {
	entry, other := stage(t, "p", "a", "slo", "1s"), stage(t, "a", "")
	for _, fns := range [][]Function{{entry, other}, {other, entry}} {
		if p := Assemble(fns)[0]; len(p.Faults) > 0 || p.Entry != "p" || len(p.Stages) != 2 {
			t.Errorf("pipeline %+v, want one without faults that p begins", p)
		}
	}
	variant := stage(t, "p", "", "variant-of", "a")
	if p := Assemble([]Function{other, variant})[0]; len(p.Faults) != 1 || !strings.Contains(p.Faults[0].Got, "a function's name too") {
		t.Errorf("a variant of the pipeline's name: %+v, want a fault: it is no stage", p)
	}
}

// checkFaults checks that a pipeline explains its faults well enough.
func checkFaults(t *testing.T, p Pipeline) {
	t.Helper()
	for _, f := range p.Faults {
		if f.Function == "" || !strings.HasPrefix(f.Annotation, Prefix) || f.Got == "" || f.Want == "" {
			t.Errorf("pipeline %s: fault %+v, want each field set", p.Name, f)
		}
	}
}

// TestRandomGraphsAreOrderedOrFaulty assembles graphs that are often faulty. Without faults, the
// order must be topological, and the entry must reach every stage. In any case, the order of the
// functions must not matter.
func TestRandomGraphsAreOrderedOrFaulty(t *testing.T) {
	good := 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := 1 + r.IntN(6)
		name := r.Perm(n) // names are not in the order of the stages
		var fns []Function
		for i := range n {
			f := Function{Name: fmt.Sprint("s", name[i]), Namespace: "ns", Pipelines: []string{"p"}, Join: r.IntN(8) / 7}
			for k := range n {
				if k > i && r.IntN(2) == 0 || k < i && r.IntN(40) == 0 {
					f.Next = append(f.Next, Edge{To: fmt.Sprint("s", name[k])})
				}
			}
			fns = append(fns, f)
		}
		p := Assemble(fns)[0]
		r.Shuffle(n, func(i, k int) { fns[i], fns[k] = fns[k], fns[i] })
		if again := Assemble(fns)[0]; !reflect.DeepEqual(p, again) {
			t.Fatalf("seed %d: another order of the functions gives\n%+v\n%+v", seed, p, again)
		}
		checkFaults(t, p)
		if len(p.Faults) > 0 {
			continue
		}
		good++
		seen := map[string]bool{p.Entry: true}
		for i, s := range p.Stages {
			if i > 0 && !slices.ContainsFunc(s.Prev, func(prev string) bool { return seen[prev] }) {
				t.Fatalf("seed %d: stage %s is not reached", seed, s.Name)
			}
			for _, prev := range s.Prev {
				if !seen[prev] {
					t.Fatalf("seed %d: stage %s comes before its predecessor %s", seed, s.Name, prev)
				}
			}
			seen[s.Name] = true
		}
	}
	if good < 100 {
		t.Errorf("%d graphs without faults, want at least 100 for the test to mean something", good)
	}
}

func TestVariantsAndOtherNamespacesAreNotStages(t *testing.T) {
	far := stage(t, "far", "")
	far.Namespace = "other"
	ps := Assemble([]Function{far, stage(t, "b-small", "", "variant-of", "b"), stage(t, "b", ""), stage(t, "a", "b")})
	if len(ps) != 2 || ps[0].Namespace != "ns" || ps[1].Namespace != "other" {
		t.Fatalf("pipelines %+v, want p of ns, then p of other", ps)
	}
	if n := ps[0]; len(n.Faults) > 0 || len(n.Stages) != 2 || n.Stages[0].Name != "a" || n.Stages[1].Name != "b" {
		t.Errorf("stages %+v, faults %v, want a and b alone", n.Stages, n.Faults)
	}
}

// TestVariantsBelongToTheirStage checks which variants a stage has, and what is said of the others,
// for every order of the functions.
func TestVariantsBelongToTheirStage(t *testing.T) {
	far := stage(t, "far", "", "variant-of", "b")
	far.Namespace = "other"
	gone := stage(t, "b", "")
	gone.Retained = true
	small, tiny := stage(t, "small", "", "variant-of", "b"), stage(t, "tiny", "", "variant-of", "b")
	for name, c := range map[string]struct {
		fns      []Function
		variants []string // of b
		faults   string
		warnings string
	}{
		"two":                  {[]Function{stage(t, "a", "b"), stage(t, "b", ""), small, tiny}, []string{"small", "tiny"}, "[]", "[]"},
		"another namespace":    {[]Function{stage(t, "a", "b"), stage(t, "b", ""), far}, nil, "[]", "[]"},
		"of a variant":         {[]Function{stage(t, "b", ""), small, stage(t, "x", "", "variant-of", "small")}, []string{"small"}, "[]", `[function "x", annotation stagecoach.dev/variant-of: got "small", which is a variant of "b", want a function that is no variant]`},
		"of a variant's":       {[]Function{stage(t, "b", ""), small, stage(t, "x", "", "variant-of", "y"), stage(t, "y", "", "variant-of", "small")}, []string{"small"}, "[]", `[function "x", annotation stagecoach.dev/variant-of: got "y", which is a variant of "small", want a function that is no variant function "y", annotation stagecoach.dev/variant-of: got "small", which is a variant of "b", want a function that is no variant]`},
		"a cycle":              {[]Function{stage(t, "b", ""), stage(t, "x", "", "variant-of", "y"), stage(t, "y", "", "variant-of", "x")}, nil, "[]", "[]"},
		"retained":             {[]Function{stage(t, "a", "b"), gone, small}, []string{"small"}, "[]", "[]"},
		"retained for nothing": {[]Function{stage(t, "a", "b"), gone}, nil, `[function "a", annotation stagecoach.dev/next: got "b", which is not deployed, want a deployed function of the same namespace]`, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			permutations(c.fns, func(fns []Function) {
				p := Assemble(fns)[0]
				var variants []string
				for _, s := range p.Stages {
					if s.Name == "b" {
						for _, v := range s.Variants {
							variants = append(variants, v.Name)
						}
					}
				}
				if !slices.Equal(variants, c.variants) || fmt.Sprint(p.Faults) != c.faults || fmt.Sprint(p.Warnings) != c.warnings {
					t.Fatalf("variants %v, faults %v, warnings %v; want %v, %s, %s", variants, p.Faults, p.Warnings, c.variants, c.faults, c.warnings)
				}
			})
		})
	}
}

func TestSharedFunctionKeepsEdgesPerPipeline(t *testing.T) {
	shared, err := Parse("s", "ns", nil, map[string]string{Prefix + "pipeline": "p,q", Prefix + "next": "a,b"})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Parse("b", "ns", nil, map[string]string{Prefix + "pipeline": "q"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range Assemble([]Function{shared, stage(t, "a", ""), b}) {
		want := map[string]string{"p": "a", "q": "b"}[p.Name]
		if len(p.Faults) > 0 || len(p.Stages) != 2 || !reflect.DeepEqual(p.Stages[0].Next, []Edge{{To: want}}) {
			t.Errorf("pipeline %s: faults %v, next %v, want %s alone", p.Name, p.Faults, p.Stages[0].Next, want)
		}
	}
}

// TestScaleTarget checks that the type or the value alone declares a target, and that OpenFaaS's
// defaults fill in the rest.
func TestScaleTarget(t *testing.T) {
	for name, tc := range map[string]struct {
		labels map[string]string
		want   Scale
	}{
		"none":            {nil, Scale{}},
		"proportion":      {map[string]string{"target-proportion": "0.5"}, Scale{}},
		"type":            {map[string]string{"type": "rps"}, Scale{Type: "rps", Target: 50, Proportion: 0.9}},
		"target":          {map[string]string{"target": "7"}, Scale{Type: "capacity", Target: 7, Proportion: 0.9}},
		"all":             {map[string]string{"type": "cpu", "target": "500", "target-proportion": "0.7"}, Scale{Type: "cpu", Target: 500, Proportion: 0.7}},
		"its own default": {map[string]string{"type": "capacity", "target": "50", "target-proportion": "0.9"}, Scale{Type: "capacity", Target: 50, Proportion: 0.9}},
	} {
		t.Run(name, func(t *testing.T) {
			labels := map[string]string{}
			for k, v := range tc.labels {
				labels["com.openfaas.scale."+k] = v
			}
			f, err := Parse("f", "ns", labels, nil)
			tc.want.Min, tc.want.Max, tc.want.ZeroAge = DefaultMin, DefaultMax, DefaultZeroAge
			if err != nil || f.Scale != tc.want {
				t.Errorf("%+v, %v, want %+v", f.Scale, err, tc.want)
			}
		})
	}
}

// TestPoliciesOfAStageThatIsAnEntryElsewhere checks that a stage of several pipelines may have the
// policies of the pipeline that begins with it.
func TestPoliciesOfAStageThatIsAnEntryElsewhere(t *testing.T) {
	shared, err := Parse("s", "ns", nil, map[string]string{Prefix + "pipeline": "p,q", Prefix + "rank": "fair", Prefix + "allocator": "loki", Prefix + "route": "best"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range Assemble([]Function{stage(t, "a", "s"), shared}) {
		if len(p.Faults) > 0 {
			t.Errorf("pipeline %s: %v, want no fault", p.Name, p.Faults)
		}
	}
}

func TestParseLength(t *testing.T) {
	for v, want := range map[string]Length{
		"": {}, "bytes": {Unit: LengthBytes}, "items": {Unit: LengthItems},
		"tensor:input_ids:1": {LengthTensor, "input_ids", 1}, "tensor:input:0:15": {LengthTensor, "input:0", 15},
	} {
		if got, ok := ParseLength(v); !ok || got != want {
			t.Errorf("%q: %+v, %t, want %+v", v, got, ok, want)
		}
	}
	for _, v := range []string{"tokens", "tensor", "tensor:", "tensor:x", "tensor::1", "tensor:x:", "tensor:x:-1", "tensor:x:16", "tensor:x:one", "Bytes"} {
		if got, ok := ParseLength(v); ok {
			t.Errorf("%q: %+v, want it refused", v, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("f", "pipeline", "p", "scale.min", "1")
	f.Add("f", "next", "a, b if x, f", "scale.zero", "true")
	f.Add("", "slo", "9999999999999999h", "scale.max", "-1")
	f.Add("f", "length", "tensor:input:0:1", "retry.codes", "503")
	f.Add("f", "rank", "least-slack", "retry.attempts", "3")
	f.Fuzz(func(t *testing.T, name, annotation, value, label, labelValue string) {
		a := map[string]string{Prefix + annotation: value}
		l := map[string]string{"com.openfaas." + label: labelValue}
		before := [2]map[string]string{maps.Clone(a), maps.Clone(l)}
		fn, err := Parse(name, "ns", l, a)
		if !maps.Equal(before[0], a) || !maps.Equal(before[1], l) {
			t.Fatal("Parse changed its arguments")
		}
		if err == nil {
			if s := fn.Scale; s.Max < 1 || s.Min < 0 || s.Min > s.Max || s.Min == 0 && !s.Zero || s.ZeroAge <= 0 || fn.SLO < 0 || fn.QueueLimit < 1 {
				t.Fatalf("accepted %+v", fn)
			}
			if _, ok := ParseLength(fn.Length); !ok {
				t.Fatalf("accepted the length %q", fn.Length)
			}
			for _, p := range Assemble([]Function{fn}) {
				checkFaults(t, p)
			}
		}
	})
}

// TestTakesItems checks whether a JSON array is a list of items or one document. By default, it is
// a list for pipelines and for functions with one call per item, and one document for all other
// functions. The annotation of the function, or of the pipeline's entry, overrides the default.
func TestTakesItems(t *testing.T) {
	f := func(name, items string, each bool, next ...Edge) Function {
		return Function{Name: name, Namespace: "ns", Pipelines: []string{"p"}, Items: items, Each: each, Next: next}
	}
	to := Edge{To: "b"}
	for name, tc := range map[string]struct {
		p    []Pipeline
		want bool
	}{
		"a function":                             {[]Pipeline{f("a", "", false).Alone()}, false},
		"a function of many":                     {[]Pipeline{f("a", "many", false).Alone()}, true},
		"one call per item":                      {[]Pipeline{f("a", "", true).Alone()}, true},
		"one call, although per item":            {[]Pipeline{f("a", "one", true).Alone()}, false},
		"a pipeline":                             {Assemble([]Function{f("a", "", false, to), f("b", "one", false)}), true},
		"a pipeline whose entry is one":          {Assemble([]Function{f("a", "one", false, to), f("b", "many", false)}), false},
		"a pipeline of one stage":                {Assemble([]Function{f("a", "", false)}), true},
		"an entry that is not the first by name": {Assemble([]Function{f("c", "one", false, to), f("b", "many", false)}), false},
		"nothing":                                {[]Pipeline{{}}, true},
	} {
		if got := tc.p[0].TakesItems(); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

func TestBatchAnnotation(t *testing.T) {
	for v, want := range map[string]struct {
		Batching
		most int
	}{
		"1": {Batching{Batch: 1}, 1}, "32": {Batching{Batch: 32}, 32}, "auto": {Batching{AutoBatch: true}, AutoBatch},
		"auto:8": {Batching{Batch: 8, AutoBatch: true}, 8}, " auto:4096 ": {Batching{Batch: 4096, AutoBatch: true}, 4096},
	} {
		f, err := Parse("f", "ns", nil, map[string]string{Prefix + "batch": v})
		if err != nil || f.Batching != want.Batching || f.MostBatch() != want.most {
			t.Errorf("%q: %+v, at most %d, %v, want %+v", v, f.Batching, f.MostBatch(), err, want)
		}
	}
	if n := (Batching{}).MostBatch(); n != 1 {
		t.Errorf("without the annotation: %d, want 1", n)
	}
	for _, v := range []string{"", "0", "5000", "auto:", "auto:0", "auto:x", "8:8", "Auto", "auto:5000"} {
		_, err := Parse("f", "ns", nil, map[string]string{Prefix + "batch": v})
		if err == nil || !strings.Contains(err.Error(), "a number from 1 to 4096, auto, or auto:N") {
			t.Errorf("%q: %v, want an error that says the forms", v, err)
		}
	}
}

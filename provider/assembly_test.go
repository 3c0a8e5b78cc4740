package provider

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// draw returns a function with one of a few names, so that functions often refer to each other.
func draw(r *rand.Rand) types.FunctionDeployment {
	names, pipelines := []string{"a", "b", "c", "d", "p"}, []string{"p", "q", "a"}
	some := func(from []string) string {
		from = slices.Clone(from)
		r.Shuffle(len(from), func(i, k int) { from[i], from[k] = from[k], from[i] })
		return strings.Join(from[:1+r.IntN(2)], ",")
	}
	name := names[r.IntN(len(names))]
	annotations := map[string]string{}
	if r.IntN(4) > 0 {
		annotations["stagecoach.dev/pipeline"] = some(pipelines)
		others := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name })
		switch r.IntN(6) {
		case 0:
			annotations = map[string]string{"stagecoach.dev/variant-of": others[r.IntN(len(others))]}
		case 1:
			annotations["stagecoach.dev/slo"] = "1s"
		default:
			annotations["stagecoach.dev/next"] = some(others)
		}
	}
	ns := []string{"one", "two"}[r.IntN(2)]
	return types.FunctionDeployment{Service: name, Namespace: ns, Image: "i", Annotations: &annotations}
}

// TestIncrementalAssemblyMatchesAssemble makes many changes. After each one, the registry must show
// what pipeline.Assemble makes of all functions.
func TestIncrementalAssemblyMatchesAssemble(t *testing.T) {
	store := newMemoryStore()
	reg, err := OpenRegistry(t.Context(), store, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	r := rand.New(rand.NewPCG(1, 2))
	deployed, retained := map[pipeline.Key]pipeline.Function{}, map[pipeline.Key]pipeline.Function{}
	faulty, whole, varied, warned := 0, 0, 0, 0
	for i := range 3000 {
		d := draw(r)
		key := pipeline.Key{Name: d.Service, Namespace: d.Namespace}
		e := Entry{Key: key.String(), Revision: uint64(i + 1), Deleted: r.IntN(3) == 0}
		in := deployed
		if (*d.Annotations)["stagecoach.dev/variant-of"] == "" && r.IntN(5) == 0 {
			e.Key, in = stagePrefix+e.Key, retained
		}
		if e.Deleted {
			delete(in, key)
		} else {
			f, err := parse(d, pipeline.Parse)
			if err != nil {
				t.Fatal(err)
			}
			f.Retained = strings.HasPrefix(e.Key, stagePrefix)
			in[key] = f
			if e.Value, err = encode(Deployed{Key: key, stored: stored{Deployment: d}}); err != nil {
				t.Fatal(err)
			}
		}
		reg.apply(e)
		all := maps.Clone(retained)
		maps.Copy(all, deployed)
		want := pipeline.Assemble(slices.Collect(maps.Values(all)))
		got := reg.Pipelines()
		if len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Fatalf("change %d, %+v: pipelines\n%+v\nwant\n%+v", i, e, got, want)
		}
		for _, p := range want {
			if len(p.Faults) > 0 {
				faulty++
			} else {
				whole++
			}
			warned += len(p.Warnings)
			for _, s := range p.Stages {
				varied += len(s.Variants)
			}
			key := p.Key()
			if _, function := deployed[key]; !function {
				if g, ok := reg.Graph(key); !ok || !reflect.DeepEqual(g, p) {
					t.Fatalf("change %d: graph %+v, want %+v", i, g, p)
				}
			}
		}
		var keys []pipeline.Key
		for _, d := range reg.Functions() {
			keys = append(keys, pipeline.ParseKey(d.Key.String()))
		}
		if !slices.Equal(keys, slices.SortedFunc(maps.Keys(deployed), pipeline.Key.Compare)) {
			t.Fatalf("change %d: functions %v, want %v", i, keys, slices.SortedFunc(maps.Keys(deployed), pipeline.Key.Compare))
		}
	}
	if faulty < 500 || whole < 500 || varied < 500 || warned < 100 {
		t.Errorf("%d faulty pipelines, %d whole ones, %d variants, %d warnings: it proves little", faulty, whole, varied, warned)
	}
	for key := range deployed {
		reg.apply(Entry{Key: key.String(), Deleted: true})
	}
	for key := range retained {
		reg.apply(Entry{Key: stagePrefix + key.String(), Deleted: true})
	}
	if a := reg.assembly; len(a.functions)+len(a.members)+len(a.leading)+len(a.variants)+len(reg.present) != 0 {
		t.Errorf("without functions the index holds %+v", a)
	}
}

// BenchmarkDeploy replaces one function among many.
func BenchmarkDeploy(b *testing.B) {
	for _, n := range []int{100, 1000, 10_000} {
		b.Run(fmt.Sprintf("functions=%d", n), func(b *testing.B) {
			a := newAPI(b, newMemoryStore(), nil)
			a.Log = slog.New(slog.DiscardHandler)
			fill(a, n)
			for i := 0; b.Loop(); i++ {
				a.must(202, put, functions, deploymentOf(i%n))
			}
		})
	}
}

// BenchmarkList lists all functions.
func BenchmarkList(b *testing.B) {
	for _, n := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("functions=%d", n), func(b *testing.B) {
			a := newAPI(b, newMemoryStore(), nil)
			a.Log = slog.New(slog.DiscardHandler)
			fill(a, n)
			for b.Loop() {
				a.must(200, get, functions, "")
			}
		})
	}
}

// fill deploys functions, three to a pipeline.
func fill(a *api, n int) {
	for i := range n {
		a.must(202, post, functions, deploymentOf(i))
	}
}

func deploymentOf(i int) string {
	next := ""
	if i%3 < 2 {
		next = fmt.Sprintf(`,"stagecoach.dev/next":"fn-%05d"`, i+1)
	}
	return fmt.Sprintf(`{"service":"fn-%05d","image":"stagecoach/echo:1","envVars":{"a":"b"},"labels":{"com.openfaas.scale.zero":"true","com.openfaas.scale.min":"0"},`+
		`"annotations":{"stagecoach.dev/pipeline":"p%d"%s}}`, i, i/3, next)
}

package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestVariantsAreShownUnderTheirStage deploys a stage with two variants, and a variant of nothing.
// The tables of the commands, the JSON of the API and the metrics show what serves the stage.
func TestVariantsAreShownUnderTheirStage(t *testing.T) {
	t.Parallel()
	r := start(t)
	c := &operator{t, t.TempDir(), r.Base}
	c.write("stack.yml", `
version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  a-short: {image: "stagecoach/noop:0.1.0", annotations: {stagecoach.dev/variant-of: read, stagecoach.dev/max-length: "64"}}
  b-weak: {image: "stagecoach/noop:0.1.0", labels: {com.openfaas.scale.min: "0", com.openfaas.scale.zero: "true"}, annotations: {stagecoach.dev/variant-of: read, stagecoach.dev/accuracy: "0.87"}}
  m-other: {image: "stagecoach/noop:0.1.0"}
  read: {image: "stagecoach/noop:0.1.0", annotations: {stagecoach.dev/pipeline: texts}}
`)
	c.run("", "", "deploy", "--wait")
	if err := r.Deploy(t.Context(), client.Deployment{Service: "lost", Image: "stagecoach/noop:0.1.0", Annotations: map[string]string{"stagecoach.dev/variant-of": "nothing"}}); err != nil {
		t.Fatal(err)
	}
	// A variant of nothing serves by its own name.
	for _, name := range []string{"read", "a-short", "m-other", "lost"} {
		r.must(http.StatusOK, http.MethodPost, "/function/"+name, "x")
	}
	c.run(`(?s)FUNCTION .*\nlost .*it serves no stage.*\nm-other .*\nread +.* 1/1 +ready.*\n  a-short .* 1/1 +ready.*\n  b-weak .* 0/0 +asleep.*\n$`, "", "list")
	c.run(`(?m)^Variants: +a-short \(accuracy 1, max-length 64\): 1, 1 ready, ready.*\n +b-weak \(accuracy 0\.87\): 0, 0 ready, asleep`, "", "describe", "read")
	c.run(`(?m)^Variant of: +read$`, "", "describe", "a-short")
	for _, name := range []string{"m-other", "a-short"} {
		if out := c.run("Name: +"+name, "", "describe", name); strings.Contains(out, "Variants:") {
			t.Errorf("describe %s: %s, want no variants", name, out)
		}
	}
	c.run(`(?m)^read +1/1 .*\n  a-short \(accuracy 1, max-length 64\) +1/1 .*ready.*\n  b-weak \(accuracy 0\.87\) +0/0 .*asleep`, "", "pipeline", "describe", "texts")
	c.run(`(?m)^read +[\d.]+ .*\n  a-short +[\d.]+ .*\n  b-weak +[\d.]+ `, "", "top", "--once")

	var f client.FunctionStatus
	decode(t, c.run("", "", "describe", "--json", "read"), &f)
	if got := f.Annotations[provider.VariantsAnnotation]; !strings.HasPrefix(got, "a-short (accuracy 1, max-length 64): 1, 1 ready, ready") || !strings.Contains(got, " | b-weak (accuracy 0.87): 0, 0 ready, asleep") {
		t.Errorf("describe --json: its variants are %q", got)
	}
	var p provider.PipelineStatus
	decode(t, c.run("", "", "pipeline", "describe", "--json", "texts"), &p)
	if len(p.Stages) != 1 || len(p.Stages[0].Variants) != 2 || p.Stages[0].Variants[0].MaxLength != 64 || p.Stages[0].Variants[1].Accuracy != 0.87 || p.Stages[0].Variants[0].AvailableReplicas != 1 {
		t.Errorf("pipeline describe --json: %+v", p.Stages)
	}
	var top schema.Top
	decode(t, c.run("", "", "top", "--json"), &top)
	var order []string
	for _, f := range top.Functions {
		order = append(order, f.Name+" "+f.VariantOf)
	}
	const ns = ".openfaas-fn"
	if got, want := strings.Join(order, ", "), "m-other"+ns+" , lost"+ns+" nothing"+ns+", read"+ns+" , a-short"+ns+" read"+ns+", b-weak"+ns+" read"+ns; got != want {
		t.Errorf("top --json: %s, want %s", got, want)
	}
	for _, sample := range []string{
		`accuracy="1",function="read.openfaas-fn",max_length="",stage="read.openfaas-fn"`,
		`accuracy="1",function="a-short.openfaas-fn",max_length="64",stage="read.openfaas-fn"`,
		`accuracy="0.87",function="b-weak.openfaas-fn",max_length="",stage="read.openfaas-fn"`,
	} {
		if v := r.value("stagecoach_variant_info{" + sample + "}"); v != 1 {
			t.Errorf("stagecoach_variant_info{%s} is %v, want 1", sample, v)
		}
	}
	metrics := string(r.must(http.StatusOK, http.MethodGet, "/metrics", "").Body)
	if n := strings.Count(metrics, "\nstagecoach_variant_info{"); n != 3 {
		t.Errorf("%d samples of stagecoach_variant_info, want 3: a function without variants and a variant of nothing have none", n)
	}
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

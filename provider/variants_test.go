package provider

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestAStageLivesOnInItsVariants deploys a pipeline whose stage has a variant, and removes and
// deploys its functions in every order that matters.
func TestAStageLivesOnInItsVariants(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"detect","image":"stagecoach/x:1","annotations":{"stagecoach.dev/pipeline":"ocr","stagecoach.dev/next":"read"}}`)
	read := in("ocr", "read")
	small := `{"service":"small","image":"stagecoach/x:1","annotations":{"stagecoach.dev/variant-of":"read","stagecoach.dev/accuracy":"0.87"}}`
	if text := a.must(http.StatusAccepted, post, functions, small); !strings.Contains(text, `serves no stage so far: function "small", annotation stagecoach.dev/variant-of: got "read", which is not deployed`) {
		t.Errorf("a variant before its stage: %s", text)
	}
	status := func(name string) string {
		var f struct{ Annotations map[string]string }
		if err := json.Unmarshal([]byte(a.must(http.StatusOK, get, "/system/function/"+name, "")), &f); err != nil {
			t.Fatal(err)
		}
		return f.Annotations[StatusAnnotation]
	}
	if got := status("small"); !strings.Contains(got, ServesNoStage) {
		t.Errorf("status of a variant without a stage: %s", got)
	}
	a.must(http.StatusAccepted, post, functions, read)
	if got := status("small"); strings.Contains(got, ServesNoStage) {
		t.Errorf("status once the stage came: %s", got)
	}
	of := func() PipelineStatus {
		var p PipelineStatus
		if err := json.Unmarshal([]byte(a.must(http.StatusOK, get, "/system/pipelines/ocr", "")), &p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	want := func(when string, ready, retained bool, variants ...string) {
		t.Helper()
		p := of()
		i := slices.IndexFunc(p.Stages, func(s StageStatus) bool { return s.Name == "read" })
		if p.Ready != ready || ready != (i >= 0) {
			t.Fatalf("%s: %+v, want ready %t", when, p, ready)
		}
		if i < 0 {
			return
		}
		var names []string
		for _, v := range p.Stages[i].Variants {
			names = append(names, v.Name)
		}
		if p.Stages[i].Retained != retained || !slices.Equal(names, variants) {
			t.Errorf("%s: stage %+v, want retained %t, variants %v", when, p.Stages[i], retained, variants)
		}
	}
	want("with a variant", true, false, "small")
	a.must(http.StatusAccepted, post, functions, strings.NewReplacer("small", "tiny", `"read"`, `"small"`).Replace(small))
	if p := of(); !p.Ready || len(p.Warnings) != 1 || p.Warnings[0].Function != "tiny" {
		t.Errorf("with a variant of a variant: %+v, want it ready with a warning", p)
	}
	a.must(http.StatusAccepted, del, functions, `{"functionName":"tiny"}`)

	a.must(http.StatusAccepted, del, functions, `{"functionName":"read"}`)
	want("without the stage's own function", true, true, "small")
	key := pipeline.ParseKey("read.openfaas-fn")
	if g, ok := a.Registry.Graph(key); !ok || len(g.Stages) != 1 || !a.Registry.Known(key) {
		t.Errorf("the stage by its own name: %+v, %t, want its graph", g, ok)
	}
	a.must(http.StatusNotFound, get, "/system/function/read", "")
	a.must(http.StatusAccepted, post, functions, read)
	want("deployed again", true, false, "small")
	if a.Registry.Retained(key) {
		t.Error("its declaration is still retained")
	}

	a.must(http.StatusAccepted, del, functions, `{"functionName":"read"}`)
	a.must(http.StatusAccepted, del, functions, `{"functionName":"small"}`)
	want("without any function", false, false)
	a.must(http.StatusAccepted, post, functions, small)
	want("with a new variant of nothing", false, false)

	a.must(http.StatusAccepted, post, functions, read)
	a.must(http.StatusAccepted, del, functions, `{"functionName":"read"}`)
	a.must(http.StatusAccepted, put, functions, strings.Replace(small, `"read"`, `"detect"`, 1))
	want("after its variant went to another stage", false, false)
	for _, name := range []string{"small", "detect"} {
		a.must(http.StatusAccepted, del, functions, `{"functionName":"`+name+`"}`)
	}
	store.mu.Lock()
	defer store.mu.Unlock()
	if len(store.entries) > 0 {
		t.Errorf("the store still has %v", store.entries)
	}
}

// TestDescribeShowsTheVariantsOfAStage checks the annotation with the variants that serve a stage.
// A variant of a variant serves none.
func TestDescribeShowsTheVariantsOfAStage(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"read","image":"stagecoach/x:1"}`)
	described := func(name string) string {
		t.Helper()
		f := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/"+name, ""))
		if f.Annotations == nil {
			return ""
		}
		return (*f.Annotations)[VariantsAnnotation]
	}
	if got := described("read"); got != "" {
		t.Errorf("without variants: %q", got)
	}
	for name, annotations := range map[string]string{
		"small": `"stagecoach.dev/variant-of":"read","stagecoach.dev/accuracy":"0.87","stagecoach.dev/max-length":"64"`,
		"tiny":  `"stagecoach.dev/variant-of":"read"`,
		"wrong": `"stagecoach.dev/variant-of":"small"`,
	} {
		a.must(http.StatusAccepted, post, functions, `{"service":"`+name+`","image":"stagecoach/x:1","annotations":{`+annotations+`}}`)
	}
	a.fakes.states["small.openfaas-fn"] = State{Replicas: 2, Available: 1, Status: "ready: one\nreplica starts"}
	a.fakes.states["tiny.openfaas-fn"] = State{Status: "asleep"}
	if got, want := described("read"), "small (accuracy 0.87, max-length 64): 2, 1 ready, ready: one replica starts | tiny (accuracy 1): 0, 0 ready, asleep"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, name := range []string{"small", "wrong"} {
		if got := described(name); got != "" {
			t.Errorf("%s: %q, want no variants", name, got)
		}
	}
	answered := map[string]string{VariantsAnnotation: "small"}
	if DropAnswered(answered); len(answered) > 0 {
		t.Error("a deploy keeps the annotation, which was copied from an answer")
	}
}

// TestDescribeShowsTheChosenBatch checks that only a function that is asked for by name has it, and
// that a deploy drops it.
func TestDescribeShowsTheChosenBatch(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"read","image":"stagecoach/x:1","annotations":{"stagecoach.dev/batch":"auto"}}`)
	const why = "batch 4 of up to 256: it takes 40ms"
	a.fakes.batches = map[string]string{"read.openfaas-fn": why}
	f := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/read", ""))
	if got := (*f.Annotations)[BatchAnnotation]; got != why {
		t.Errorf("got %q, want %q", got, why)
	}
	DropAnswered(*f.Annotations)
	if _, kept := (*f.Annotations)[BatchAnnotation]; kept {
		t.Error("a deploy keeps the annotation, which was copied from an answer")
	}
	for _, f := range decodeJSON[[]types.FunctionStatus](t, a.must(http.StatusOK, get, functions, "")) {
		if got, shown := (*f.Annotations)[BatchAnnotation]; shown {
			t.Errorf("a list shows %q", got)
		}
	}
}

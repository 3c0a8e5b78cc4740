package provider

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/accuracy"
)

// accuracies is an API with the pipeline texts: find (variant find-s), then read (variant read-s).
func accuracies(t *testing.T, store *memoryStore) *api {
	t.Helper()
	a := newAPI(t, store, nil)
	for _, f := range []string{
		`{"service":"find","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/pipeline":"texts","stagecoach.dev/next":"read"}}`,
		`{"service":"find-s","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/variant-of":"find"}}`,
		`{"service":"read","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/pipeline":"texts","stagecoach.dev/accuracy":"0.8"}}`,
		`{"service":"read-s","image":"stagecoach/echo:1","annotations":{"stagecoach.dev/variant-of":"read","stagecoach.dev/accuracy":"0.6"}}`,
	} {
		a.must(http.StatusAccepted, post, functions, f)
	}
	return a
}

const images = `"version":1,"images":{"find":{"image":"stagecoach/echo:1"},"find-s":{"image":"stagecoach/echo:1"},"read":{"image":"stagecoach/echo:1"},"read-s":{"image":"stagecoach/echo:1"}}`

// result is a measurement of functions, separated by commas.
func result(functions, mean string) string {
	return `{"functions":["` + strings.ReplaceAll(functions, ",", `","`) + `"],"scorer":"exact","n":50,"mean":` + mean + `,"low":0.1,"high":1}`
}

// chains returns the chains of a pipeline as text: first letters, accuracy and source.
func (a *api) chains(t *testing.T) string {
	t.Helper()
	var out []string
	for _, c := range decodeJSON[PipelineStatus](t, a.must(http.StatusOK, get, "/system/pipelines/texts", "")).Chains {
		out = append(out, strings.Join(c.Functions, ">")+" "+strconv.FormatFloat(c.Accuracy, 'g', 4, 64)+" "+c.From)
	}
	return strings.Join(out, ", ")
}

// TestAccuracies follows accuracies of functions and chains from their measurement to snapshots of
// policies, a restart, another image, and the removal of functions.
func TestAccuracies(t *testing.T) {
	store := newMemoryStore()
	a := accuracies(t, store)
	const stage, pipe = "/system/accuracy/find", "/system/accuracy/texts"
	is := func(what, want string) {
		t.Helper()
		if got := a.chains(t); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	is("annotated", "find>read 1 product, find>read-s 0.75 product, find-s>read 1 product, find-s>read-s 0.75 product")
	snapshot := func() plan.Snapshot {
		s := plan.Snapshot{Pipelines: []plan.Pipeline{{Name: "other.openfaas-fn"}, {Name: "texts.openfaas-fn"}}}
		a.Registry.Accuracy.Fill(&s)
		return s
	}
	if s := snapshot(); s.Pipelines[1].Accuracies != nil {
		t.Errorf("nothing is measured: %+v, want none", s.Pipelines[1])
	}

	a.must(http.StatusAccepted, put, stage, `{`+images+`,"functions":[`+result("find", "0.9")+`,`+result("find-s", "0.45")+`]}`)
	is("functions measured", "find>read 1 product, find>read-s 0.75 product, find-s>read 0.5 product, find-s>read-s 0.375 product")
	a.must(http.StatusAccepted, put, pipe, `{`+images+`,"chains":[`+result("find,read-s", "0.6")+`,`+result("find-s,read", "0.3")+`]}`)
	// 0.6 of 0.75 and 0.3 of 0.5: the others are 0.7 of their products.
	is("without the best chain", "find>read 0.7 product, find>read-s 0.6 measured, find-s>read 0.3 measured, find-s>read-s 0.2625 product")
	a.must(http.StatusAccepted, put, pipe, `{`+images+`,"chains":[`+result("find,read", "0.8")+`,`+result("find-s,read", "0.5")+`]}`)
	is("with the best chain", "find>read 0.8 measured, find>read-s 0.6 product, find-s>read 0.5 measured, find-s>read-s 0.3 product")
	s := snapshot()
	if got := s.Pipelines[1].Accuracies; len(s.Pipelines[0].Accuracies) != 0 || len(got) != 4 || got[2].Accuracy != 0.5 || !got[2].Measured || got[3].Measured ||
		strings.Join(got[2].Functions, " ") != "find-s.openfaas-fn read.openfaas-fn" {
		t.Errorf("policies see %+v, want all chains", got)
	}

	sheet := decodeJSON[accuracy.Sheet](t, a.must(http.StatusOK, get, pipe, ""))
	for i, want := range []string{"0.9, measured by exact on 50 inputs, 95 % interval 0.1 to 1", "0.45, measured by", "0.8, by the annotation stagecoach.dev/accuracy", "0.6, by"} {
		if got := sheet.Functions[i].String(); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", sheet.Functions[i].Function, got, want)
		}
	}
	a.must(http.StatusAccepted, put, "/system/accuracy/read", `{`+images+`,"functions":[`+result("read", "0.7")+`]}`)
	d, _ := a.Registry.Function(pipeline.ParseKey("read.openfaas-fn"))
	if f := a.Registry.Accuracy.Function(&d); f.Accuracy != 0.8 || !strings.Contains(f.String(), "by the annotation stagecoach.dev/accuracy; not used: 0.7, measured") {
		t.Errorf("%s, want the annotation", f.String())
	}

	a = newAPI(t, store, nil) // a restart
	is("restarted", "find>read 0.8 measured, find>read-s 0.6 product, find-s>read 0.5 measured, find-s>read-s 0.3 product")
	a.must(http.StatusAccepted, "PUT", functions, `{"service":"find-s","image":"stagecoach/echo:2","annotations":{"stagecoach.dev/variant-of":"find"}}`)
	is("another image", "find>read 0.8 measured, find>read-s 0.6 product, find-s>read 0.4 product, find-s>read-s 0.3 product")
	if text := a.must(http.StatusOK, get, "/system/function/find-s", ""); !strings.Contains(text, "0.45, measured by exact on 50 inputs, 95 % interval 0.1 to 1, of an earlier image: measure it again") {
		t.Errorf("another image: %s", text)
	}
	a.must(http.StatusAccepted, "DELETE", functions, `{"functionName":"find-s"}`)
	is("without a variant", "find>read 0.8 measured, find>read-s 0.6 product")
	a.must(http.StatusAccepted, "DELETE", functions, `{"functionName":"read"}`)
	a.must(http.StatusAccepted, "DELETE", functions, `{"functionName":"find"}`)
	for key := range store.entries {
		if strings.HasPrefix(key, accuracyPrefix) || strings.HasPrefix(key, chainsPrefix) {
			t.Errorf("stored after all removals: %s", key)
		}
	}
}

// TestAccuraciesRefused checks what is no accuracy of what the request names.
func TestAccuraciesRefused(t *testing.T) {
	a := accuracies(t, newMemoryStore())
	for body, want := range map[string]string{
		`{"version":2,"images":{}}`: `version: got 2, want 1`,
		`{` + images + `}`:          `functions: got none`,
		`{` + images + `,"functions":[` + result("find", "1.5") + `]}`:                                      `functions[0].mean: got 1.5, want above 0 and at most 1`,
		`{` + images + `,"functions":[` + result("find", "0") + `]}`:                                        `functions[0].mean: got 0`,
		`{` + images + `,"functions":[` + result("find", "0.05") + `]}`:                                     `functions[0].low: got 0.1, want from 0 to the mean`,
		`{` + images + `,"functions":[` + result("find", "0.5") + `,` + result("find", "0.5") + `]}`:        `functions[1].functions: got "find", want each once`,
		`{` + images + `,"functions":[` + result("find,read", "0.5") + `]}`:                                 `functions[0].functions: got 2, want one function`,
		`{` + images + `,"functions":[` + result("other", "0.5") + `]}`:                                     `images: got none of "other"`,
		`{"version":1,"images":{"other":{"image":"x"}},"functions":[` + result("other", "0.5") + `]}`:       `functions[0].functions: got "other", want a function that serves "texts.openfaas-fn"`,
		`{` + images + `,"chains":[` + result("read,find", "0.5") + `]}`:                                    `chains[0].functions: got "read,find", want a chain of pipeline "texts.openfaas-fn"`,
		`{` + images + `,"functions":[{"functions":["find"],"scorer":"","n":0,"mean":1,"low":1,"high":2}]}`: `functions[0].n: got 0`,
	} {
		if text := a.must(http.StatusBadRequest, put, "/system/accuracy/texts", body); !strings.Contains(text, want) {
			t.Errorf("%s: %q, want %q", body, text, want)
		}
	}
	if text := a.must(http.StatusConflict, put, "/system/accuracy/find", `{"version":1,"images":{"find":{"image":"stagecoach/echo:0"}},"functions":[`+result("find", "0.5")+`]}`); !strings.Contains(text, `function "find" has the image "stagecoach/echo:1"`) {
		t.Errorf("another image: %q", text)
	}
	a.must(http.StatusNotFound, get, "/system/accuracy/nobody", "")
}

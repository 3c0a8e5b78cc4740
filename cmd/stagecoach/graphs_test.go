package main

import (
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// stackOf is a stack file of functions given as "name: annotations in braces", without the prefix
// of annotations.
func stackOf(functions ...string) string {
	text := "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n"
	for _, f := range functions {
		name, annotations, _ := strings.Cut(f, ": ")
		text += fmt.Sprintf("  %s: {image: 'stagecoach/noop:0.1.0', annotations: {", name)
		for part := range strings.SplitSeq(annotations, "; ") {
			key, value, _ := strings.Cut(part, "=")
			if key != "" {
				text += fmt.Sprintf("stagecoach.dev/%s: '%s', ", key, value)
			}
		}
		text += "}}\n"
	}
	return text
}

// TestDeployLooksAtGraphsFirst checks that a graph with a fault is refused before anything is sent,
// and that the error names the function and its field. With --wait, a fault that is left at the end
// is an error.
func TestDeployLooksAtGraphsFirst(t *testing.T) {
	t.Parallel()
	r := start(t)
	c := &operator{t, t.TempDir(), r.Base}
	names := func() string {
		var all []client.FunctionStatus
		if err := r.Get(t.Context(), "/system/functions", &all); err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, f := range all {
			out = append(out, f.Name)
		}
		return strings.Join(out, " ")
	}
	deployed := func(want string) {
		t.Helper()
		if got := names(); got != want {
			t.Errorf("deployed are %q, want %q", got, want)
		}
	}
	for want, functions := range map[string][]string{
		`graph\.yml: functions\.a\.annotations\["stagecoach\.dev/next"\]: got "gone", which is neither in graph\.yml nor deployed, want a function of namespace "openfaas-fn" \(pipeline "p\.openfaas-fn"\)\n(?s:.*)nothing was sent`: {"a: pipeline=p; next=b,gone", "b: pipeline=p"},
		`functions\.a\.annotations\["stagecoach\.dev/next"\]: got the cycle a > b > a`:                               {"a: pipeline=p; next=b", "b: pipeline=p; next=a", "c: pipeline=p; next=a"},
		`functions\.a\.annotations\["stagecoach\.dev/next"\]: got no entry`:                                          {"a: pipeline=p; next=b", "b: pipeline=p; next=a"},
		`functions\.b\.annotations\["stagecoach\.dev/pipeline"\]: got "p", which has the entry "a" already`:          {"a: pipeline=p", "b: pipeline=p"},
		`functions\.b\.annotations\["stagecoach\.dev/join"\]: got 2, want at most its 1 predecessors`:                {"a: pipeline=p; next=b", "b: pipeline=p; join=2"},
		`functions\.a\.annotations\["stagecoach\.dev/next"\]: got "b", which does not belong to the pipeline`:        {"a: pipeline=p; next=b", "b: pipeline=q"},
		`functions\.a\.annotations\["stagecoach\.dev/pipelines"\]: got an unknown annotation(?s:.*)nothing was sent`: {"a: pipelines=p", "b: "},
		`functions\.Z: got the name "Z", want 1 to 63 lower-case`:                                                    {"Z: ", "a: "},
	} {
		c.write("graph.yml", stackOf(functions...))
		for _, wait := range []string{"--wait=false", "--wait"} {
			out, err := c.try("", "deploy", "-f", "graph.yml", wait)
			if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 {
				t.Errorf("%v: %v, want exit code 1; printed %s", functions, err, out)
			}
		}
		c.refuse(want, "", "deploy", "-f", "graph.yml")
		deployed("")
	}

	// The API takes functions in any order, and the file completes what is there.
	a := r.must(http.StatusAccepted, http.MethodPost, "/system/functions",
		`{"service":"first","image":"stagecoach/noop:0.1.0","annotations":{"stagecoach.dev/pipeline":"p","stagecoach.dev/next":"second, third"}}`)
	if !strings.Contains(string(a.Body), `got "second", which is not deployed`) {
		t.Errorf("the answer %q, want it to name what is missing", a.Body)
	}
	c.write("graph.yml", stackOf("second: pipeline=p", "third: pipeline=p", "other: "))
	// Functions of the file that are not selected may be deployed later. With --wait, the error
	// says that they are missing.
	c.run("second: created", "", "deploy", "-f", "graph.yml", "--filter", "second")
	c.refuse(`second: ready(?s:.*)pipeline "p\.openfaas-fn" cannot run: function "first", annotation stagecoach\.dev/next: got "third", which is not deployed`,
		"", "deploy", "-f", "graph.yml", "--filter", "second", "--wait")
	// It is ready, although its pipeline is not.
	c.run("other: ready", "", "deploy", "-f", "graph.yml", "--filter", "other", "--wait")
	deployed("first other second")
	c.run("third: ready", "", "deploy", "-f", "graph.yml", "--wait")
	deployed("first other second third")

	// A function that is deployed and not in the file.
	c.write("graph.yml", stackOf("begin: pipeline=p; slo=1s; next=second,third"))
	c.refuse(`function "first", which is deployed and not in graph\.yml: annotation stagecoach\.dev/pipeline: got "p", which has the entry "begin" already(?s:.*)stagecoach remove first`,
		"", "deploy", "-f", "graph.yml")
	c.write("graph.yml", stackOf("second: "))
	c.refuse(`function "first", which is deployed(?s:.*)got "second", which does not belong to the pipeline`, "", "deploy", "-f", "graph.yml")
	deployed("first other second third")
	c.run("second: updated", "", "deploy", "-f", "graph.yml", "--check-graphs=false")
	c.write("graph.yml", stackOf("fourth: ", "third: pipeline=p; idempotent=false"))
	// The fault is not of these functions, and existed before.
	c.run("third: updated", "", "deploy", "-f", "graph.yml")
	c.refuse(`pipeline "p\.openfaas-fn" cannot run: function "first"`, "", "deploy", "-f", "graph.yml", "--wait")

	// A function of the file that is not selected can complete a graph. Its faults in another
	// pipeline do not matter.
	c.write("graph.yml", stackOf("x: pipeline=r; next=y", "y: pipeline=r", "z: pipeline=elsewhere; next=nowhere"))
	c.run("x: created", "", "deploy", "-f", "graph.yml", "--filter", "x")
	c.write("graph.yml", stackOf("x: pipeline=r; next=y"))
	// Refused although the fault existed before.
	c.refuse(`functions\.x\.annotations\["stagecoach\.dev/next"\]: got "y"`, "", "deploy", "-f", "graph.yml")
}

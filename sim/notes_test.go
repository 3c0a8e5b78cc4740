package sim

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// TestResultNotesBadInputs checks that a result says which objectives are shorter than the services
// on the slowest path, and which profiles fall with the batch size.
func TestResultNotesBadInputs(t *testing.T) {
	const film = `
nodes: [{memory: 16Gi, cpu: 8}]
duration: 1s
seeds: 1
pipelines: [{name: p, slo: 99ms, arrivals: {rate: "5"}}]
stages:
- {name: cut, next: [grade, mix], service: {mean: 20ms}}
- {name: grade, next: [print], service: {mean: 500ms}, variants: [{name: tint, service: {mean: 50ms}}]}
- {name: mix, next: [print], service: {mean: 10ms}}
- {name: print, batch: 8, service: {profile: [{cpu: 1, batch: 1, mean: 30ms}, {cpu: 1, batch: 4, mean: 20ms}, {cpu: 1, batch: 16, mean: 10ms}]}}
`
	const objective = "p: its objective of 99ms is out of reach: its stages serve single calls for 100ms on average, without any waiting"
	const falls = "print: the profile says that a batch of 4 takes less than a smaller one"
	has := func(text, note string) bool {
		return slices.ContainsFunc(model(t, text).notes(), func(n string) bool { return strings.HasPrefix(n, note) })
	}
	if !has(film, objective) || !has(film, falls) {
		t.Errorf("%q, want both notes", model(t, film).notes())
	}
	if text := strings.Replace(film, "slo: 99ms", "slo: 100ms", 1); has(text, "p:") {
		t.Error("an objective that leaves time for the services has a note")
	}
	if text := strings.Replace(film, "batch: 8", "batch: 2", 1); has(text, "print:") {
		t.Error("a profile that falls beyond the largest batch has a note")
	}
	result, err := model(t, film).Run(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := result.WriteMarkdown(&b); err != nil || !strings.Contains(b.String(), "\n- Note: "+objective+"\n") {
		t.Errorf("%v in\n%s", err, b.String())
	}
}

package simulate

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// TestErrorsNameFileAndField checks that traces are found beside the scenario, that JSON goes to
// standard output, and that errors name the file and the field.
func TestErrorsNameFileAndField(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(folder, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	write("counts.csv", strings.Repeat("3\n", 20))
	const scenario = `
nodes: [{memory: 1Gi, cpu: 4}]
pipelines: [{name: p, arrivals: {trace: {file: counts.csv}}}]
stages: [{name: s, service: {mean: 10ms}}]
`
	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		err := Run(t.Context(), append(args, "--quiet"), &out, nil)
		return out.String(), err
	}
	out, err := run(write("good.yml", scenario), "--json", "-", "--seeds", "2")
	var r sim.Result
	if err != nil || json.Unmarshal([]byte(out), &r) != nil || r.Seeds != 2 || r.Duration != 20 || r.Policies[0].Pipelines[0].Offered.Mean != 60 {
		t.Errorf("%v: %+v", err, r)
	}
	for name, tc := range map[string]struct{ from, to, want string }{
		"field": {"mean", "meen", "bad.yml: stages[0].service.meen: line 4: no such field"},
		"value": {"mean: 10ms", "mean: 0s", "bad.yml: stages[0].service.mean: 0s, want"},
		"trace": {"counts.csv", "none.csv", "bad.yml: pipelines[0].arrivals.trace: open "},
	} {
		if _, err := run(write("bad.yml", strings.Replace(scenario, tc.from, tc.to, 1))); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
	if _, err := run(filepath.Join(folder, "none.yml")); err == nil || !strings.Contains(err.Error(), "none.yml: no such file") {
		t.Errorf("no file: %v", err)
	}
	if _, err := run(); err == nil || !strings.Contains(err.Error(), "want one scenario") {
		t.Errorf("no scenario: %v", err)
	}
}

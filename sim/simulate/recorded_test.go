package simulate

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/recorded"
)

// TestARecordIsSimulatedAndWritten checks the table, the files, and that the written scenario has
// the same result.
func TestARecordIsSimulatedAndWritten(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	record := filepath.Join("..", "..", "autoscaler", "testdata", "record.jsonl")
	scenario, svg, file := filepath.Join(folder, "film.yml"), filepath.Join(folder, "film.svg"), filepath.Join(folder, "film.json")
	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		err := Run(t.Context(), append(args, "--quiet", "--seeds", "2"), &out, nil)
		return out.String(), err
	}
	out, err := run("--recorded", record, "--pipeline", "film", "--policy", "recorded", "--policy", "allocator=uniform,rank=fair", "--write", scenario, "--svg", svg, "--json", file)
	if err != nil || !strings.Contains(out, "\nwhat happened ") && !strings.HasPrefix(out, "RUN ") || !strings.Contains(out, "\nsimulated allocator=uniform,rank=fair ") {
		t.Fatalf("%v:\n%s", err, out)
	}
	var got recorded.Report
	if b, err := os.ReadFile(file); err != nil || json.Unmarshal(b, &got) != nil || got.Schema != recorded.Schema || len(got.Simulated.Policies) != 2 {
		t.Errorf("%v: %+v", err, got)
	}
	if b, err := os.ReadFile(svg); err != nil || !bytes.Contains(b, []byte("replicas of grade")) {
		t.Errorf("%v, %d bytes of SVG", err, len(b))
	}
	again, err := run(scenario, "--json", "-")
	var written sim.Result
	if err != nil || json.Unmarshal([]byte(again), &written) != nil {
		t.Fatal(err)
	}
	if a, b := written.Policies[1].Pipelines[0].Mean, got.Simulated.Policies[1].Pipelines[0].Mean; a != b || written.Policies[1].Policies.Rank != "fair" {
		t.Errorf("the written scenario has the mean %v, want %v", a, b)
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"both":      {[]string{scenario, "--recorded", record}, "beside --recorded, want one of both"},
		"no record": {[]string{scenario, "--policy", "static"}, "without --recorded, want a record"},
		"no file":   {[]string{"--recorded", scenario + "x"}, "no such file"},
		"no lines":  {[]string{"--recorded", scenario}, "film.yml: line 1: no line of a record"},
		"no folder": {[]string{"--recorded", record, "--write", filepath.Join(folder, "none", "x.yml")}, "none"},
	} {
		if _, err := run(tc.args...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

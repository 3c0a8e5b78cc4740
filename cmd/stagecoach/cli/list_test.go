package cli

import (
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestListShowsVariantsBelowTheirStage checks the order of functions. A variant has a place of its
// own if the function of its stage is missing or is a variant.
func TestListShowsVariantsBelowTheirStage(t *testing.T) {
	var all []client.FunctionStatus
	for _, f := range []string{"a-fast read", "b", "c-of-variant z-slow", "missing nothing", "read", "s", "z-slow read"} {
		name, stage, _ := strings.Cut(f, " ")
		s := client.FunctionStatus{Name: name, Image: "i"}
		if stage != "" {
			s.Annotations = map[string]string{pipeline.Prefix + "variant-of": stage}
		}
		all = append(all, s)
	}
	var out strings.Builder
	if err := listFunctions(all, &out); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		name, _, _ := strings.Cut(strings.TrimLeft(line, " "), " ")
		got = append(got, line[:len(line)-len(strings.TrimLeft(line, " "))]+name)
	}
	if want := "FUNCTION|b|c-of-variant|missing|read|  a-fast|  z-slow|s"; strings.Join(got, "|") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "|"), want)
	}
}

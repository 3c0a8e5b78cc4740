package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// TestCallNamesVariantsAndDrops checks what describeCall shows of the functions that answered calls
// of a stage, and of the reason for a drop.
func TestCallNamesVariantsAndDrops(t *testing.T) {
	var out strings.Builder
	err := describeCall(schema.Call{
		CallID: "mine", Function: "ocr", Namespace: "ns", State: schema.CallRunning, Attempt: 1, Accepted: time.Unix(7, 0).UTC(),
		Stages: []schema.CallStage{{Stage: "read", Calls: 3, Done: 2, Attempt: 1, Variants: []string{"read.ns", "small.ns"}}, {Stage: "draw", Calls: 1}},
		Result: &schema.CallResult{Status: 503, Dropped: "late"},
	}, &out)
	for _, want := range []string{"read, 2 of 3 calls done, attempt 1, by read.ns, small.ns\n", "draw, 0 of 1 calls done\n", "late\n"} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v\n%s\nwant a line that ends with %q", err, out.String(), want)
		}
	}
	if !strings.Contains(out.String(), "\nDropped:") {
		t.Errorf("%s\nwant a line Dropped", out.String())
	}
}

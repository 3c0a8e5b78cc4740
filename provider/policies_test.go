package provider

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

// TestPipelinesThatDisagreeSaySo deploys two pipelines that share a stage and ask for different
// ranks. Then one of them agrees.
func TestPipelinesThatDisagreeSaySo(t *testing.T) {
	t.Parallel()
	a := newAPI(t, newMemoryStore(), nil)
	deploy := func(method, name, pipelines, next, annotations string) string {
		t.Helper()
		return a.must(http.StatusAccepted, method, functions, `{"service":"`+name+`","image":"stagecoach/x:1","annotations":{"stagecoach.dev/pipeline":"`+pipelines+`"`+next+annotations+`}}`)
	}
	const next = `,"stagecoach.dev/next":"shared"`
	deploy(post, "shared", "p,q", "", "")
	deploy(post, "a", "p", next, `,"stagecoach.dev/rank":"fair"`)
	if text := deploy(post, "b", "q", next, `,"stagecoach.dev/rank":"fifo"`); !strings.Contains(text, `"fair"`) || !strings.Contains(text, `"fifo"`) {
		t.Errorf("the deploy says %q, want both ranks", text)
	}
	warnings := func(pipeline string) []PipelineFault {
		t.Helper()
		var p PipelineStatus
		if err := json.Unmarshal([]byte(a.must(http.StatusOK, get, "/system/pipelines/"+pipeline, "")), &p); err != nil {
			t.Fatal(err)
		}
		if !p.Ready {
			t.Errorf("pipeline %q is not ready: %+v", pipeline, p.Faults)
		}
		return p.Warnings
	}
	for name, entry := range map[string]string{"p": "a", "q": "b"} {
		got := warnings(name)
		if len(got) != 1 || got[0].Function != entry || got[0].Annotation != "stagecoach.dev/rank" || !strings.Contains(got[0].Got+got[0].Want, `"fair"`) || !strings.Contains(got[0].Got+got[0].Want, `"fifo"`) {
			t.Errorf("warnings of %q: %+v, want one that names both ranks", name, got)
		}
	}
	deploy(put, "b", "q", next, `,"stagecoach.dev/rank":"fair"`)
	if got := append(warnings("p"), warnings("q")...); len(got) > 0 {
		t.Errorf("warnings once they agree: %+v", got)
	}
	if text := a.must(http.StatusBadRequest, put, functions, `{"service":"b","image":"stagecoach/x:1","annotations":{"stagecoach.dev/allocator":"accurate"}}`); !strings.Contains(text, `want one of accuracy, sizer`) {
		t.Errorf("an unknown allocator: %s, want the known ones", text)
	}
}

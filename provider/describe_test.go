package provider

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
)

// TestDescribeShowsTheLastFailure checks that describe shows when and why a replica failed, and its
// last lines, in one line.
func TestDescribeShowsTheLastFailure(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1"}`)
	const key = "echo.openfaas-fn"
	described := func() string {
		return (*decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", "")).Annotations)[FailureAnnotation]
	}
	a.fakes.states[key] = State{Status: "ready"}
	if s := decodeJSON[types.FunctionStatus](t, a.must(http.StatusOK, get, "/system/function/echo", "")); s.Annotations != nil && (*s.Annotations)[FailureAnnotation] != "" {
		t.Errorf("a failure of nothing: %v", *s.Annotations)
	}
	a.fakes.states[key] = State{Status: "ready", Failure: Failure{At: time.Unix(0, 0), Replica: "echo-a", Kind: "lost", Cause: "exit status 3:\n no words"}}
	for i := range 7 {
		a.book.Add(pipeline.ParseKey(key), logbook.Line{At: time.Unix(int64(i), 0), Replica: "echo-a", Text: fmt.Sprintf("line\t%d", i)})
		a.book.Add(pipeline.ParseKey(key), logbook.Line{At: time.Unix(int64(i), 0), Replica: "echo-b", Text: "another one's"})
	}
	if got, want := described(), "1970-01-01T00:00:00Z echo-a lost: exit status 3: no words | line 2 | line 3 | line 4 | line 5 | line 6"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

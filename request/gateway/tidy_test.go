package gateway

import (
	"context"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestTidyDropsMetricsOfRemovedFunctions(t *testing.T) {
	there := directory{"gone.openfaas-fn": true, "kept.openfaas-fn": true}
	f := newFront(t, func(c *Config) { c.Directory = there })
	series := func() (n int) {
		for _, name := range []string{"gateway_function_invocation_started", "gateway_function_invocation_total", "gateway_functions_seconds"} {
			k, err := testutil.GatherAndCount(f.metrics, name)
			if err != nil {
				t.Fatal(err)
			}
			n += k
		}
		return n
	}
	f.do(http.MethodPost, "/function/gone", "")
	f.do(http.MethodPost, "/function/kept", "")
	if n := series(); n != 6 {
		t.Fatalf("%d series of two functions, want 6", n)
	}
	f.invoker.f = func(context.Context, task.Request) (*task.Response, *task.Error) {
		delete(there, "gone.openfaas-fn")
		f.Tidy() // while the request runs
		return nil, &task.Error{Status: http.StatusServiceUnavailable, Cause: "removed"}
	}
	f.do(http.MethodPost, "/function/gone", "")
	if n := series(); n != 3 {
		t.Errorf("%d series, want the 3 of the one that is there", n)
	}
	if n := f.Invocations(pipeline.ParseKey("gone.openfaas-fn")); n != 0 {
		t.Errorf("%v invocations of what is gone", n)
	}
}

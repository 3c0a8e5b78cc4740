package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestStatusDescribesTheDeployedRevision checks that a status describes only the deployed revision,
// and says why replicas are missing.
func TestStatusDescribesTheDeployedRevision(t *testing.T) {
	failing := plan.Failure{Count: 2, Until: time.Date(2025, 6, 1, 12, 0, 3, 0, time.UTC), Cause: "exit status 1"}
	for want, is := range map[string]cluster.Standing{
		"ready":            {Wanted: 2, Ready: 2},
		"ready: 1 of 2":    {Wanted: 2, Ready: 1, Short: "1 of 2"},
		"updating":         {Wanted: 1},
		"updating: 0 of 1": {Wanted: 1, Short: "0 of 1", Older: 1},
		"updating: 1 replica of an older revision serves": {Wanted: 2, Older: 1},
		"updating: 2 replicas of older revisions serve":   {Wanted: 2, Older: 2},
		"asleep": {},
		"failing: has no replica: the budget is used up": {Short: "the budget is used up", Nowhere: "has no replica: the budget is used up"},
		"failing: no node": {Wanted: 1, Short: "0 of 1", Nowhere: "no node", Older: 1},
		"failing: exit status 1 (2 starts in a row failed, next try 12:00:03)": {Wanted: 2, Ready: 1, Older: 2, Failing: failing},
	} {
		state, detail := stands(is)
		if got := strings.TrimSuffix(state+": "+detail, ": "); got != want {
			t.Errorf("%+v is %q, want %q", is, got, want)
		}
	}
	if state, _ := stands(cluster.Standing{Failing: failing}); state != provider.StatusFailing {
		t.Errorf("asleep after failed starts: %s, want failing", state)
	}
	if state, _ := stands(cluster.Standing{Wanted: 1, Ready: 1, Failing: failing}); state != provider.StatusReady {
		t.Errorf("all replicas ready after failed starts: %s, want ready", state)
	}
}

// TestWaitReady checks that deploy --wait watches all functions at the same time, ends with the
// first cause of a failure, and wakes functions that are asleep.
func TestWaitReady(t *testing.T) {
	type reply struct {
		replicas int
		status   string
	}
	for name, c := range map[string]struct {
		replies map[string][]reply // by function, the last one again and again
		labels  map[string]string
		out     string // printed
		err     string // empty: none
		scaled  string // what was asked for, in order
	}{
		"ready":                  {map[string][]reply{"a": {{0, "updating"}, {1, "ready"}}}, nil, "a: ready with 1 replicas", "", ""},
		"a minimum":              {map[string][]reply{"a": {{1, "ready"}, {2, "ready"}}}, map[string]string{"com.openfaas.scale.min": "2"}, "a: ready with 2 replicas", "", ""},
		"one fails":              {map[string][]reply{"a": {{0, "updating: 1 replica of an older revision serves"}}, "b": {{0, "updating"}, {0, "failing: exit status 1"}}}, nil, "", "b: failing: exit status 1", ""},
		"what else is not ready": {map[string][]reply{"a": {{0, "updating: slowly"}}, "b": {{0, "failing: exit status 1"}}}, nil, "", "want 1: updating: slowly", ""},
		"asleep":                 {map[string][]reply{"a": {{0, "asleep"}, {0, "updating"}, {1, "ready"}}}, nil, "a: starts, seen after", "", "a 1, a 0"},
		"asleep and fails":       {map[string][]reply{"a": {{0, "asleep"}, {0, "failing: no module"}}}, nil, "", "a: failing: no module", "a 1"},
		"asleep again":           {map[string][]reply{"a": {{0, "asleep"}, {0, "asleep"}}}, nil, "a: asleep after", "", "a 1"},
	} {
		t.Run(name, func(t *testing.T) {
			asked := map[string]int{}
			var scaled []string
			mux := http.NewServeMux()
			mux.HandleFunc("GET /system/function/{name}", func(w http.ResponseWriter, r *http.Request) {
				f := r.PathValue("name")
				all := c.replies[f]
				is := all[min(asked[f], len(all)-1)]
				asked[f]++
				_ = json.NewEncoder(w).Encode(client.FunctionStatus{Name: f, AvailableReplicas: is.replicas, Annotations: map[string]string{provider.StatusAnnotation: is.status}})
			})
			mux.HandleFunc("POST /system/scale-function/{name}", func(_ http.ResponseWriter, r *http.Request) {
				var body struct{ Replicas json.Number }
				if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
					t.Error(err)
				}
				scaled = append(scaled, r.PathValue("name")+" "+body.Replicas.String())
			})
			server := httptest.NewServer(mux)
			defer server.Close()
			ctx, cancel := context.WithTimeout(t.Context(), late)
			defer cancel()
			var all []client.Deployment
			for _, f := range []string{"a", "b"} {
				if c.replies[f] != nil {
					all = append(all, client.Deployment{Service: f, Labels: c.labels})
				}
			}
			var out bytes.Buffer
			err := client.WaitReady(ctx, client.New(server.URL), all, &out)
			if !strings.Contains(out.String(), c.out) || c.out == "" && out.Len() > 0 {
				t.Errorf("printed %q, want %q", out.String(), c.out)
			}
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if got := strings.Join(scaled, ", "); got != c.scaled {
				t.Errorf("scaled %q, want %q", got, c.scaled)
			}
		})
	}
}

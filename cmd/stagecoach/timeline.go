package main

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
)

// serveTimeline answers GET /system/timeline/{name}.
func serveTimeline(reg *provider.Registry, local *cluster.Local, lines *dispatch.Shell, st *status) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
		if _, ok := reg.Function(key); !ok {
			http.Error(w, reg.NotFound("function", key).Error(), http.StatusNotFound)
			return
		}
		t := schema.Timeline{Function: key.String(), Events: []schema.Event{}}
		is := lines.Signals(key, time.Now())
		t.Waiting, t.Running = is.Waiting, is.Running
		for _, rep := range local.Replicas(key) {
			if rep.State == plan.Ready {
				t.Ready++
			}
		}
		if want, ok := st.want(key); ok {
			t.Why = want.Why
		}
		for _, e := range local.Events(key) {
			t.Events = append(t.Events, schema.Event{At: e.At, Replica: e.Replica, Kind: string(e.Kind), Path: e.Path, Phases: phases(e.Phases), Cause: e.Cause})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(t) // the client may be gone
	})
}

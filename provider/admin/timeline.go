package admin

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// serveTimeline serves GET /system/timeline/{name}.
func serveTimeline(c Config) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
		if _, ok := c.Registry.Function(key); !ok {
			http.Error(w, c.Registry.NotFound("function", key).Error(), http.StatusNotFound)
			return
		}
		is := c.Lines.Signals(key, time.Now())
		t := schema.Timeline{Function: key.String(), Waiting: is.Waiting, Running: is.Running, Ready: c.Replicas.Ready(key), Events: c.Replicas.Events(key)}
		if want, ok := decided(c.Loop, key); ok {
			t.Why = want.Why
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(t) // the client may be gone
	})
}

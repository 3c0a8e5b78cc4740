package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
)

// inferencePrefix is the path prefix of the Open Inference Protocol v2, in which a function or
// pipeline is a model.
const inferencePrefix = "/v2/"

// serveInference serves a path below /v2/. path is still escaped. Errors have the protocol's form.
func (g *Gateway) serveInference(w http.ResponseWriter, r *http.Request, path string) {
	model, of := strings.CutPrefix(path, "models/")
	name, what, _ := strings.Cut(model, "/")
	switch {
	case path == "health/live":
		g.readOnly(w, r, map[string]bool{"live": true})
	case path == "health/ready":
		g.readOnly(w, r, map[string]bool{"ready": true})
	case of && what == "infer":
		if r.Method != http.MethodPost {
			refuseMethod(w, r, http.MethodPost)
			return
		}
		g.serve(w, r, call{name: name, path: r.URL.EscapedPath(), protocol: true}, g.invoke)
	case of && (what == "" || what == "ready"):
		key, known := g.resolve(name)
		if !known {
			inferenceError(w, http.StatusNotFound, g.unknown(key, name).Cause)
			return
		}
		if what == "ready" { // a sleeping function counts: its next request starts it
			g.readOnly(w, r, map[string]any{"name": key.Short(), "ready": true})
			return
		}
		none := []string{}
		g.readOnly(w, r, map[string]any{"name": key.Short(), "platform": "stagecoach", "versions": none, "inputs": none, "outputs": none})
	default:
		inferenceError(w, http.StatusNotFound, "path "+quoted(inferencePrefix+path)+": want /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready or /v2/models/NAME/infer; models have no versions")
	}
}

// readOnly answers GET and HEAD with v.
func (g *Gateway) readOnly(w http.ResponseWriter, r *http.Request, v any) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		refuseMethod(w, r, http.MethodGet)
		return
	}
	writeInference(w, http.StatusOK, v)
}

func refuseMethod(w http.ResponseWriter, r *http.Request, want string) {
	w.Header()["Allow"] = []string{want}
	inferenceError(w, http.StatusMethodNotAllowed, "method: got "+quoted(r.Method)+", want "+want)
}

// inferenceError writes an error in the protocol's form.
func inferenceError(w http.ResponseWriter, status int, cause string) {
	writeInference(w, status, map[string]string{"error": cause})
}

// writeInference writes v as JSON.
func writeInference(w http.ResponseWriter, status int, v any) {
	b, _ := json.Marshal(v) // v has only texts and booleans
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(b))}
	h["X-Content-Type-Options"] = []string{"nosniff"}
	w.WriteHeader(status)
	_, _ = w.Write(b) // fails if the client is gone, or for HEAD
}

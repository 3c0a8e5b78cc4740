package pods

import (
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
)

// fakeCluster is an API server with pods of one namespace, and a kubelet that agrees. The tests of
// internal/kubetest have the real ones.
type fakeCluster struct {
	client *kube.Client

	mu      sync.Mutex
	pods    map[string]kube.Pod
	resizes []kube.Resources
	refuse  func(kube.Resources) string // a kubelet's refusal; empty: none
	old     bool                        // it has no subresource resize
	grows   bool                        // it refuses to lower limits on memory
	hold    chan struct{}               // is read before each answer to a resize; nil: nothing is
}

func newFakeCluster(t *testing.T) *fakeCluster {
	t.Helper()
	c := &fakeCluster{pods: map[string]kube.Pod{}}
	c.client = clientOf(t, c)
	return c
}

// clientOf returns a client of an API server.
func clientOf(t *testing.T, h http.Handler) *kube.Client {
	t.Helper()
	server := httptest.NewTLSServer(h)
	t.Cleanup(server.Close)
	account := t.TempDir()
	for name, content := range map[string][]byte{
		"token": []byte("secret"), "ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	} {
		if err := os.WriteFile(filepath.Join(account, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client, err := kube.New(server.URL, account)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// ServeHTTP implements http.Handler.
func (c *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, resize := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, "/api/v1/namespaces/fn/pods/"), "/resize")
	if resize && c.hold != nil {
		<-c.hold
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	pod, ok := c.pods[name]
	switch {
	case resize && c.old:
		http.NotFound(w, r)
		return
	case !ok:
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(map[string]string{"message": `pods "` + name + `" not found`})
		return
	case resize:
		var patch kube.Pod
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		to := patch.Spec.Containers[0].Resources
		if n := len(c.resizes); c.grows && n > 0 && bytesOf(to) < bytesOf(c.resizes[n-1]) {
			w.WriteHeader(http.StatusUnprocessableEntity)
			_ = json.NewEncoder(w).Encode(map[string]string{"message": "spec.containers[0].resources.limits: Forbidden: memory limits cannot be decreased"})
			return
		}
		c.resizes = append(c.resizes, to)
		pod.Metadata.Generation++
		pod.Status = kube.PodStatus{Observed: pod.Metadata.Generation}
		if c.refuse != nil && c.refuse(to) != "" {
			pod.Status.Conditions = []kube.Condition{{Type: "PodResizePending", Status: "True", Reason: "Deferred", Message: c.refuse(to)}}
		}
		c.pods[name] = pod
	}
	_ = json.NewEncoder(w).Encode(pod)
}

// bytesOf returns the limit on memory of a size.
func bytesOf(r kube.Resources) int64 {
	n, _ := strconv.ParseInt(r.Limits["memory"], 10, 64)
	return n
}

// sizes returns all resizes so far.
func (c *fakeCluster) sizes() []kube.Resources {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]kube.Resources(nil), c.resizes...)
}

func named(key string) (name, namespace string) {
	name, namespace, _ = strings.Cut(key, ".")
	return name, namespace
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

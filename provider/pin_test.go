package provider

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestImagesArePinned checks what a deploy stores about its image, and its answer if the image is
// not available.
func TestImagesArePinned(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	digest := func(key string) string {
		t.Helper()
		b := newAPI(t, store, nil) // as after a restart
		d, ok := b.Registry.Function(pipeline.ParseKey(key))
		if !ok {
			t.Fatalf("no function %q", key)
		}
		return d.Digest
	}
	a.must(http.StatusAccepted, post, functions, `{"service":"f","image":"registry/a:1"}`)
	if got, want := digest("f.openfaas-fn"), "sha256:of registry/a:1"; got != want {
		t.Errorf("pinned to %q, want %q", got, want)
	}
	a.must(http.StatusAccepted, put, functions, `{"service":"f","image":"registry/b:1"}`)
	if got, want := digest("f.openfaas-fn"), "sha256:of registry/b:1"; got != want {
		t.Errorf("deployed again it is pinned to %q, want %q", got, want)
	}
	for image, want := range map[string]int{"slow/a:1": http.StatusGatewayTimeout, "down/a:1": http.StatusBadGateway, "other/a:1": http.StatusBadRequest} {
		w := httptest.NewRecorder()
		a.ServeHTTP(w, httptest.NewRequest(put, functions, strings.NewReader(`{"service":"f","image":"`+image+`"}`)))
		if own := w.Header().Get("X-OpenFaaS-Internal") != ""; w.Code != want || own != (want > 500) {
			t.Errorf("%s: status %d, the platform's own: %t, want %d: %s", image, w.Code, own, want, w.Body)
		}
	}
	if got, want := digest("f.openfaas-fn"), "sha256:of registry/b:1"; got != want {
		t.Errorf("after deploys that were refused it is pinned to %q, want %q", got, want)
	}
	if text := a.must(http.StatusBadRequest, post, functions, `{"service":"f","image":"down/a:1","namespace":"A.b"}`); !strings.Contains(text, "namespace") {
		t.Errorf("what is wrong with the request comes first: %s", text)
	}
}

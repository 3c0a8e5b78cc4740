package provider

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// outsideNames are namespaces that something else makes.
type outsideNames []string

// Names implements Outside.
func (o outsideNames) Names() []string { return o }

// Admit implements Outside.
func (o outsideNames) Admit(name string) error {
	if !slices.Contains(o, name) {
		return errors.New("it has not opted in")
	}
	return nil
}

// TestNamespacesOutside checks that functions and secrets are only in namespaces that something
// else makes, that the API does not change these, and that earlier functions of others stay.
func TestNamespacesOutside(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	a.keep("old", "team-b")
	a.must(http.StatusCreated, post, "/system/namespace/", `{"name": "declared"}`)
	a.Registry.Outside = outsideNames{"openfaas-fn", "team-a"}
	if text := a.must(http.StatusOK, get, "/system/namespaces", ""); text != `["openfaas-fn","team-a","team-b"]`+"\n" {
		t.Errorf("namespaces: %s", text)
	}
	for _, namespace := range []string{"", "openfaas-fn", "team-a"} {
		a.must(http.StatusAccepted, post, functions, fmt.Sprintf(`{"service": "fn-%s", "namespace": %q, "image": "stagecoach/echo:1"}`, namespace+"x", namespace))
		a.must(http.StatusCreated, post, "/system/secrets", fmt.Sprintf(`{"name": "s%s", "namespace": %q, "value": "v"}`, namespace, namespace))
	}
	for _, namespace := range []string{"declared", "team-b", "none"} {
		for path, body := range map[string]string{
			functions:         fmt.Sprintf(`{"service": "fn", "namespace": %q, "image": "stagecoach/echo:1"}`, namespace),
			"/system/secrets": fmt.Sprintf(`{"name": "s", "namespace": %q, "value": "v"}`, namespace),
		} {
			if text := a.must(http.StatusBadRequest, post, path, body); !strings.Contains(text, "namespace: ") || !strings.Contains(text, "it has not opted in") {
				t.Errorf("%s in namespace %s: %s", path, namespace, text)
			}
		}
	}
	for method, body := range map[string]string{post: `{"name": "more"}`, put: `{"name": "team-a"}`, del: ""} {
		path := "/system/namespace/team-a"
		if method == post {
			path = "/system/namespace/"
		}
		if text := a.must(http.StatusForbidden, method, path, body); !strings.Contains(text, "kubectl") {
			t.Errorf("%s of a namespace: %s", method, text)
		}
	}
	if text := a.must(http.StatusNotFound, get, "/system/functions?namespace=declared", ""); !strings.Contains(text, "it has not opted in") {
		t.Errorf("functions of a namespace that does not exist: %s", text)
	}
	a.must(http.StatusOK, get, "/system/functions?namespace=team-b", "")
}

// given is an error with a status.
type given int

func (g given) Error() string   { return "given" }
func (g given) HTTPStatus() int { return int(g) }

// TestErrorsOfOthersHaveAStatus checks the status of an error that another package has made.
func TestErrorsOfOthersHaveAStatus(t *testing.T) {
	if got := status(fmt.Errorf("x: %w", given(http.StatusConflict))); got != http.StatusConflict {
		t.Errorf("status %d, want 409", got)
	}
}

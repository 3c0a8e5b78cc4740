package provider

import (
	"net/http"
	"strings"
	"testing"
)

// TestUnknownNamespacesGet404 checks that a request in an unknown namespace gets 404 with the name
// of the namespace. A deploy creates its namespace. The namespace ends with its last function,
// unless it was created explicitly.
func TestUnknownNamespacesGet404(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	requests := []struct{ method, path, body string }{
		{get, functions + "?namespace=team-z", ""},
		{del, functions, `{"functionName":"f","namespace":"team-z"}`},
		{del, functions, `{"functionName":"f.team-z"}`},
		{get, "/system/function/f?namespace=team-z", ""},
		{get, "/system/function/f.team-z", ""},
		{get, "/system/function/f/profile?namespace=team-z", ""},
		{put, "/system/function/f/pin?namespace=team-z", `{"holder":"h","seconds":10}`},
		{post, "/system/scale-function/f?namespace=team-z", `{"replicas":1}`},
		{post, "/system/scale-function/f", `{"replicas":1,"namespace":"team-z"}`},
		{get, "/system/logs?name=f&namespace=team-z", ""},
		{get, "/system/pipelines?namespace=team-z", ""},
		{get, "/system/pipelines/f?namespace=team-z", ""},
		{get, "/system/secrets?namespace=team-z", ""},
		{put, "/system/secrets", `{"name":"s","namespace":"team-z","value":"v"}`},
		{del, "/system/secrets", `{"name":"s","namespace":"team-z"}`},
		{get, "/system/namespace/team-z", ""},
		{put, "/system/namespace/team-z", `{}`},
		{del, "/system/namespace/team-z", ``},
	}
	const want = `no namespace "team-z", want one of: openfaas-fn; or deploy a function there`
	for _, q := range requests {
		if status, text := a.do(q.method, q.path, q.body); status != http.StatusNotFound || !strings.Contains(text, want) {
			t.Errorf("%s %s %s: %d %s, want 404 with %q", q.method, q.path, q.body, status, text, want)
		}
	}
	for _, path := range []string{functions, "/system/pipelines", "/system/secrets"} {
		for _, query := range []string{"", "?namespace=openfaas-fn"} {
			if text := a.must(http.StatusOK, get, path+query, ""); strings.TrimSpace(text) != "[]" {
				t.Errorf("%s%s: %s, want nothing of the default namespace", path, query, text)
			}
		}
	}
	// faas-cli then sends a POST.
	a.must(http.StatusNotFound, put, functions, `{"service":"f","image":"stagecoach/f:1","namespace":"team-z"}`)
	a.must(http.StatusAccepted, post, functions, `{"service":"f","image":"stagecoach/f:1","namespace":"team-z"}`)
	if text := a.must(http.StatusOK, get, functions+"?namespace=team-z", ""); !strings.Contains(text, `"name":"f"`) {
		t.Errorf("after a deploy: %s", text)
	}
	if status, text := a.do(get, "/system/function/g?namespace=team-z", ""); status != http.StatusNotFound || !strings.Contains(text, `no function "g" in namespace "team-z"`) {
		t.Errorf("another function: %d %s", status, text)
	}
	if text := a.must(http.StatusOK, get, "/system/secrets?namespace=team-z", ""); strings.TrimSpace(text) != "[]" {
		t.Errorf("its secrets: %s", text)
	}
	a.must(http.StatusAccepted, del, functions, `{"functionName":"f","namespace":"team-z"}`)
	a.must(http.StatusNotFound, get, functions+"?namespace=team-z", "")
	a.must(http.StatusCreated, post, "/system/namespace/team-z", `{}`)
	if text := a.must(http.StatusOK, get, functions+"?namespace=team-z", ""); strings.TrimSpace(text) != "[]" {
		t.Errorf("created, without functions: %s", text)
	}
}

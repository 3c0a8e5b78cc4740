package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// fakeNodes are nodes whose orders all have the same result.
type fakeNodes struct {
	all   []node.Inventory
	fails error
}

func (f fakeNodes) Inventories() []node.Inventory { return f.all }

func (f fakeNodes) Load(context.Context, string, pipeline.Key) (int64, error) { return 5, f.fails }

func (f fakeNodes) Evict(context.Context, string, string) (int64, error) { return 5, f.fails }

// fakeSpecs is one function, f.ns.
type fakeSpecs struct{}

func (fakeSpecs) Known(key pipeline.Key) bool {
	return key == pipeline.Key{Name: "f", Namespace: "ns"}
}

func (fakeSpecs) HasNamespace(name string) bool { return name == "ns" || name == "openfaas-fn" }

func (fakeSpecs) Function(pipeline.Key) (provider.Deployed, bool) { return provider.Deployed{}, true }

// twoNodes are the nodes a and b, which have parameters of f.ns.
func twoNodes() fakeNodes {
	has := func(name, digest string) node.Inventory {
		z := node.Zygote{Function: "f.ns", Namespace: "ns", Digest: digest, State: node.Ready, Bytes: 3 << 20}
		return node.Inventory{Identity: node.Identity{Name: name}, Zygotes: []node.Zygote{z}}
	}
	return fakeNodes{all: []node.Inventory{has("a", "sha256:aaaabbbb11"), has("b", "sha256:aaaabbbb22")}}
}

// The errors of nodes.
var (
	errBusy      = errors.New("its parameters are in use")
	errNoModel   = errors.New("the function has no model")
	errNoRoom    = errors.New("no room")
	errNotCached = errors.New("no parameters of it are in memory")
)

func testCodes() node.Codes {
	return node.Codes{node.CodeBusy: errBusy, node.CodeNoModel: errNoModel, node.CodeNoRoom: errNoRoom, node.CodeNotCached: errNotCached}
}

func TestCacheAPI(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		fails        error
		path, body   string
		status       int
		want         string
		internal, js bool
	}{
		"warm all":           {nil, "warm", `{"function": "f.ns"}`, 200, `[{"node":"a","bytes":5},{"node":"b","bytes":5}]`, false, false},
		"warm one":           {nil, "warm", `{"function": "f", "namespace": "ns", "node": "b"}`, 200, `[{"node":"b","bytes":5}]`, false, false},
		"evict":              {nil, "evict", `{"function": "f.ns"}`, 200, `[{"node":"a","bytes":5},{"node":"b","bytes":5}]`, false, false},
		"evict a digest":     {nil, "evict", `{"digest": "aaaabbbb1", "node": "a"}`, 200, `[{"node":"a","bytes":5}]`, false, false},
		"which digest":       {nil, "evict", `{"digest": "sha256:aaaabbbb"}`, 400, `digest: got "sha256:aaaabbbb", want more of it: several begin so`, false, false},
		"short digest":       {nil, "evict", `{"digest": "aaa"}`, 400, "digest: got \"aaa\", want eight or more", false, false},
		"neither":            {nil, "evict", `{}`, 400, `function: got "", want the name of a function, or a digest`, false, false},
		"both":               {nil, "evict", `{"function": "f.ns", "digest": "aaaabbbb1"}`, 400, "function: got \"f.ns\", want", false, false},
		"warm a digest":      {nil, "warm", `{"digest": "aaaabbbb1"}`, 400, "digest: got", false, false},
		"no function":        {nil, "warm", `{"node": "a"}`, 400, `function: got "", want the name of a function`, false, false},
		"no JSON":            {nil, "warm", `x`, 400, "body: got invalid character", false, false},
		"nothing":            {nil, "warm", ``, 400, "body: got EOF", false, false},
		"unknown field":      {nil, "warm", `{"fn": "f"}`, 400, "fn: got an unknown field, want one of function", false, false},
		"wrong type":         {nil, "warm", `{"node": 7}`, 400, "node: got a number, want a string", false, false},
		"too large":          {nil, "warm", `{"function": "` + strings.Repeat("f", maxCacheOrder) + `"}`, 413, "too large", false, false},
		"as JSON":            {nil, "warm", `{"node": 7}`, 400, `{"error":"node: got a number, want a string","fields":[{"path":"node","got":"a number","want":"a string"}]}`, false, true},
		"unknown function":   {nil, "warm", `{"function": "g"}`, 404, `function "g": not deployed`, false, false},
		"unknown node":       {nil, "warm", `{"function": "f.ns", "node": "c"}`, 404, `node "c": no node of this name, want one of: a, b`, false, false},
		"busy":               {errBusy, "evict", `{"function": "f.ns"}`, 409, "its parameters are in use", false, false},
		"sounds busy":        {errors.New("disk on fire: " + errBusy.Error()), "evict", `{"function": "f.ns"}`, 503, "disk on fire", true, false},
		"nowhere":            {errNotCached, "evict", `{"function": "f.ns"}`, 404, "no parameters", false, false},
		"no model":           {errNoModel, "warm", `{"function": "f.ns"}`, 400, "no model", false, false},
		"removed meanwhile":  {fmt.Errorf("%w: it was removed meanwhile", ErrNotDeployed), "warm", `{"function": "f.ns"}`, 404, "not deployed", false, false},
		"no room":            {fmt.Errorf("%w: 3 GiB", errNoRoom), "warm", `{"function": "f.ns"}`, 507, `node "a": no room: 3 GiB`, true, false},
		"the platform's own": {errors.New("disk on fire"), "warm", `{"function": "f.ns"}`, 503, `node "a": disk on fire`, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := twoNodes()
			n.fails = tc.fails
			req := httptest.NewRequest(http.MethodPost, "/system/cache/"+tc.path, strings.NewReader(tc.body))
			if tc.js {
				req.Header.Set("Accept", "application/json")
			}
			w := httptest.NewRecorder()
			serveNodes(n, nil, nil, testCodes(), fakeSpecs{}).ServeHTTP(w, req)
			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.want) {
				t.Errorf("status %d: %s, want %d: %s", w.Code, w.Body, tc.status, tc.want)
			}
			if internal := w.Header().Get("X-OpenFaaS-Internal") != ""; internal != tc.internal {
				t.Errorf("X-OpenFaaS-Internal: %t, want %t", internal, tc.internal)
			}
		})
	}
}

// TestCacheList filters what nodes hold.
func TestCacheList(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]int{"": 2, "?node=b": 1, "?namespace=ns": 2, "?namespace=other": 404, "?namespace=openfaas-fn": 0, "?function=f&namespace=other": 404, "?function=f&namespace=ns": 2, "?function=f.ns": 2, "?function=f": 404, "?node=c": 404} {
		w := httptest.NewRecorder()
		serveNodes(twoNodes(), nil, nil, testCodes(), fakeSpecs{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/system/cache"+query, nil))
		var got []schema.Cached
		if w.Code != http.StatusOK {
			if w.Code != want {
				t.Errorf("%s: status %d: %s, want %d", query, w.Code, w.Body, want)
			}
		} else if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || len(got) != want {
			t.Errorf("%s: %s, %v, want %d", query, w.Body, err, want)
		}
	}
}

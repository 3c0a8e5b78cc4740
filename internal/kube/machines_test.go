package kube

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// nodes is an API server that has machines, one per page, and then sends changes.
func nodes(t *testing.T, pages []string, changes ...string) *Client {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, page := r.URL.Query(), 0
		switch {
		case r.URL.Path != "/api/v1/nodes":
			http.Error(w, "", http.StatusNotFound)
		case len(pages) == 0:
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"message": "nodes is forbidden: User \"control\" cannot list resource \"nodes\""}`)
		case q.Get("watch") == "true" && q.Get("resourceVersion") == "7" && q.Get("timeoutSeconds") != "":
			for _, c := range changes {
				fmt.Fprintln(w, c)
			}
		case q.Get("limit") != "":
			fmt.Sscan(q.Get("continue"), &page)
			next := ""
			if page+1 < len(pages) {
				next = fmt.Sprint(page + 1)
			}
			fmt.Fprintf(w, `{"metadata": {"resourceVersion": "7", "continue": %q}, "items": [%s]}`, next, pages[page])
		default:
			http.Error(w, r.URL.String(), http.StatusBadRequest)
		}
	}))
	t.Cleanup(s.Close)
	account := t.TempDir()
	write(t, account, "token", "good\n")
	write(t, account, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	c, err := New(s.URL, account)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func node(name, spec string) string {
	return fmt.Sprintf(`{"metadata": {"name": %q}, "spec": {%s}}`, name, spec)
}

const closedSpec = `"unschedulable": true`

func event(kind, object string) string {
	return fmt.Sprintf(`{"type": %q, "object": %s}`, kind, object)
}

// TestWatchMachines lists machines on two pages, and follows their changes.
func TestWatchMachines(t *testing.T) {
	c := nodes(t, []string{node("a", ""), node("b", closedSpec)},
		event("MODIFIED", node("b", closedSpec)), // such as a heartbeat
		event("MODIFIED", node("a", closedSpec)),
		event("MODIFIED", node("b", "")),
		event("ADDED", node("c", `"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]`)),
		event("DELETED", node("a", "")),
		event("ADDED", node("a", "")),
	)
	const taint = "its machine has the taint ToBeDeletedByClusterAutoscaler"
	want := []map[string]string{
		{"b": cordoned},
		{"a": cordoned, "b": cordoned},
		{"a": cordoned},
		{"a": cordoned, "c": taint},
		{"a": removed, "c": taint},
		{"c": taint},
	}
	var got []map[string]string
	if err := c.WatchMachines(t.Context(), func(closed map[string]string) error { got = append(got, closed); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || !maps.Equal(got[i], want[i]) {
			t.Fatalf("told %v, want %v", got, want)
		}
	}
}

// TestWatchMachinesEnds ends a watch that can be begun again, and passes on all other errors.
func TestWatchMachinesEnds(t *testing.T) {
	ours := errors.New("ours")
	for what, x := range map[string]struct {
		pages, changes []string
		refuse         error
		want           string // empty: no error
	}{
		"no right":         {want: `cannot list resource "nodes"`},
		"gone":             {pages: []string{node("a", "")}, changes: []string{event("ERROR", `{"code": 410, "message": "too old"}`), event("ADDED", node("b", closedSpec))}},
		"another error":    {pages: []string{node("a", "")}, changes: []string{event("ERROR", `{"code": 500, "message": "etcd is away"}`)}, want: "etcd is away"},
		"no JSON":          {pages: []string{node("a", "")}, changes: []string{"{"}, want: "unexpected end"},
		"our error":        {pages: []string{node("a", "")}, refuse: ours, want: "ours"},
		"a large change":   {pages: []string{node("a", "")}, changes: []string{event("ADDED", node(strings.Repeat("a", maxEvent), ""))}, want: "token too long"},
		"the time is over": {pages: []string{node("a", "")}},
	} {
		told := 0
		err := nodes(t, x.pages, x.changes...).WatchMachines(t.Context(), func(map[string]string) error { told++; return x.refuse })
		if (x.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", what, err, x.want)
		}
		if want := min(len(x.pages), 1); told != want {
			t.Errorf("%s: told %d times, want %d", what, told, want)
		}
	}
}

func TestClosedMachines(t *testing.T) {
	for spec, want := range map[string]string{
		``:         "",
		closedSpec: cordoned,
		`"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]`:                                               cordoned,
		`"taints": [{"key": "dedicated", "effect": "NoExecute"}, {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]`:            "its machine has the taint karpenter.sh/disrupted",
		`"taints": [{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}]`:                      "its machine has the taint node.kubernetes.io/out-of-service",
		`"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "PreferNoSchedule"}]`:                                    "",
		`"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, {"key": "nvidia.com/gpu", "effect": "NoSchedule"}]`: "",
	} {
		var m machine
		if err := json.Unmarshal([]byte(node("a", spec)), &m); err != nil {
			t.Fatal(err)
		}
		if got := m.closed(); got != want {
			t.Errorf("machine with {%s}: %q, want %q", spec, got, want)
		}
	}
}

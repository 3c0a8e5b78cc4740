package kube

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"
)

const (
	// watchFor is how long the API server sends changes before the machines are listed again.
	watchFor = 5 * time.Minute
	// pageSize is how many machines an answer has at most.
	pageSize = 50
	// maxEvent bounds a change of a machine, in bytes. An object of Kubernetes has at most 1.5 MiB.
	maxEvent = 4 << 20
)

// Why a machine takes no new work, for people who know it as the machine of a node.
const (
	cordoned = "its machine is cordoned"
	removed  = "its machine was removed from Kubernetes"
)

// closingTaints are the taints of machines that go away soon, or that take no new work. Kubernetes
// itself, providers and handlers of spot terminations set them.
var closingTaints = []string{
	"node.kubernetes.io/out-of-service",
	"node.cloudprovider.kubernetes.io/shutdown",
	"ToBeDeletedByClusterAutoscaler",
	"karpenter.sh/disrupted",
	"karpenter.sh/disruption",
	"aws-node-termination-handler/spot-itn",
	"aws-node-termination-handler/scheduled-maintenance",
	"aws-node-termination-handler/asg-lifecycle-termination",
	"aws-node-termination-handler/rebalance-recommendation",
	"cloud.google.com/impending-node-termination",
	"remediator.kubernetes.azure.com/unschedulable",
}

// machine is the part of a Node object that this package uses.
type machine struct {
	Metadata struct {
		Name            string `json:"name"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		Unschedulable bool    `json:"unschedulable"`
		Taints        []taint `json:"taints"`
	} `json:"spec"`
}

type taint struct {
	Key    string `json:"key"`
	Effect string `json:"effect"`
}

// closed returns why the machine takes no new work; empty: it does.
func (m *machine) closed() string {
	if m.Spec.Unschedulable {
		return cordoned
	}
	for _, t := range m.Spec.Taints {
		switch {
		case t.Effect != "NoSchedule" && t.Effect != "NoExecute":
		case t.Key == "node.kubernetes.io/unschedulable":
			return cordoned
		case slices.Contains(closingTaints, t.Key):
			return "its machine has the taint " + t.Key
		}
	}
	return ""
}

// WatchMachines lists the machines of the cluster, and then follows their changes. It calls f with
// the machines that take no new work, and why they do not: once when they are listed, and after
// each change. f may keep the map. WatchMachines returns an error of f, or of the API server. After
// some minutes, it returns nil, and the caller calls it again. The service account needs the verbs
// list and watch for nodes.
func (c *Client) WatchMachines(ctx context.Context, f func(closed map[string]string) error) error {
	closed, version, err := c.listMachines(ctx)
	if err != nil {
		return fmt.Errorf("kube: list nodes: %w", err)
	}
	if err := f(maps.Clone(closed)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, watchFor+time.Minute) // the server ends the watch earlier
	defer cancel()
	q := url.Values{"watch": {"true"}, "resourceVersion": {version}, "timeoutSeconds": {strconv.Itoa(int(watchFor.Seconds()))}}
	resp, err := c.send(ctx, request{method: http.MethodGet, path: "/api/v1/nodes", query: q})
	if err != nil {
		return fmt.Errorf("kube: watch nodes: %w", err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		changed, err := change(closed, lines.Bytes())
		if errors.Is(err, errGone) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kube: watch nodes: %w", err)
		}
		if changed {
			if err := f(maps.Clone(closed)); err != nil {
				return err
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("kube: watch nodes: %w", err)
	}
	return nil
}

// errGone means that the API server does not know any more what has changed since a version.
var errGone = errors.New("the version is too old")

// change applies a line of a watch, and reports whether it changed anything.
func change(closed map[string]string, line []byte) (changed bool, err error) {
	var e struct {
		Type   string          `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return false, err
	}
	if e.Type == "ERROR" {
		var s struct {
			Code int `json:"code"`
		}
		if json.Unmarshal(e.Object, &s) == nil && s.Code == http.StatusGone {
			return false, errGone
		}
		return false, refusal(s.Code, e.Object)
	}
	var m machine
	if err := json.Unmarshal(e.Object, &m); err != nil {
		return false, err
	}
	name, cause := m.Metadata.Name, m.closed()
	if e.Type == "DELETED" {
		cause = removed // its pods may run for another minute
	}
	if closed[name] == cause {
		return false, nil
	}
	if closed[name] = cause; cause == "" {
		delete(closed, name)
	}
	return true, nil
}

// listMachines returns the machines that take no new work, and the version of the list.
func (c *Client) listMachines(ctx context.Context) (closed map[string]string, version string, err error) {
	closed = map[string]string{}
	q := url.Values{"limit": {strconv.Itoa(pageSize)}}
	for {
		b, err := c.do(ctx, request{method: http.MethodGet, path: "/api/v1/nodes", query: q})
		if err != nil {
			return nil, "", err
		}
		var page struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []machine `json:"items"`
		}
		if err := json.Unmarshal(b, &page); err != nil {
			return nil, "", err
		}
		for i := range page.Items {
			if cause := page.Items[i].closed(); cause != "" {
				closed[page.Items[i].Metadata.Name] = cause
			}
		}
		if page.Metadata.Continue == "" {
			return closed, page.Metadata.ResourceVersion, nil
		}
		q.Set("continue", page.Metadata.Continue)
	}
}

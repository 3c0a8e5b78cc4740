package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Pod is the part of a pod that this package uses. Fields have the API's names.
type Pod struct {
	APIVersion string    `json:"apiVersion,omitempty"`
	Kind       string    `json:"kind,omitempty"`
	Metadata   Meta      `json:"metadata"`
	Spec       PodSpec   `json:"spec"`
	Status     PodStatus `json:"status,omitzero"`
}

// Meta names an object.
type Meta struct {
	Name        string            `json:"name,omitempty"`
	Namespace   string            `json:"namespace,omitempty"`
	UID         string            `json:"uid,omitempty"`
	Version     string            `json:"resourceVersion,omitempty"`
	Generation  int64             `json:"generation,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Owners      []Owner           `json:"ownerReferences,omitempty"`
	// Deleted is set once somebody has asked for the object's deletion.
	Deleted string `json:"deletionTimestamp,omitempty"`
}

// Owner is an object with which another one is deleted.
type Owner struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
	Controller bool   `json:"controller,omitempty"`
}

// PodSpec is what is wanted of a pod.
type PodSpec struct {
	Affinity        any              `json:"affinity,omitempty"`
	Tolerations     []map[string]any `json:"tolerations,omitempty"`
	MountAccount    *bool            `json:"automountServiceAccountToken,omitempty"`
	ServiceLinks    *bool            `json:"enableServiceLinks,omitempty"`
	RestartPolicy   string           `json:"restartPolicy,omitempty"`
	Grace           *int64           `json:"terminationGracePeriodSeconds,omitempty"`
	RuntimeClass    string           `json:"runtimeClassName,omitempty"`
	PullSecrets     []map[string]any `json:"imagePullSecrets,omitempty"`
	InitContainers  []Container      `json:"initContainers,omitempty"`
	Containers      []Container      `json:"containers,omitempty"`
	Volumes         []Volume         `json:"volumes,omitempty"`
	SecurityContext map[string]any   `json:"securityContext,omitempty"`
}

// Container is a container of a pod.
type Container struct {
	Name            string         `json:"name"`
	Image           string         `json:"image,omitempty"`
	PullPolicy      string         `json:"imagePullPolicy,omitempty"`
	Command         []string       `json:"command,omitempty"`
	Mounts          []Mount        `json:"volumeMounts,omitempty"`
	Resources       Resources      `json:"resources,omitzero"`
	Resize          []ResizeRule   `json:"resizePolicy,omitempty"`
	SecurityContext map[string]any `json:"securityContext,omitempty"`
}

// Mount is a volume in a container.
type Mount struct {
	Name     string `json:"name"`
	At       string `json:"mountPath"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// Volume is an empty folder of a pod.
type Volume struct {
	Name  string         `json:"name"`
	Empty map[string]any `json:"emptyDir"`
}

// Resources are quantities by resource, such as cpu: 100m.
type Resources struct {
	Requests map[string]string `json:"requests,omitempty"`
	Limits   map[string]string `json:"limits,omitempty"`
}

// ResizeRule says what a change of a resource needs: NotRequired or RestartContainer.
type ResizeRule struct {
	Resource string `json:"resourceName"`
	Policy   string `json:"restartPolicy"`
}

// PodStatus is what the cluster says of a pod.
type PodStatus struct {
	// Observed is the generation that the kubelet has seen; 0: the cluster is too old to say so.
	Observed   int64             `json:"observedGeneration,omitempty"`
	Phase      string            `json:"phase,omitempty"`
	Reason     string            `json:"reason,omitempty"`
	Message    string            `json:"message,omitempty"`
	Conditions []Condition       `json:"conditions,omitempty"`
	Init       []ContainerStatus `json:"initContainerStatuses,omitempty"`
	Containers []ContainerStatus `json:"containerStatuses,omitempty"`
}

// Condition is a condition of a pod, such as PodScheduled.
type Condition struct {
	Type     string `json:"type"`
	Status   string `json:"status"`
	Reason   string `json:"reason,omitempty"`
	Message  string `json:"message,omitempty"`
	Observed int64  `json:"observedGeneration,omitempty"`
}

// ContainerStatus is what the kubelet says of a container.
type ContainerStatus struct {
	Name  string `json:"name"`
	State struct {
		Waiting    *Reason `json:"waiting,omitempty"`
		Terminated *Reason `json:"terminated,omitempty"`
	} `json:"state"`
}

// Reason says why a container waits or has ended.
type Reason struct {
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// CreatePod creates a pod, and returns it as the cluster has it.
func (c *Client) CreatePod(ctx context.Context, p Pod) (Pod, error) {
	p.APIVersion, p.Kind = "v1", "Pod"
	b, err := json.Marshal(p)
	var out Pod
	if err == nil {
		out, err = c.pod(ctx, request{method: http.MethodPost, path: podsOf(p.Metadata.Namespace), kind: jsonBody, body: b})
	}
	if err != nil {
		return Pod{}, fmt.Errorf("kube: create pod %s/%s: %w", p.Metadata.Namespace, p.Metadata.Name, err)
	}
	return out, nil
}

// Pod returns a pod.
func (c *Client) Pod(ctx context.Context, namespace, name string) (Pod, error) {
	p, err := c.pod(ctx, request{method: http.MethodGet, path: podsOf(namespace) + "/" + url.PathEscape(name)})
	if err != nil {
		return Pod{}, fmt.Errorf("kube: get pod %s/%s: %w", namespace, name, err)
	}
	return p, nil
}

// Pods returns the pods of a namespace that have these labels.
func (c *Client) Pods(ctx context.Context, namespace string, labels map[string]string) ([]Pod, error) {
	var want []string
	for name, value := range labels {
		want = append(want, name+"="+value)
	}
	b, err := c.do(ctx, request{method: http.MethodGet, path: podsOf(namespace), query: url.Values{"labelSelector": {strings.Join(want, ",")}}})
	var list struct{ Items []Pod }
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("kube: list pods of namespace %s: %w", namespace, err)
	}
	return list.Items, nil
}

// DeletePod deletes a pod, whose processes get this many seconds. A pod that does not exist is no
// error.
func (c *Client) DeletePod(ctx context.Context, namespace, name string, seconds int) error {
	body := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"DeleteOptions","gracePeriodSeconds":%d}`, seconds)
	_, err := c.do(ctx, request{method: http.MethodDelete, path: podsOf(namespace) + "/" + url.PathEscape(name), kind: jsonBody, body: body})
	if err != nil && !NotFound(err) {
		return fmt.Errorf("kube: delete pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// ResizePod changes the resources of a container while it runs, and returns the pod. The kubelet
// makes the change afterwards: see [Pod.Resized].
func (c *Client) ResizePod(ctx context.Context, namespace, name, container string, r Resources) (Pod, error) {
	type part struct {
		Name      string    `json:"name"`
		Resources Resources `json:"resources"`
	}
	b, err := json.Marshal(map[string]any{"spec": map[string]any{"containers": []part{{container, r}}}})
	var out Pod
	if err == nil {
		out, err = c.pod(ctx, request{method: http.MethodPatch, path: podsOf(namespace) + "/" + url.PathEscape(name) + "/resize", kind: "application/strategic-merge-patch+json", body: b})
	}
	if err != nil {
		return Pod{}, fmt.Errorf("kube: resize pod %s/%s: %w", namespace, name, err)
	}
	return out, nil
}

// Resized reports whether the kubelet has made the change of a pod's resources that has led to a
// generation of the pod. The error says why the kubelet does not make it, at least for now.
func (p Pod) Resized(generation int64) (bool, error) {
	if p.Status.Observed < generation { // always so in a cluster that is too old to say
		return false, nil
	}
	for _, c := range p.Status.Conditions {
		switch {
		case c.Status != "True":
		case c.Type == "PodResizePending":
			return false, fmt.Errorf("the kubelet does not resize pod %s: %s: %s", p.Metadata.Name, c.Reason, c.Message)
		case c.Type == "PodResizeInProgress":
			return false, nil
		}
	}
	return true, nil
}

// hopeless are the reasons for which a container waits and that end only with another pod.
var hopeless = []string{"InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull"}

// Trouble says why a pod does not run; empty: nothing is known to be wrong. final reports that it
// never will.
func (p Pod) Trouble() (text string, final bool) {
	if p.Status.Phase == "Failed" || p.Status.Phase == "Succeeded" {
		text, final = strings.TrimSpace(p.Status.Phase+" "+p.Status.Reason+" "+p.Status.Message), true
	}
	for _, c := range p.Status.Conditions {
		if c.Type == "PodScheduled" && c.Status == "False" {
			return c.Reason + ": " + c.Message, c.Reason == "Unschedulable"
		}
	}
	for _, list := range [][]ContainerStatus{p.Status.Init, p.Status.Containers} {
		for _, c := range list {
			switch w, t := c.State.Waiting, c.State.Terminated; {
			case w != nil && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating":
				return fmt.Sprintf("container %s: %s: %s", c.Name, w.Reason, w.Message), final || slices.Contains(hopeless, w.Reason)
			case t != nil && t.Reason != "Completed":
				return fmt.Sprintf("container %s: %s: %s", c.Name, t.Reason, t.Message), true
			}
		}
	}
	return text, final
}

// pod sends a request whose answer is a pod.
func (c *Client) pod(ctx context.Context, r request) (p Pod, err error) {
	b, err := c.do(ctx, r)
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	return p, err
}

func podsOf(namespace string) string {
	return "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods"
}

package pods

import (
	"context"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// ownersOf returns the owner of a command's pod: the ConfigMap that a control plane keeps for the
// function. With an owner that is its controller, `kubectl drain` evicts the pod without --force,
// and Kubernetes deletes the pod if the ConfigMap is deleted. A pod without a ConfigMap has no
// owner.
func (r *Runtime) ownersOf(ctx context.Context, c sandbox.Command, namespace string) []kube.Owner {
	function, _ := r.cfg.Named(r.label(c, sandbox.LabelFunction))
	m, err := r.cfg.Cluster.ConfigMap(ctx, namespace, function)
	if err != nil && !kube.NotFound(err) {
		r.cfg.Log.Warn("a pod has no owner", "function", function, "namespace", namespace, "error", err)
	}
	if err != nil || m.Metadata.Deleted != "" || m.Metadata.Labels[labelManaged] != kube.Managed || m.Metadata.Labels[LabelFunction] != labelValue(function) {
		return nil
	}
	return []kube.Owner{{APIVersion: "v1", Kind: "ConfigMap", Name: function, UID: m.Metadata.UID, Controller: true}}
}

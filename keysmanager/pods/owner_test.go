package pods

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/internal/kubefake"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestOwner checks that a pod is owned by the ConfigMap of its function, and by nothing else.
func TestOwner(t *testing.T) {
	s := kubefake.Start(t)
	client, err := kube.New(s.URL, s.Account)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	r := &Runtime{cfg: Config{Cluster: client, Named: named, Log: slog.New(slog.NewTextHandler(&log, nil))}}
	var c sandbox.Command
	c.Labels = map[string]string{sandbox.LabelFunction: "f.ns"}
	if got := r.ownersOf(t.Context(), c, "ns"); got != nil || log.Len() > 0 {
		t.Errorf("without a ConfigMap: owners %v, log %q", got, &log)
	}
	for _, labels := range []kubefake.Object{{}, {LabelFunction: "f"}, {labelManaged: "stagecoach"}, {LabelFunction: "g", labelManaged: "stagecoach"}} {
		s.Put("namespaces/ns/configmaps/f", kubefake.Object{"metadata": kubefake.Object{"labels": labels}})
		if got := r.ownersOf(t.Context(), c, "ns"); got != nil {
			t.Errorf("a ConfigMap with labels %v owns the pod: %v", labels, got)
		}
	}
	s.Put("namespaces/ns/configmaps/f", kubefake.Object{"metadata": kubefake.Object{"labels": kubefake.Object{LabelFunction: "f", labelManaged: "stagecoach"}}})
	uid := s.Get("namespaces/ns/configmaps/f")["metadata"].(kubefake.Object)["uid"]
	got := r.ownersOf(t.Context(), c, "ns")
	if len(got) != 1 || got[0] != (kube.Owner{APIVersion: "v1", Kind: "ConfigMap", Name: "f", UID: uid.(string), Controller: true}) {
		t.Errorf("owners %v, want the ConfigMap with uid %v", got, uid)
	}
	s.Forbid("get", "configmaps", true)
	if got := r.ownersOf(t.Context(), c, "ns"); got != nil || !strings.Contains(log.String(), "cannot get resource") {
		t.Errorf("without the right: owners %v, log %q", got, &log)
	}
}

package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/internal/kubefake"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/kubernetes"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// TestKubeSecretsReachMounts checks that a function's folder gets the values of a Secret, also
// after a change by somebody else.
func TestKubeSecretsReachMounts(t *testing.T) {
	s := kubefake.Start(t)
	client, err := kube.New(s.URL, s.Account)
	if err != nil {
		t.Fatal(err)
	}
	store, err := secret.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	ctx, log := t.Context(), slog.New(slog.DiscardHandler)
	var api provider.Secrets = kubernetes.OpenSecrets(ctx, kubernetes.SecretsConfig{Cluster: client, Namespaces: []string{"openfaas-fn"}, Copies: store, Log: log})
	t.Cleanup(api.(*kubernetes.Secrets).Close)
	if _, err := api.Put(ctx, "openfaas-fn", "token", []byte("one")); err != nil {
		t.Fatal(err)
	}
	if err := store.Mount("openfaas-fn", "fn", []string{"token"}); err != nil {
		t.Fatal(err)
	}
	changed := make(chan string, 10)
	api.(*kubernetes.Secrets).Follow(func(namespace, name string) { changed <- namespace + "/" + name })
	const path = "namespaces/openfaas-fn/secrets/token"
	o := kubefake.Clone(s.Get(path))
	o["data"] = kubefake.Object{"token": "dHdv"}
	s.Put(path, o)
	if got := <-changed; got != "openfaas-fn/token" {
		t.Errorf("changed: %s", got)
	}
	b, err := os.ReadFile(filepath.Join(store.MountPath("openfaas-fn", "fn", []string{"token"}), "token"))
	if err != nil || string(b) != "two" {
		t.Errorf("the function sees %q, %v, want two", b, err)
	}
}

// TestStartsWaitForTheirObject checks that an order for a new function is sent after its ConfigMap
// was made, and that the other check comes first.
func TestStartsWaitForTheirObject(t *testing.T) {
	s := kubefake.Start(t)
	client, err := kube.New(s.URL, s.Account)
	if err != nil {
		t.Fatal(err)
	}
	key := pipeline.Key{Name: "fn", Namespace: "openfaas-fn"}
	d := provider.Deployed{Key: key}
	d.Deployment = types.FunctionDeployment{Service: "fn", Namespace: "openfaas-fn", Image: "x", Secrets: []string{"token"}}
	text, deployed := specText(d, true)
	if !deployed || !strings.Contains(text, `"name": "fn"`) || !strings.Contains(text, `"token"`) || strings.Contains(text, "replicas") {
		t.Errorf("spec %s", text)
	}
	k := kubeParts{objects: kubernetes.NewObjects(kubernetes.ObjectsConfig{
		Cluster: client, Namespaces: []string{"openfaas-fn"}, Identity: "one", Log: slog.New(slog.DiscardHandler),
		Spec:      func(is pipeline.Key) (string, bool) { return specText(d, is == key) },
		Functions: func() []pipeline.Key { return nil }, Busy: func(pipeline.Key) bool { return false }, Acts: func() bool { return true },
	})}
	watched := make(chan bool, 10)
	s.Refuse(func(verb, _ string, _ []byte) (int, string) {
		if verb == "watch" {
			watched <- true
		}
		return 0, ""
	})
	t.Cleanup(k.startObjects())
	<-watched
	k.deployed(key)
	spec := node.Spec{Function: key.String()}
	if err := k.before(func(node.Spec) error { return nil })(spec); err != nil {
		t.Fatal(err)
	}
	if o := s.Get("namespaces/openfaas-fn/configmaps/fn"); o == nil || o["data"].(kubefake.Object)["function.json"] != text {
		t.Errorf("the ConfigMap when the order is sent: %v", o)
	}
	bad := errors.New("bad")
	if err := k.before(func(node.Spec) error { return bad })(spec); !errors.Is(err, bad) {
		t.Errorf("a start without secrets: %v", err)
	}
	s.Forbid("list", "secrets", true)
	k.secrets = kubernetes.OpenSecrets(t.Context(), kubernetes.SecretsConfig{Cluster: client, Namespaces: []string{"openfaas-fn"}, Log: slog.New(slog.DiscardHandler)})
	spec.Namespace = "openfaas-fn"
	if err := k.before(func(node.Spec) error { return bad })(spec); errors.Is(err, bad) || !strings.Contains(err.Error(), "cannot list") {
		t.Errorf("a start while secrets are not known: %v", err)
	}
}

// TestKubeNeedsAPod checks the error outside of a pod, and that a list of namespaces alone needs
// none.
func TestKubeNeedsAPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	u := &up{log: slog.New(slog.DiscardHandler)}
	u.leading = &leading{u: u}
	u.cfg.Kubernetes.Namespaces = []string{"openfaas-fn", "team"}
	if err := openKube(u); err != nil || !slices.Equal(u.leading.kube.outside().Names(), []string{"openfaas-fn", "team"}) {
		t.Errorf("namespaces alone: %v", err)
	}
	u.cfg.Kubernetes.Secrets = true
	if err := openKube(u); !errors.Is(err, kube.ErrNoPod) || !strings.HasPrefix(err.Error(), "kubernetes: ") {
		t.Errorf("outside of a pod: %v", err)
	}
	if (&kubeParts{}).outside() != nil {
		t.Error("without a list, namespaces are not free")
	}
}

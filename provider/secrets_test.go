package provider

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// slowSecrets stores the secret "slow" only when it is told to.
type slowSecrets struct {
	Secrets
	arrived, goOn chan struct{}
}

func (s slowSecrets) Put(ctx context.Context, namespace, name string, value []byte) (note string, err error) {
	if name == "slow" {
		s.arrived <- struct{}{}
		<-s.goOn
	}
	return s.Secrets.Put(ctx, namespace, name, value)
}

// TestSlowSecretsDelayNobody makes changes while a new secret is on its way to other control
// planes. A change of the same secret waits for it. Its namespace cannot be deleted.
func TestSlowSecretsDelayNobody(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	slow := slowSecrets{a.Secrets, make(chan struct{}, 2), make(chan struct{})}
	a.Secrets = slow
	goOn := sync.OnceFunc(func() { close(slow.goOn) })
	var group sync.WaitGroup
	defer group.Wait()
	defer goOn()
	create := func(name string) (int, string) {
		return a.do(http.MethodPost, "/system/secrets", `{"name": "`+name+`", "namespace": "team-a", "value": "v"}`)
	}
	var first, second int
	var said string
	group.Go(func() { first, _ = create("slow") })
	<-slow.arrived
	group.Go(func() { second, said = create("slow") })
	proctest.Until(t, "the second creation to wait", func() bool { return a.secretChanges.locks.Users("team-a/slow") == 2 })

	if code, body := a.do(http.MethodDelete, "/system/namespace/team-a", ""); code != http.StatusConflict || !strings.Contains(body, "is being changed") {
		t.Errorf("deletion of the namespace: %d %s; want 409", code, body)
	}
	if code, body := create("quick"); code != http.StatusCreated {
		t.Errorf("another secret: %d %s; want 201", code, body)
	}
	if code, body := a.do(http.MethodPost, "/system/functions", `{"service": "fn", "image": "stagecoach/echo:1"}`); code != http.StatusAccepted {
		t.Errorf("a deploy: %d %s; want 202", code, body)
	}
	if code, body := a.do(http.MethodDelete, "/system/secrets", `{"name": "quick", "namespace": "team-a"}`); code != http.StatusAccepted {
		t.Errorf("deletion of another secret: %d %s; want 202", code, body)
	}
	goOn()
	group.Wait()
	if first != http.StatusCreated || second != http.StatusConflict || !strings.Contains(said, "exists already") {
		t.Errorf("the creations got %d, and %d %s; want 201, and 409", first, second, said)
	}
	if code, body := a.do(http.MethodDelete, "/system/secrets", `{"name": "slow", "namespace": "team-a"}`); code != http.StatusAccepted {
		t.Errorf("deletion of the secret: %d %s; want 202", code, body)
	}
	if code, body := a.do(http.MethodDelete, "/system/namespace/team-a", ""); code != http.StatusAccepted {
		t.Errorf("deletion of the namespace, when it is empty: %d %s; want 202", code, body)
	}
}

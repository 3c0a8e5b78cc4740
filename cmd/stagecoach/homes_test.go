package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestNextLeaderHasAllImages deploys functions whose images only the leader has, kills the leader
// and deletes its folders. The next leader serves the functions, also one without replicas, and
// deploys one of them again by the name of its image.
func TestNextLeaderHasAllImages(t *testing.T) {
	of := natstest.Start(t, 1)
	images := t.TempDir()
	if err := os.CopyFS(filepath.Join(images, "stagecoach", "noop"), os.DirFS(proctest.Built(t, "images", "stagecoach", "noop"))); err != nil {
		t.Fatal(err)
	}
	a := start(t, "--nats", of.String(), "--images", images)
	a.leads(1)
	b := start(t, "--nats", of.String(), "--images", filepath.Join(t.TempDir(), "none"))
	b.standsBy(1)
	f := fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}
	b.deployAll(f, fn{"asleep", "noop", map[string]string{"min": "0", "zero": "true"}, nil, nil})
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	a.kill()
	for _, dir := range []string{images, a.state} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	b.leads(1)
	for _, name := range []string{"f", "asleep"} {
		if got := b.must(http.StatusOK, http.MethodPost, "/function/"+name, "y"); string(got.Body) != "y" {
			t.Errorf("%s answers %q", name, got.Body)
		}
	}
	f.labels = map[string]string{"min": "2"}
	b.deployAll(f)
	b.until(soon, "two replicas of the new revision", func() bool { return b.shows("f").AvailableReplicas == 2 })
}

// TestNextLeaderHasAllSecrets creates a secret through a control plane that stands by. The next
// leader starts a function with it. A control plane that lacks it does not lead, and says why,
// until the operator has it lead. Then the function says what it needs.
func TestNextLeaderHasAllSecrets(t *testing.T) {
	of, file := initialized(t, 1)
	flags := []string{"--nats", of.String(), "--cluster-key", file}
	a := start(t, flags...)
	a.leads(1)
	const secret = `{"name": "token", "value": "%s"}`
	if got := a.must(http.StatusCreated, http.MethodPost, "/system/secrets", fmt.Sprintf(secret, "one")); !strings.Contains(string(got.Body), "no other control plane is alive") {
		t.Errorf("with one control plane, the answer is %q", got.Body)
	}
	b := start(t, flags...)
	b.standsBy(1)
	b.until(soon, "the earlier secret to come", func() bool { return strings.Contains(b.log.String(), "this control plane has all secrets") })
	if got := b.must(http.StatusAccepted, http.MethodPut, "/system/secrets", fmt.Sprintf(secret, "two")); strings.TrimSpace(string(got.Body)) != "secret token" {
		t.Errorf("with two control planes, the answer is %q", got.Body)
	}
	value, err := os.ReadFile(filepath.Join(b.state, "secrets", "openfaas-fn", "token"))
	if err != nil || string(value) != "two" {
		t.Errorf("the other control plane has %q, %v", value, err)
	}
	d := fn{"f", "noop", map[string]string{"min": "1"}, nil, nil}.deployment()
	d.Secrets = []string{"token"}
	if err := b.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	b.until(soon, "b to know what the leader has deployed", func() bool { return b.send(http.MethodPost, "/function/f", "x").Status != http.StatusNotFound })
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	a.kill()
	b.leads(1)
	b.must(http.StatusOK, http.MethodPost, "/function/f", "x")
	if seen, err := filepath.Glob(filepath.Join(b.state, "secret-mounts", "openfaas-fn", "f", "*", "token")); os.Geteuid() != 0 && (err != nil || len(seen) != 1) {
		t.Errorf("the function sees %q, %v", seen, err)
	}

	b.stop()
	c := start(t, flags...)
	c.until(soon, "the log to say why it does not lead", func() bool { return strings.Contains(c.log.String(), "does not take the lead before it has them") })
	var out bytes.Buffer
	err = run(t.Context(), []string{"node", "list", "--gateway", c.Base}, &out)
	if err == nil || !strings.Contains(err.Error(), "it lacks the secrets openfaas-fn/token") || !strings.Contains(out.String(), "lacks secrets") {
		t.Errorf("node list: %v\n%s\nwant why nobody leads", err, out.String())
	}
	c.stop()
	c.args = append(c.args, "--lead-without-secrets")
	c.restart()
	c.leads(1)
	c.until(soon, "the function to say what it needs", func() bool {
		d, err := c.trySend(http.MethodGet, "/system/function/f", "")
		return err == nil && strings.Contains(string(d.Body), "failing") && strings.Contains(string(d.Body), "lacks the secrets token")
	})
	c.must(http.StatusCreated, http.MethodPost, "/system/secrets", fmt.Sprintf(secret, "three"))
	c.must(http.StatusOK, http.MethodPost, "/function/f", "x")
}

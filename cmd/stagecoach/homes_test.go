package main

import (
	"net/http"
	"os"
	"path/filepath"
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

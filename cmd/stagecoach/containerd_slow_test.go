package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestUpdatesWaitForContainerd updates functions while containerd answers 5 s late, and while it is
// killed under their starts. Their status says that it is containerd, and the older revisions serve
// on. Once containerd answers, the updates go on.
func TestUpdatesWaitForContainerd(t *testing.T) {
	t.Parallel()
	s, flags := containerFlags(t)
	proxy := s.Proxy()
	for i := range flags {
		if flags[i] == s.Address {
			flags[i] = proxy.Address
		}
	}
	r := &rig{t: t, log: &logFile{}, state: t.TempDir(), ctr: s}
	t.Cleanup(func() { nothingContained(t, s, nodeID(r.node(), r.state)) })
	startRig(t, r, flags...)
	fns := []fn{{name: "text", image: "ocr-text", labels: one(), env: map[string]string{}}, httpFn("web", one())}
	status := func(name string) string { return r.shows(name).Annotations[provider.StatusAnnotation] }
	version := 0
	update := func() {
		t.Helper()
		version++
		for _, f := range fns {
			r.deployAll(updated(f, version))
		}
	}
	ready := func() {
		t.Helper()
		for _, f := range fns {
			r.until(late, f.name+" to be ready", func() bool { return status(f.name) == provider.StatusReady })
		}
	}
	update()
	ready()
	texts := r.load(1, "/function/text", func(_ string, a client.Answer) error {
		if a.Status != http.StatusBadRequest {
			return fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		return nil
	})
	webs := r.load(1, "/function/web/status?code=200", func(_ string, a client.Answer) error {
		if a.Status != http.StatusOK {
			return fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		return nil
	})

	t.Log("containerd is slow")
	proxy.Delay(5 * time.Second)
	update()
	texts.turn()
	webs.turn()
	ready()
	proxy.Delay(0)

	t.Log("containerd is killed during starts")
	first, second := proxy.HoldRequest("Tasks/Create"), proxy.HoldRequest("Tasks/Create")
	update()
	<-first.Came
	<-second.Came
	s.Kill()
	first.Release()
	second.Release()
	for _, f := range fns {
		r.until(late, f.name+" to say why it fails", func() bool {
			text := status(f.name)
			return strings.HasPrefix(text, provider.StatusFailing+": ") && strings.Contains(text, "containerd: ")
		})
		t.Log(f.name, status(f.name))
	}
	texts.turn()
	webs.turn()
	s.Run()
	ready()
	for _, l := range []*load{texts, webs} {
		requests, wrong := l.end()
		for _, w := range wrong {
			t.Error(w)
		}
		t.Logf("%d requests, slowest answer %v", requests, l.slowest)
	}
}

package main

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAllStagesWakeAtOnce sends a request to a sleeping pipeline whose first stage holds it for an
// hour. The other stages get replicas meanwhile. When the request is given up, all stages sleep
// again.
func TestAllStagesWakeAtOnce(t *testing.T) { onEachRuntime(t, testAllStagesWakeAtOnce) }

func testAllStagesWakeAtOnce(t *testing.T, start starter) {
	config := filepath.Join(t.TempDir(), "config.yml") // nobody waits for the held requests at the end
	if err := os.WriteFile(config, []byte("control: {drainTimeout: 1s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, "--config", config)
	scale := map[string]string{"min": "0", "max": "4", "zero": "true", "zero-duration": "1s"}
	stages := []string{"first", "second", "third"}
	r.deployAll(
		waitFn("first", "1h", scale, map[string]string{"pipeline": "chain", "next": "second"}),
		waitFn("second", "0s", scale, map[string]string{"pipeline": "chain", "next": "third"}),
		waitFn("third", "0s", scale, map[string]string{"pipeline": "chain"}),
	)
	have := func(n int) func() bool {
		return func() bool {
			for _, name := range stages {
				if s := r.shows(name); s.Replicas != n || s.AvailableReplicas != n {
					return false
				}
			}
			return true
		}
	}
	// A stage that is called alone wakes alone.
	r.must(http.StatusOK, http.MethodPost, "/function/third", "x")
	for _, name := range stages[:2] {
		if ordered := r.events(name, "ordered"); len(ordered) > 0 {
			t.Errorf("a call of third alone has started %s: %+v", name, ordered)
		}
	}
	r.until(soon, "third to sleep", have(0))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.Base+"/function/chain", strings.NewReader("x"))
		if err != nil {
			ended <- err
			return
		}
		req.Header.Set("X-Timeout", "1h")
		resp, err := r.HTTP.Do(req)
		if err == nil {
			_ = resp.Body.Close()
		}
		ended <- err
	}()
	r.until(soon, "replicas of all stages while the first holds the request", have(1))
	if answers := r.events("first", "first answer"); len(answers) > 0 {
		t.Errorf("the first stage has answered: %+v", answers)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("the request was answered, want the first stage to hold it")
	}
	r.until(soon, "the stages to sleep again, though no request came to two of them", have(0))

	r.must(http.StatusAccepted, http.MethodPost, "/async-function/chain", "x", "X-Timeout", "1h")
	r.until(soon, "replicas of all stages while the first holds the async request", have(1))
}

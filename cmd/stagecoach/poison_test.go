package main

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// fragileImages returns a folder of images that has test/fragile:1, with a model.
func fragileImages(t *testing.T) string {
	t.Helper()
	images := t.TempDir()
	folder := filepath.Join(images, "test", "fragile", "1")
	if out, err := exec.Command("go", "build", "-o", filepath.Join(folder, "stage"), "./testdata/fragile").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	model, err := os.ReadFile(proctest.Built(t, "images", "stagecoach", "wait", "0.1.0", "model", "rec.onnx"))
	if err == nil {
		err = os.Mkdir(filepath.Join(folder, "model"), 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, "model", "rec.onnx"), model, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return images
}

// TestPoison sends requests that end their replica among others in the same batches and slots. Each
// of these requests gets 502 after the second replica, and no other request fails.
func TestPoison(t *testing.T) {
	t.Parallel()
	images := fragileImages(t)
	for name, tc := range map[string]struct {
		env      map[string]string
		poison   string
		max      int // replicas that one poison may end
		cause    string
		internal string // X-OpenFaaS-Internal
	}{
		"a process per replica": {nil, "poison", 2, "under this call", ""},
		"forked":                {map[string]string{"STAGECOACH_MODEL": "model/rec.onnx"}, "poison", 2, "under this call", ""},
		"killed":                {nil, "poison kill", 4, "lost its replica in attempt 3 of 3: killed by SIGKILL", "stagecoach"},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, "--images", images)
			r.deployAll(fn{"fragile", "test/fragile:1", map[string]string{"min": "2", "max": "3"}, map[string]string{"batch": "4"}, tc.env})
			r.until(late, "two replicas", func() bool { return r.line("fragile").Ready == 2 })
			l := r.load(16, "/function/fragile", func(body string, a client.Answer) error {
				if a.Status != http.StatusOK || string(a.Body) != body {
					return fmt.Errorf("status %d: %s", a.Status, a.Body)
				}
				return nil
			})
			poisons := 0
			for round := range 3 {
				l.turn()
				var wg sync.WaitGroup
				for i := range 2 {
					poisons++
					wg.Go(func() {
						a, err := r.trySend(http.MethodPost, "/function/fragile", fmt.Sprint(tc.poison, " ", round, i))
						if err != nil || a.Status != http.StatusBadGateway || !strings.Contains(string(a.Body), tc.cause) || a.Header.Get("X-OpenFaaS-Internal") != tc.internal {
							t.Errorf("poison: status %d %v: %s, %v, want 502 with %q", a.Status, a.Header, a.Body, err, tc.cause)
						}
					})
				}
				wg.Wait()
			}
			l.turn()
			requests, wrong := l.end()
			for _, w := range wrong {
				t.Error(w)
			}
			lost := r.events("fragile", "lost")
			for _, e := range lost {
				if !strings.Contains(e.Cause, "exit status 3: fragile: this input ends the process") && !strings.Contains(e.Cause, "killed by SIGKILL") {
					t.Errorf("%s was lost: %s, want the poison's doing", e.Replica, e.Cause)
				}
			}
			if len(lost) == 0 || len(lost) > tc.max*poisons {
				t.Errorf("%d replicas lost to %d poisons, want some, and at most %d per poison", len(lost), poisons, tc.max)
			}
			if got := r.value("stagecoach_flow_convicted_total"); (got == float64(poisons)) != (tc.internal == "") {
				t.Errorf("%v requests convicted of %d poisons", got, poisons)
			}
			t.Logf("%d good requests, %d poisons, %d replicas lost, %v calls retried, slowest good answer %v",
				requests, poisons, len(lost), r.value("stagecoach_flow_retries_total"), l.slowest)
		})
	}
}

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestNoRequestMeetsTwoRevisions redeploys, under load, a stage that is called for each of many
// items of a request. No request fails, and all items of a request are answered by one revision.
func TestNoRequestMeetsTwoRevisions(t *testing.T) {
	t.Parallel()
	r := start(t)
	const items, clients, redeploys = 40, 4, 4
	says := fn{
		"says", "echo-http",
		map[string]string{"min": "2", "max": "4"},
		map[string]string{"pipeline": "many", "each": "true"},
		// A process per call prints its environment.
		map[string]string{"fprocess": "env", "content_type": "text/plain", "generation": "0"},
	}
	r.deployAll(says)
	body, err := json.Marshal(make([]string, items))
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	seen := map[string]int{} // requests by generation
	generation := regexp.MustCompile(`(?m)^generation=\d+$`)
	check := func(a client.Answer) error {
		var out []string
		if err := json.Unmarshal(a.Body, &out); a.Status != http.StatusOK || err != nil || len(out) != items {
			return fmt.Errorf("status %d, %d items, %w: %.300s", a.Status, len(out), err, a.Body)
		}
		got := map[string]int{}
		for _, text := range out {
			got[generation.FindString(text)]++
		}
		if len(got) != 1 {
			return fmt.Errorf("answers of generations %v, want one", got)
		}
		mu.Lock()
		defer mu.Unlock()
		for g := range got {
			seen[g]++
		}
		return nil
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := check(r.send(http.MethodPost, "/function/many", string(body), "Content-Type", "application/json")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	answered := func(generation int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return t.Failed() || seen[fmt.Sprintf("generation=%d", generation)] >= 3
		}
	}
	for g := range redeploys {
		proctest.Until(t, "requests of one generation", answered(g))
		says.env["generation"] = fmt.Sprint(g + 1)
		r.deployAll(says)
	}
	proctest.Until(t, "requests of the last generation", answered(redeploys))
	close(stop)
	wg.Wait()
	if lost := r.events("says", "lost"); len(lost) > 0 {
		t.Errorf("lost, want drained: %+v", lost)
	}
	t.Log(seen)
}

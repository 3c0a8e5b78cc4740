package policy

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan/plantest"
)

// TestDefaultPoliciesThroughHistories decides in random worlds and checks that every plan is valid.
func TestDefaultPoliciesThroughHistories(t *testing.T) {
	for _, placer := range []string{"", "spread", "first-fit"} {
		c, err := Names{Placer: placer}.Choose()
		if err != nil {
			t.Fatal(err)
		}
		for seed := range uint64(20) {
			w := plantest.NewWorld(seed)
			var m Memory
			for range 40 {
				w.Step()
				p, next, stay, err := c.Decide(w.Snapshot(), m)
				if err != nil || len(stay) > 0 {
					t.Fatalf("placer %q, world %d: %v, held %v", placer, seed, err, stay)
				}
				m = next
				w.Apply(p.Wants)
			}
		}
	}
}

package accuracy

import (
	"fmt"
	"testing"
	"time"
)

func TestExplore(t *testing.T) {
	for seed := range uint64(60) {
		p := random(seed, false)
		c, err := newChoices(p)
		if err != nil {
			fmt.Println(seed, err)
			continue
		}
		m := newModel(c)
		at := time.Now()
		s, err := p.Solve()
		if err != nil {
			fmt.Println(seed, err)
			continue
		}
		fmt.Printf("%d stages %d repl %d chains %d rows %d cols %d: %v visited %d s %.7f a %.7f price %v changes %v gaps %v\n", seed, len(p.Stages), p.Replicas, s.Chains, m.rows, m.columns(), time.Since(at).Round(10*time.Microsecond), s.Visited, s.Served, s.Accuracy, s.Price, s.Changes, s.Gaps)
	}
}

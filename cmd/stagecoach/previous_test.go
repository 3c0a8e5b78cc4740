package main

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes cordons that the previous version has stored.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range previous.Messages(t, "$KV.cordons.", "") {
		c := decodeCordon(m.Data())
		if c.unknown != "" {
			t.Errorf("%s: %s", m.Subject, c.unknown)
		}
		previous.Kept(t, m, c)
	}
}

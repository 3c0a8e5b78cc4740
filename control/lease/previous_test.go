package lease

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes a lease that the previous version has stored.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range previous.Messages(t, "$KV.leases.", "") {
		r, err := decode(m.Data())
		if err != nil {
			t.Errorf("%s: %v", m.Subject, err)
			continue
		}
		previous.Kept(t, m, r)
	}
}

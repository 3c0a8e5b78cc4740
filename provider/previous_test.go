package provider

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes functions that the previous version has stored, and stores
// them again. No field may get lost.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range previous.Messages(t, "$KV.functions.", "") {
		d, err := decode(Entry{Key: m.Token(2), Value: m.Data(), Revision: 1})
		if err != nil {
			t.Errorf("%s: %v", m.Subject, err)
			continue
		}
		previous.Kept(t, m, record{recordVersion, d.stored})
	}
}

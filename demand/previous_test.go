package demand

import (
	"bytes"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes demand that the previous version has stored.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range previous.Messages(t, "$KV.demand.", "") {
		l, err := Decode(m.Data(), DefaultLimits())
		if err != nil {
			t.Errorf("%s: %v", m.Subject, err)
			continue
		}
		again, left := l.Encode(func(string) bool { return true }, 1<<20)
		if l.Apps() == 0 || left > 0 || again[len(magic)] == m.Data()[len(magic)] && !bytes.Equal(again, m.Data()) {
			t.Errorf("%s: %d applications, stored again as %q, want %q", m.Subject, l.Apps(), again, m.Data())
		}
	}
}

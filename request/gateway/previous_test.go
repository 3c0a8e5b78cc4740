package gateway

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes async requests and results that the previous version has
// stored.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range append(previous.Messages(t, "journal.", ""), previous.Messages(t, "dead.", "")...) {
		id := m.Token(strings.Count(m.Subject, "."))
		if http.Header(m.Header).Get("Kind") == "callback" {
			var n Notice
			if err := n.UnmarshalBinary(m.Data()); err != nil || n.URL != "http://127.0.0.1:1/" || n.Result.Status != http.StatusOK {
				t.Errorf("%s: %+v, %v", m.Subject, n, err)
			}
			continue
		}
		var e Entry
		if err := e.UnmarshalBinary(m.Data()); err != nil || e.Request.ID != id || e.Request.Target == "" {
			t.Errorf("%s: %+v, %v", m.Subject, e, err)
		}
	}
}

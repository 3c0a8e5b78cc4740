package stage

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestCallLogHasTheRequestsID checks that lines logged with a call's logger have the id that the
// client knows.
func TestCallLogHasTheRequestsID(t *testing.T) {
	var b bytes.Buffer
	c := &Call{Key: task.Key{Request: "id.x~1"}, log: slog.New(slog.NewTextHandler(&b, nil))}
	c.Log().Info("first")
	c.Header = []task.Header{{Name: "X-Call-Id", Value: "id"}}
	c.Log().Info("second")
	if out := b.String(); !strings.Contains(out, "msg=first call=id.x~1\n") || !strings.Contains(out, "msg=second call=id\n") {
		t.Errorf("got %s", out)
	}
}

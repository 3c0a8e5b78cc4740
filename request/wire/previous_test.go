package wire

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes a task that the previous version has sent to the control
// plane that leads.
func TestReadsThePreviousVersion(t *testing.T) {
	for _, m := range previous.Messages(t, "task.", "") {
		task, err := DecodeTask(m.Data())
		if err != nil || task.Function != m.Token(2) || task.Deadline.IsZero() {
			t.Errorf("%s: %+v, %v", m.Subject, task, err)
		}
	}
}

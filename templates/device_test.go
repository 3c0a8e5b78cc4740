package templates_test

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestPythonDevice: parameters come to a device as they were, in few buffers that are used again only when they are free, whatever the state
// is made of; a device without room is told with its sizes. The device is a stand-in in host memory.
func TestPythonDevice(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, proctest.Torch(t), "testdata/device_test.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH=python3-stage", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

package copies

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestNewClusterKey starts control planes in another cluster, with another key, on their folders.
// They keep their secrets. A control plane that has missed a change gets the latest value.
func TestNewClusterKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, b := w.plane("a", ""), w.plane("b", "")
	w.put(a, "s", "v1", 1, 1)
	w.end(b)
	w.put(a, "s", "v2", 0, 0)
	w.end(a)
	w = newWorld(t, 1)
	w.key = "another key"
	a, b = w.plane("a", a.dir), w.plane("b", b.dir)
	proctest.Until(t, "both to have the secret", func() bool { return len(b.Lacking()) == 0 && b.value("s") == "v2" })
	if got := a.Lacking(); len(got) != 0 || a.value("s") != "v2" {
		t.Errorf("a lacks %q, and has %q", got, a.value("s"))
	}
	w.put(b, "s", "v3", 1, 1)
}

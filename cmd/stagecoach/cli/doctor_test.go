package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
)

func TestDoctorNamesWhatIsMissing(t *testing.T) {
	server := containerdtest.Start(t)
	var out strings.Builder
	err := Doctor(t.Context(), []string{"--containerd-address", server.Address, "--containerd-snapshotter", "odd"}, &out)
	// The tests have no stagecoach-init beside them.
	if err == nil || !strings.Contains(err.Error(), "2 of 8 checks failed") {
		t.Errorf("%v, want 2 failed checks\n%s", err, out.String())
	}
	for _, want := range []string{"socket ok " + server.Address, "snapshotter missing no odd name one of", "stagecoach-init missing no /", "make build puts it beside stagecoach"} {
		if !strings.Contains(oneSpace(out.String()), want) {
			t.Errorf("want %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	err = Doctor(t.Context(), []string{"--json", "--containerd-address", filepath.Join(t.TempDir(), "none.sock")}, &out)
	if err == nil || !strings.Contains(out.String(), `{"check":"socket","ok":false,"found":"no /`) {
		t.Errorf("%v, want a failed check\n%s", err, out.String())
	}
}

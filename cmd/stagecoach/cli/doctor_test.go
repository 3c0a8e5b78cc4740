package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
)

func TestDoctorNamesWhatIsMissing(t *testing.T) {
	server := containerdtest.Start(t)
	var out strings.Builder
	err := (Doctor{}).Run(t.Context(), []string{"--containerd-address", server.Address, "--containerd-snapshotter", "odd"}, &out)
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
	conf := filepath.Join(t.TempDir(), "10.conf")
	if err := os.WriteFile(conf, []byte(`{"cniVersion": "1.0.0", "name": "ours", "type": "bridge", "ipam": {"type": "none-such"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	err = (Doctor{}).Run(t.Context(), []string{"--containerd-address", server.Address, "--cni-conf", filepath.Dir(conf), "--cni-bin-dir", "/usr/lib/cni:/opt/cni/bin"}, &out)
	for _, want := range []string{"CNI configuration ok " + conf + ": network ours", "CNI bridge ok /", "CNI none-such missing no none-such in /usr/lib/cni, /opt/cni/bin install the plugin"} {
		if err == nil || !strings.Contains(oneSpace(out.String()), want) {
			t.Errorf("%v, want %q in\n%s", err, want, out.String())
		}
	}
	out.Reset()
	err = (Doctor{}).Run(t.Context(), []string{"--cni-conf", filepath.Join(t.TempDir(), "none")}, &out)
	if err == nil || !strings.Contains(oneSpace(out.String()), "CNI configuration missing stat /") {
		t.Errorf("%v, want a missing configuration\n%s", err, out.String())
	}
	out.Reset()
	err = (Doctor{}).Run(t.Context(), []string{"--json", "--containerd-address", filepath.Join(t.TempDir(), "none.sock")}, &out)
	if err == nil || !strings.Contains(out.String(), `{"check":"socket","ok":false,"found":"no /`) {
		t.Errorf("%v, want a failed check\n%s", err, out.String())
	}
}

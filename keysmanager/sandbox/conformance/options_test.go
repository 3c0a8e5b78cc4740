package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestProgramGivesUpCapabilities checks what a program that is root in its root keeps.
func TestProgramGivesUpCapabilities(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		for caps, drop := range map[string][]string{
			"00000000a00405fb": nil, "00000000a00401fa": {"CAP_CHOWN", "CAP_NET_BIND_SERVICE", "CAP_SYS_ADMIN"}, "0000000000000000": {sandbox.DropAll},
		} {
			c := inside(root, "id", "status=CapEff", "status=CapPrm", "status=CapBnd")
			c.Options.Drop = drop
			want(t, r.said(t, c), "id: 0 0 ", "CapEff: "+caps, "CapPrm: "+caps, "CapBnd: "+caps)
		}
		c := r.beside(root, "status=CapEff")
		c.Options.Drop = []string{sandbox.DropAll}
		want(t, r.said(t, c), "CapEff: 0000000000000000")
	})
}

// TestProgramHasTheMachinesTimeZone checks /etc/localtime of a root whose own one leads to a file
// that must stay as it is.
func TestProgramHasTheMachinesTimeZone(t *testing.T) {
	zone, err := os.ReadFile("/etc/localtime")
	if err != nil {
		t.Skip(err) // then each root has its own
	}
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		write(t, filepath.Join(root, "zones/there"), "another zone", 0o644)
		if err := os.Symlink("/zones/there", filepath.Join(root, "etc/localtime")); err != nil {
			t.Fatal(err)
		}
		here := "read=/etc/localtime: " + string(zone[:4]) // TZif
		c := inside(root, "read=/etc/localtime", "read=/zones/there", "link=/etc/localtime")
		want(t, r.said(t, c), here, "read=/zones/there: another zone", "link=/etc/localtime: -")
		c.ReadOnly = true
		want(t, r.said(t, c), here)
		want(t, r.said(t, r.beside(root, "read=/etc/localtime")), here)
		link, err := os.Readlink("/etc/localtime")
		if err != nil || !strings.HasPrefix(link, "/") {
			return
		}
		write(t, filepath.Join(root, link), string(zone), 0o644)
		want(t, r.said(t, c), here, "link=/etc/localtime: "+link)
	})
}

// TestProcessesHaveNoRuntimeClassesAndDevices checks what a Runtime without containers answers to
// those who ask for them.
func TestProcessesHaveNoRuntimeClassesAndDevices(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		for text, o := range map[string]sandbox.Options{
			"annotation stagecoach.dev/runtime-class is gvisor":               {Class: "gvisor"},
			"annotation stagecoach.dev/cdi-devices is vendor.com/device=null": {Devices: []string{"vendor.com/device=null"}},
		} {
			c := inside(image(t), "id")
			c.Options = o
			_, err := r.try(t, c)
			if err == nil {
				t.Fatalf("%s: it starts", text)
			}
			if r.name == "process" {
				want(t, err.Error(), text, "start the node with --runtime containerd")
			} else {
				want(t, err.Error(), "none (--")
			}
		}
	})
}

package provider

import (
	"errors"
	"strings"
	"testing"
)

// TestOperatorAllowsClassesAndDevices checks what a deploy may ask for. A refusal lists it.
func TestOperatorAllowsClassesAndDevices(t *testing.T) {
	t.Parallel()
	p := &Provider{Config: Config{RuntimeClasses: []string{"gvisor", "plain"}, CDIDevices: []string{"vendor.com/device=*", "other.com/device=one"}}}
	for _, tc := range []struct{ class, devices, want string }{
		{"gvisor", "vendor.com/device=any,other.com/device=one", ""},
		{"", "", ""},
		{"kata", "", `annotations["stagecoach.dev/runtime-class"]: got "kata", want a runtime class that the operator allows (up --runtime-classes): gvisor, plain`},
		{"", "other.com/device=two", `annotations["stagecoach.dev/cdi-devices"]: got "other.com/device=two", want a device that the operator allows (up --cdi-devices): vendor.com/device=*, other.com/device=one`},
		{"", "nvidia.com/gpu=0", `got "nvidia.com/gpu=0"`},
	} {
		// What else is wrong is said elsewhere.
		annotations := map[string]string{"stagecoach.dev/variant-of": "f"}
		if tc.class != "" {
			annotations["stagecoach.dev/runtime-class"] = tc.class
		}
		if tc.devices != "" {
			annotations["stagecoach.dev/cdi-devices"] = tc.devices
		}
		err := errors.Join(p.checkOptions(annotations)...)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

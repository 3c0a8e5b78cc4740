package provider

import (
	"errors"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestOperatorAllowsWhatContainersGet checks what a deploy may ask for. A refusal lists it.
func TestOperatorAllowsWhatContainersGet(t *testing.T) {
	t.Parallel()
	p := &Provider{Config: Config{RuntimeClasses: []string{"gvisor", "plain"}, CDIDevices: []string{"vendor.com/device=*", "other.com/device=one"}, Spares: 2}}
	for _, tc := range []struct{ class, devices, spares, want string }{
		{"gvisor", "vendor.com/device=any,other.com/device=one", "2", ""},
		{"", "", "", ""},
		{"", "", "3", `annotations["stagecoach.dev/spares"]: got "3", want at most 2: the operator allows no more (up --spares)`},
		{"kata", "", "", `annotations["stagecoach.dev/runtime-class"]: got "kata", want a runtime class that the operator allows (up --runtime-classes): gvisor, plain`},
		{"", "other.com/device=two", "", `annotations["stagecoach.dev/cdi-devices"]: got "other.com/device=two", want a device that the operator allows (up --cdi-devices): vendor.com/device=*, other.com/device=one`},
		{"", "nvidia.com/gpu=0", "", `got "nvidia.com/gpu=0"`},
	} {
		// What else is wrong is said elsewhere.
		annotations := map[string]string{"stagecoach.dev/variant-of": "f"}
		if tc.class != "" {
			annotations["stagecoach.dev/runtime-class"] = tc.class
		}
		if tc.devices != "" {
			annotations["stagecoach.dev/cdi-devices"] = tc.devices
		}
		if tc.spares != "" {
			annotations["stagecoach.dev/spares"] = tc.spares
		}
		err := errors.Join(p.checkOptions(annotations)...)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

// TestADeployNamesThePoliciesThatThereAre refuses policies that do not exist.
func TestADeployNamesThePoliciesThatThereAre(t *testing.T) {
	t.Parallel()
	p := Policies{Allocators: []string{"accuracy", "sizer"}, Routes: []string{"best", "even"}}
	for _, tc := range []struct {
		asked pipeline.Policies
		want  string
	}{
		{pipeline.Policies{}, ""},
		{pipeline.Policies{Allocator: "accuracy", Rank: pipeline.RankFair, Route: "even"}, ""},
		{pipeline.Policies{Allocator: "accurate"}, `annotations["stagecoach.dev/allocator"]: got "accurate", want one of accuracy, sizer`},
		{pipeline.Policies{Route: "worst"}, `annotations["stagecoach.dev/route"]: got "worst", want one of best, even`},
	} {
		err := p.check(tc.asked)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || err.Error() != tc.want) {
			t.Errorf("%+v: %v, want %q", tc.asked, err, tc.want)
		}
	}
}

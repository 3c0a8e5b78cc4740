package pipeline

import (
	"strings"
	"testing"
)

func TestProbeAnnotationsAreChecked(t *testing.T) {
	for _, tc := range []struct{ key, value, want string }{
		{"ready.http.path", "/ready", ""},
		{"health.http.path", "/up,down", ""},
		{"health.http.initialDelay", "30s", ""},
		{"health.http.initialDelay", "0", ""},
		{"health.http.periodSeconds", "5", ""},
		{"ready.http.path", "ready", `annotations["com.openfaas.ready.http.path"]: got "ready", want a path`},
		{"health.http.path", "", "want a path"},
		{"health.http.path", "/a b", "want a path"},
		{"ready.http.path", "/a\x00", "want a path"},
		{"health.http.initialDelay", "soon", `annotations["com.openfaas.health.http.initialDelay"]: got "soon", want a duration`},
		{"health.http.periodSeconds", "-1", "want a duration"},
		{"health.http.unheardOf", "x", ""}, // not an annotation that Stagecoach reads
	} {
		_, err := Parse("f", "ns", nil, map[string]string{"com.openfaas." + tc.key: tc.value})
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s=%q: %v, want %q", tc.key, tc.value, err, tc.want)
		}
	}
}

package provider

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestModesOfTheWatchdog checks that a deploy accepts the watchdog's modes, and any value for a
// stage, and that a refusal names the modes.
func TestModesOfTheWatchdog(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	for i, tc := range []struct {
		image, mode string
		status      int
	}{
		{"stagecoach/echo:1", "http", http.StatusAccepted},
		{"stagecoach/echo:1", "streaming", http.StatusAccepted},
		{"stagecoach/echo:1", "serializing", http.StatusAccepted},
		{"stagecoach/echo:1", "static", http.StatusAccepted},
		{"stagecoach/stage-a:1", "eager", http.StatusAccepted},
		{"stagecoach/echo:1", "eager", http.StatusBadRequest},
		{"stagecoach/echo:1", "afterburn", http.StatusBadRequest},
	} {
		text := a.must(tc.status, post, functions, fmt.Sprintf(`{"service":"f%d","image":%q,"envVars":{"mode":%q}}`, i, tc.image, tc.mode))
		if tc.status == http.StatusBadRequest && !strings.Contains(text, `envVars.mode: got "`+tc.mode+`", want http, streaming, serializing or static`) {
			t.Errorf("%s of %s: %s, want the field and the modes", tc.mode, tc.image, text)
		}
	}
}

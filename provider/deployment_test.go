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

// TestDeployRefusesProgramsThatReplicasDoNotSee: the refusal names the field that names the
// program, and nothing is stored.
func TestDeployRefusesProgramsThatReplicasDoNotSee(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const why = `/tmp/venv/bin/python: functions have a /tmp of their own`
	for path, body := range map[string]string{
		"envProcess":         `"envProcess":"/tmp/venv/bin/python ./stage"`,
		"envVars.fprocess":   `"envVars":{"fprocess":"/tmp/venv/bin/python ./stage"}`,
		"function_process":   `"envVars":{"function_process":"/tmp/venv/bin/python ./stage"}`,
		"envProcess: got \"": `"envProcess":"/tmp/venv/bin/python","envVars":{"fprocess":"/opt/python"}`,
	} {
		text := a.must(http.StatusBadRequest, post, functions, `{"service":"f","image":"stagecoach/stage-a:1",`+body+`}`)
		if !strings.Contains(text, path) || !strings.Contains(text, why) {
			t.Errorf("%s: %s, want the field and why", body, text)
		}
		a.must(http.StatusNotFound, get, "/system/function/f", "")
	}
	a.must(http.StatusAccepted, post, functions, `{"service":"f","image":"stagecoach/stage-a:1","envProcess":"/opt/venv/bin/python ./stage"}`)
	a.must(http.StatusAccepted, post, functions, `{"service":"g","image":"stagecoach/echo:1","envVars":{"mode":"static","fprocess":"/tmp/x"}}`)
}

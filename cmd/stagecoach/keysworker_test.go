package main

import (
	"strings"
	"testing"
)

// TestKeysManagerFlags checks what the command refuses before it starts anything.
func TestKeysManagerFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--node a/b":            `--name: "a/b", want a name without spaces and slashes`,
		"--memory 1Mi":          "--memory: 1048576, want at least 64Mi",
		"--memory much":         `"much", want a number of bytes`,
		"--cpus 100000":         "--cpus: 100000, want 1 to",
		"--drain -1s":           "--drain: -1s, want 0 or more",
		"--ort /nowhere":        "--ort: stat /nowhere",
		"--log-format xml":      `--log-format: "xml", want text or json`,
		"--nats-token /nowhere": "", // found out later
	} {
		_, err := readKeysManagerConfig(strings.Fields(flags))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", flags, err, want)
		}
	}
}

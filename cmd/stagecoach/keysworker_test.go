package main

import (
	"os"
	"strings"
	"testing"
)

// TestTokenIsMadeOnceForItsOwner checks that the token is made once. If somebody opens the file to
// other users, its mode is set back.
func TestTokenIsMadeOnceForItsOwner(t *testing.T) {
	c := defaultConfig()
	c.State, c.NATS.Listen = t.TempDir(), "127.0.0.1:0"
	u := &up{cfg: c}
	first, err := u.natsToken()
	if err != nil || len(first) < 20 {
		t.Fatalf("token %q, %v", first, err)
	}
	if err := os.Chmod(u.tokenFile(), 0o644); err != nil {
		t.Fatal(err)
	}
	second, err := u.natsToken()
	if err != nil || second != first {
		t.Errorf("token %q, %v, want the same again, %q", second, err, first)
	}
	if info, err := os.Stat(u.tokenFile()); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	if err := os.WriteFile(u.tokenFile(), []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := u.natsToken(); err == nil || !strings.Contains(err.Error(), u.tokenFile()+" is empty") {
		t.Errorf("an empty file: %v", err)
	}
}

// TestKeysManagerFlags checks what the command refuses before it starts anything.
func TestKeysManagerFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--node a/b":            `--node: "a/b", want a name without spaces and slashes`,
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

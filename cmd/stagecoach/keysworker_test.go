package main

import (
	"crypto/tls"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
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

// TestCertificatesOfNATS checks that a daemon trusts servers as the file of --nats-ca says, and
// refuses a file without certificates.
func TestCertificatesOfNATS(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := readKeysManagerConfig([]string{"--nats-ca", file})
	if err != nil {
		t.Fatal(err)
	}
	if c.join.own == nil {
		t.Fatal("the file was not read")
	}
	conn, err := (&tls.Dialer{Config: c.join.own}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := os.WriteFile(file, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readKeysManagerConfig([]string{"--nats-ca", file}); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Errorf("a file without certificates: %v", err)
	}
}

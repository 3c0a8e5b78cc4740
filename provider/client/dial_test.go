package client

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDial: a gateway is a URL with or without its scheme, and errors do not show passwords.
func TestDial(t *testing.T) {
	t.Setenv("OPENFAAS_CONFIG", t.TempDir())
	for gateway, want := range map[string]string{
		"":                              DefaultGateway,
		"127.0.0.1:9":                   "http://127.0.0.1:9",
		"localhost:9/":                  "http://localhost:9",
		"https://user:secret@host/base": "https://host/base",
	} {
		t.Setenv("OPENFAAS_URL", "")
		if c, err := Dial(gateway); err != nil || c.Base != want {
			t.Errorf("%q: %+v, %v, want %s", gateway, c, err, want)
		}
	}
	for _, gateway := range []string{"ftp://user:secret@host", "http://", "http://user:secret@host:port", "http://a b"} {
		if c, err := Dial(gateway); err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "want a URL such as http://127.0.0.1:8080") {
			t.Errorf("%q: %+v, %v", gateway, c, err)
		}
	}
}

// TestDialReadsTheFolderOfCredentials takes a password that a URL could not have as it is.
func TestDialReadsTheFolderOfCredentials(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(AuthDirEnv, dir)
	if _, err := Dial(""); err == nil || !strings.Contains(err.Error(), AuthDirEnv) || !strings.Contains(err.Error(), "basic-auth-password") {
		t.Errorf("an empty folder: %v, want an error that names the variable and the file", err)
	}
	for name, text := range map[string]string{"basic-auth-user": "me\n", "basic-auth-password": "a/b#c?d%e@f"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Dial("http://gateway:8080")
	if err != nil || c.User != "me" || c.Pass != "a/b#c?d%e@f" {
		t.Errorf("credentials %q %q, %v", c.User, c.Pass, err)
	}
	if c, err := Dial("http://other:password@gateway:8080"); err != nil || c.User != "other" {
		t.Errorf("a URL with credentials: %q, %v, want those of the URL", c.User, err)
	}
}

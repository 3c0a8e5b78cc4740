package client

import (
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

package kube

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// server is an API server that has one Secret, and a pod's credentials for it.
func server(t *testing.T, data map[string][]byte) (*Client, string) {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		patch := SecretObject{}
		switch {
		case r.Header.Get("Authorization") != "Bearer good":
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"kind":"Status","message":"secrets \"join\" is forbidden: User \"pod\" cannot get resource \"secrets\""}`))
			return
		case r.URL.Path != "/api/v1/namespaces/ns/secrets/join":
			http.Error(w, "", http.StatusNotFound)
			return
		case r.Method == http.MethodPatch && r.Header.Get("Content-Type") == "application/merge-patch+json" && json.NewDecoder(r.Body).Decode(&patch) == nil:
			for k, v := range patch.Data {
				data[k] = v
			}
		case r.Method != http.MethodGet:
			http.Error(w, "", http.StatusMethodNotAllowed)
			return
		}
		_ = json.NewEncoder(w).Encode(SecretObject{Data: data})
	}))
	t.Cleanup(s.Close)
	account := t.TempDir()
	write(t, account, "token", "good\n")
	write(t, account, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	c, err := New(s.URL, account)
	if err != nil {
		t.Fatal(err)
	}
	return c, account
}

func write(t *testing.T, folder, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestSecretValue(t *testing.T) {
	c, account := server(t, map[string][]byte{"other": []byte("stays")})
	s := Secret{"ns", "join"}
	if v, err := c.Value(t.Context(), s, "token"); err != nil || v != nil {
		t.Errorf("value that is not set: %q, %v, want none", v, err)
	}
	if err := c.SetValue(t.Context(), s, "token", []byte("a\x00b")); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"token": "a\x00b", "other": "stays"} {
		if v, err := c.Value(t.Context(), s, key); err != nil || string(v) != want {
			t.Errorf("value of %s: %q, %v, want %q", key, v, err, want)
		}
	}
	if _, err := c.Value(t.Context(), Secret{"ns", "none"}, "token"); err == nil || !strings.Contains(err.Error(), `get secrets of namespace ns: "none": status 404`) {
		t.Errorf("Secret that does not exist: %v", err)
	}

	write(t, account, "token", "bad") // the token is read for each request
	_, err := c.Value(t.Context(), s, "token")
	if err == nil || !strings.Contains(err.Error(), `User "pod" cannot get resource "secrets"`) {
		t.Errorf("without the right: %v, want the API server's message", err)
	}
}

func TestClientTrustsOnlyTheClustersAuthority(t *testing.T) {
	c, _ := server(t, map[string][]byte{})
	// As if the file was of another cluster.
	c.http.Load().Transport.(*http.Transport).TLSClientConfig.RootCAs = x509.NewCertPool()
	if _, err := c.Value(t.Context(), Secret{"ns", "join"}, "token"); err == nil {
		t.Error("a client connects to a server whose authority it does not trust")
	}
	if _, err := New(c.base, t.TempDir()); !errors.Is(err, ErrNoPod) {
		t.Errorf("folder without credentials: %v, want ErrNoPod", err)
	}
}

func TestParseSecret(t *testing.T) {
	if s, err := ParseSecret("ns/join"); err != nil || s != (Secret{"ns", "join"}) || s.String() != "ns/join" {
		t.Errorf("ns/join: %v, %v", s, err)
	}
	for _, bad := range []string{"", "join", "/join", "ns/", "a/b/c"} {
		if _, err := ParseSecret(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

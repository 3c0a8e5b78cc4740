package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
)

// TestNewAuthority replaces the authority of the API server while a client lives.
func TestNewAuthority(t *testing.T) {
	known, account := server(t, map[string][]byte{"token": []byte("x")})
	current, err := os.ReadFile(filepath.Join(account, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, account, "ca.crt", other(t))
	c, err := New(known.base, account)
	if err != nil {
		t.Fatal(err)
	}
	s := Secret{"ns", "join"}
	if _, err := c.Value(t.Context(), s, "token"); err == nil {
		t.Fatal("the client trusts an authority that it does not know")
	}
	write(t, account, "ca.crt", "no certificate")
	if _, err := c.Value(t.Context(), s, "token"); err == nil {
		t.Fatal("the client trusts a server without a certificate of an authority")
	}
	write(t, account, "ca.crt", string(current))
	if v, err := c.Value(t.Context(), s, "token"); err != nil || string(v) != "x" {
		t.Errorf("with the new authority: %q, %v, want x", v, err)
	}
}

// other returns the certificate of another authority.
func other(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	is := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, is, is, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// TestBusyServer has an API server that refuses requests because it has too many.
func TestBusyServer(t *testing.T) {
	for what, x := range map[string]struct {
		later       string // Retry-After
		busy, asked int64
		ok          bool
	}{
		"once":             {"0", 1, 2, true},
		"for longer":       {"0", 9, 2, false},
		"too late":         {"3600", 1, 1, false},
		"it does not say":  {"", 1, 1, false},
		"it says nonsense": {"soon", 1, 1, false},
	} {
		var asked atomic.Int64
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if asked.Add(1) <= x.busy {
				w.Header().Set("Retry-After", x.later)
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			_, _ = w.Write([]byte(`{}`))
		}))
		t.Cleanup(s.Close)
		account := t.TempDir()
		write(t, account, "token", "good")
		write(t, account, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
		c, err := New(s.URL, account)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.CreatePod(t.Context(), Pod{Metadata: Meta{Name: "a", Namespace: "ns"}})
		if (err == nil) != x.ok || !x.ok && !refusedWith(err, http.StatusTooManyRequests) || asked.Load() != x.asked {
			t.Errorf("%s: %v after %d requests, want success: %t after %d", what, err, asked.Load(), x.ok, x.asked)
		}
	}
}

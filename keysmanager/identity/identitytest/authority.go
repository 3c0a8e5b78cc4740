// Package identitytest has an authority for tests, whose certificates nothing else trusts.
package identitytest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Authority signs certificates of a cluster.
type Authority struct {
	t       testing.TB
	cluster string
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	number  atomic.Int64
}

// New returns an authority for a cluster.
func New(t testing.TB, cluster string) *Authority {
	t.Helper()
	a := &Authority{t: t, cluster: cluster}
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: cluster}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	b, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.number.Store(1)
	return a
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// Change changes a certificate before it is signed.
type Change func(*x509.Certificate)

// Source returns what a process of this name has.
func (a *Authority) Source(role identity.Role, name string, change ...Change) identity.Source {
	a.t.Helper()
	me := identity.Name{Cluster: a.cluster, Role: role, Name: name}
	key := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.number.Add(1)), URIs: []*url.URL{me.URI()}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, f := range change {
		f(template)
	}
	b, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &source{me: me, cert: tls.Certificate{Certificate: [][]byte{b}, PrivateKey: key}, roots: roots}
}

type source struct {
	me    identity.Name
	cert  tls.Certificate
	roots *x509.CertPool
}

// Me implements identity.Source.
func (s *source) Me() identity.Name { return s.me }

// Server implements identity.Source.
func (s *source) Server() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{s.cert}, ClientCAs: s.roots, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
}

// Client implements identity.Source.
func (s *source) Client(want identity.Name) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{s.cert}, RootCAs: s.roots, MinVersion: tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // names are URIs, which VerifyConnection checks
		VerifyConnection: func(c tls.ConnectionState) error {
			if _, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: s.roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
				return err
			}
			if is, err := identity.NameOf(c.PeerCertificates[0]); err != nil || is != want {
				return fmt.Errorf("certificate of %v, want %v (%w)", is, want, err)
			}
			return nil
		},
	}
}

package authority

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// serverYears is how long the certificates of NATS servers are valid, in years.
const serverYears = 10

// Pair is a certificate with its key, as PEM files have them.
type Pair struct{ Certificate, Key []byte }

// ServerCertificate makes a certificate that a server of NATS outside shows to clients, with the
// authority's behind it. host is its name or address.
func (k ClusterKey) ServerCertificate(name, host string, now time.Time) (Pair, error) {
	key, ca := k.CA()
	of := identity.Name{Cluster: identity.ClusterOf(identity.KeyHash(ca)), Role: identity.NATS, Name: name}
	t := serverTemplate(name, host, now)
	t.URIs, t.DNSNames = []*url.URL{of.URI()}, append(t.DNSNames, identity.ServerName)
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	p, err := pairOf(t, key, ca)
	p.Certificate = append(p.Certificate, pemOf("CERTIFICATE", ca.Raw)...)
	return p, err
}

// RouteCertificate makes a certificate that a server of NATS outside shows to other servers.
// authority is that of [ClusterKey.RoutesCA].
func (k ClusterKey) RouteCertificate(name, host string, now time.Time) (p Pair, authority []byte, err error) {
	key, ca := k.RoutesCA()
	t := serverTemplate(name, host, now)
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	p, err = pairOf(t, key, ca)
	return p, pemOf("CERTIFICATE", ca.Raw), err
}

func serverTemplate(name, host string, now time.Time) *x509.Certificate {
	t := &x509.Certificate{
		Subject: pkix.Name{CommonName: "nats " + name}, NotBefore: now.Add(-24 * time.Hour), NotAfter: now.AddDate(serverYears, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if ip := net.ParseIP(host); ip != nil {
		t.IPAddresses = []net.IP{ip}
	} else {
		t.DNSNames = []string{host}
	}
	return t
}

// pairOf makes a key and signs its certificate.
func pairOf(t *x509.Certificate, by crypto.Signer, ca *x509.Certificate) (Pair, error) {
	key, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	serial, err2 := newSerial()
	if err := errors.Join(err1, err2); err != nil {
		return Pair{}, fmt.Errorf("authority: %w", err)
	}
	t.SerialNumber = serial
	cert, err1 := x509.CreateCertificate(rand.Reader, t, ca, key.Public(), by)
	private, err2 := x509.MarshalPKCS8PrivateKey(key)
	if err := errors.Join(err1, err2); err != nil {
		return Pair{}, fmt.Errorf("authority: certificate of %s: %w", t.Subject.CommonName, err)
	}
	return Pair{pemOf("CERTIFICATE", cert), pemOf("PRIVATE KEY", private)}, nil
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

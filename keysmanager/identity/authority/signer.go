package authority

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// signer signs certificates with the authority's key.
type signer struct {
	ca       *x509.Certificate
	key      crypto.Signer
	me       identity.Name // of this control plane
	lifetime time.Duration // of certificates
	now      func() time.Time

	mu  sync.Mutex       // not that of Authority, so that handshakes do not wait for the store
	own *tls.Certificate // of this control plane, with the authority's
}

// chain returns the certificate of this control plane, and the authority's behind it. The
// certificate is kept in memory and renewed after two thirds of its lifetime.
func (s *signer) chain() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if s.own != nil {
		issued := s.own.Leaf.NotBefore.Add(identity.Backdate)
		if now.Before(issued.Add(s.own.Leaf.NotAfter.Sub(issued) * 2 / 3)) {
			return s.own, nil
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("authority: key: %w", err)
	}
	leaf, err := s.issue(s.me, key.Public(), now)
	if err != nil {
		return nil, err
	}
	s.own = &tls.Certificate{Certificate: [][]byte{leaf.Raw, s.ca.Raw}, PrivateKey: key, Leaf: leaf}
	return s.own, nil
}

// leaf returns the certificate of this control plane alone.
func (s *signer) leaf() (*tls.Certificate, error) {
	c, err := s.chain()
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: c.Certificate[:1], PrivateKey: c.PrivateKey, Leaf: c.Leaf}, nil
}

// issue signs a certificate for a process.
func (s *signer) issue(name identity.Name, key crypto.PublicKey, now time.Time) (*x509.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name.String()},
		NotBefore:    now.Add(-identity.Backdate), NotAfter: now.Add(s.lifetime),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{name.URI()}, DNSNames: []string{identity.ServerName},
	}, s.ca, key, s.key)
	if err != nil {
		return nil, fmt.Errorf("authority: certificate of %s: %w", name, err)
	}
	return x509.ParseCertificate(der)
}

func newSerial() (*big.Int, error) {
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
}

// caLifetime is how long the authority's certificate is valid.
const caLifetime = 20 * 365 * 24 * time.Hour

// openCA reads the authority's key and certificate, or makes them if both files do not exist.
func openCA(dir string, now time.Time) (crypto.Signer, *x509.Certificate, error) {
	keyFile, certFile := filepath.Join(dir, "ca.key"), filepath.Join(dir, "ca.crt")
	keyText, err := os.ReadFile(keyFile)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(certFile); err == nil {
			return nil, nil, fmt.Errorf("%s exists without %s: restore the key, or remove the folder to make a new cluster", certFile, keyFile)
		}
		return makeCA(keyFile, certFile, now)
	}
	if err != nil {
		return nil, nil, err
	}
	certText, err := os.ReadFile(certFile)
	if err != nil {
		return nil, nil, err
	}
	return parseCA(keyText, certText, dir)
}

func parseCA(keyText, certText []byte, dir string) (crypto.Signer, *x509.Certificate, error) {
	keyBlock, _ := pem.Decode(keyText)
	certBlock, _ := pem.Decode(certText)
	if keyBlock == nil || certBlock == nil {
		return nil, nil, fmt.Errorf("%s: ca.key or ca.crt is no PEM", dir)
	}
	key, err1 := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	cert, err2 := x509.ParseCertificate(certBlock.Bytes)
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", dir, err)
	}
	signer, ok := key.(*ecdsa.PrivateKey)
	if !ok || !signer.PublicKey.Equal(cert.PublicKey) {
		return nil, nil, fmt.Errorf("%s: ca.crt is not of the key in ca.key", dir)
	}
	return signer, cert, nil
}

func makeCA(keyFile, certFile string, now time.Time) (crypto.Signer, *x509.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "stagecoach"},
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.Add(caLifetime),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}, &x509.Certificate{Subject: pkix.Name{CommonName: "stagecoach"}}, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	// The key comes last: a certificate without a key is refused, and is of no use to anybody.
	err = identity.WriteSecret(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	if err == nil {
		err = identity.WriteSecret(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
	}
	return key, cert, err
}

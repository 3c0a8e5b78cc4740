// Package authority decides who may join a cluster. It signs short-lived certificates, keeps join
// tokens, and revokes the certificates and NATS users of nodes.
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
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Users signs users of NATS; *queue.Keys implements it.
type Users interface {
	// Node signs a user for a node's daemon. user is the user's public key.
	Node(user, name string, expires time.Time) (token string, err error)
	// Join signs a user that may ask to join with one join token. The zero time is never.
	Join(id string, expires time.Time) (token string, err error)
}

// Bus is a Bus of this process.
type Bus interface {
	identity.Bus
	// Flush returns when all messages that were sent have been passed on.
	Flush() error
}

// Config configures an Authority.
type Config struct {
	Dir      string        // for its key, its certificate and its state; it is created
	Shared   *Shared       // in place of Dir, if several control planes are the authority
	Name     string        // of this control plane
	Lifetime time.Duration // of certificates; 0: a day
	Now      func() time.Time
	Users    Users
	Log      *slog.Logger
}

// Authority is a cluster's authority. It is safe for concurrent use.
type Authority struct {
	cfg    Config
	ca     *x509.Certificate
	key    crypto.Signer
	me     identity.Name
	source *identity.Holder
	store  stateStore
	stop   func()         // stops to watch the store
	cuts   sync.WaitGroup // calls of cut that nobody waits for

	mu       sync.Mutex
	state    state
	revision uint64 // of state, in store
	nodes    Bus    // nil: not served
	cut      func(users map[string]time.Time) error
	logged   map[string]bool // refusals that the log has

	chain sync.Mutex       // guards own, so that handshakes do not wait for the store
	own   *tls.Certificate // of this control plane, with the authority's
}

// Open reads the authority. The first call makes it. The caller closes it.
func Open(cfg Config) (*Authority, error) {
	if cfg.Lifetime == 0 {
		cfg.Lifetime = 24 * time.Hour
	}
	a := &Authority{cfg: cfg, logged: map[string]bool{}, stop: func() {}}
	var err error
	if cfg.Shared != nil {
		a.key, a.ca = cfg.Shared.Key.CA()
		a.store = &sealed{*cfg.Shared}
	} else {
		a.store = stateFile(filepath.Join(cfg.Dir, "state.json"))
		if a.key, a.ca, err = openCA(cfg.Dir, cfg.Now()); err != nil {
			return nil, fmt.Errorf("authority: %w", err)
		}
	}
	if err := a.load(); err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	a.me = identity.Name{Cluster: identity.ClusterOf(identity.KeyHash(a.ca)), Role: identity.Control, Name: cfg.Name}
	if _, err := a.Chain(); err != nil {
		return nil, err
	}
	a.source = identity.NewHolder(a.me, a.ca, cfg.Now, a.leaf)
	a.source.Revoke(a.state.Revoked)
	if cfg.Shared != nil {
		err = a.follow()
	}
	return a, err
}

// Close ends what Open has begun.
func (a *Authority) Close() {
	a.stop()
	a.cuts.Wait()
}

// Source returns the Source of this control plane.
func (a *Authority) Source() *identity.Holder { return a.source }

// Until returns until when a process has a certificate. A control plane makes its own, so it always
// has one.
func (a *Authority) Until(process identity.Name) time.Time {
	if process.Role != identity.Node {
		return a.ca.NotAfter
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state.Nodes[process.Name].until()
}

// Chain returns the certificate of this control plane, and the authority's behind it. The
// certificate is kept in memory and renewed after two thirds of its lifetime.
func (a *Authority) Chain() (*tls.Certificate, error) {
	a.chain.Lock()
	defer a.chain.Unlock()
	now := a.cfg.Now()
	if a.own != nil {
		issued := a.own.Leaf.NotBefore.Add(identity.Backdate)
		if now.Before(issued.Add(a.own.Leaf.NotAfter.Sub(issued) * 2 / 3)) {
			return a.own, nil
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("authority: key: %w", err)
	}
	leaf, err := a.issue(a.me, key.Public(), now)
	if err != nil {
		return nil, err
	}
	a.own = &tls.Certificate{Certificate: [][]byte{leaf.Raw, a.ca.Raw}, PrivateKey: key, Leaf: leaf}
	return a.own, nil
}

// leaf returns the certificate of this control plane alone.
func (a *Authority) leaf() (*tls.Certificate, error) {
	c, err := a.Chain()
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: c.Certificate[:1], PrivateKey: c.PrivateKey, Leaf: c.Leaf}, nil
}

// issue signs a certificate for a process.
func (a *Authority) issue(name identity.Name, key crypto.PublicKey, now time.Time) (*x509.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name.String()},
		NotBefore:    now.Add(-identity.Backdate), NotAfter: now.Add(a.cfg.Lifetime),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{name.URI()}, DNSNames: []string{identity.ServerName},
	}, a.ca, key, a.key)
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

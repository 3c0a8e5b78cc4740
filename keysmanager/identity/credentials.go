package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Credentials are what a node keeps of its membership. They are secret.
type Credentials struct {
	V           int       `json:"v"`
	Name        string    `json:"name"`
	Certificate []byte    `json:"certificate"` // X.509
	CA          []byte    `json:"ca"`          // X.509
	Key         []byte    `json:"key"`         // PKCS #8
	User        string    `json:"user"`        // token of the NATS user
	Seed        string    `json:"seed"`        // secret key of the NATS user
	Token       string    `json:"token"`       // identity of the join token
	Revoked     []Revoked `json:"revoked,omitempty"`
}

// parsed are credentials in the form that connections need.
type parsed struct {
	Credentials
	leaf, ca *x509.Certificate
	key      crypto.Signer
	name     Name
	tls      *tls.Certificate
}

// parse checks that the parts of credentials fit each other.
func (c Credentials) parse() (*parsed, error) {
	p := &parsed{Credentials: c}
	if c.V != Version {
		return nil, fmt.Errorf("identity: credentials of version %d, want %d", c.V, Version)
	}
	key, err := x509.ParsePKCS8PrivateKey(c.Key)
	if err != nil {
		return nil, fmt.Errorf("identity: key: %w", err)
	}
	if p.leaf, err = x509.ParseCertificate(c.Certificate); err != nil {
		return nil, fmt.Errorf("identity: certificate: %w", err)
	}
	if p.ca, err = x509.ParseCertificate(c.CA); err != nil {
		return nil, fmt.Errorf("identity: the authority's certificate: %w", err)
	}
	signer, ok := key.(crypto.Signer)
	public, ok2 := p.leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !ok2 || !public.Equal(signer.Public()) {
		return nil, errors.New("identity: the certificate is of another key")
	}
	if err := p.leaf.CheckSignatureFrom(p.ca); err != nil {
		return nil, fmt.Errorf("identity: certificate: %w", err)
	}
	if p.name, err = NameOf(p.leaf); err != nil {
		return nil, err
	}
	if want := (Name{ClusterOf(KeyHash(p.ca)), Node, c.Name}); p.name != want {
		return nil, fmt.Errorf("identity: the certificate is of %s of cluster %s, want %s of cluster %s", p.name, p.name.Cluster, want, want.Cluster)
	}
	p.key = signer
	p.tls = &tls.Certificate{Certificate: [][]byte{c.Certificate}, PrivateKey: signer, Leaf: p.leaf}
	return p, nil
}

// request returns a request for a certificate, PKCS #10.
func request(name Name, key crypto.Signer) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name.String()}, URIs: []*url.URL{name.URI()}}, key)
}

// newKey makes a key for a certificate.
func newKey() (crypto.Signer, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return key, der, err
}

func credentialsFile(dir string) string { return filepath.Join(dir, "node.json") }

// readCredentials reads credentials. The error is fs.ErrNotExist if there are none.
func readCredentials(dir string) (*parsed, error) {
	b, err := os.ReadFile(credentialsFile(dir))
	if err != nil {
		return nil, err
	}
	var c Credentials
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("identity: %s: %w", credentialsFile(dir), err)
	}
	p, err := c.parse()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", credentialsFile(dir), err)
	}
	return p, nil
}

func writeCredentials(dir string, c Credentials) error {
	b, err := json.MarshalIndent(c, "", "  ")
	if err == nil {
		err = WriteSecret(credentialsFile(dir), b)
	}
	return err
}

// WriteSecret replaces a file that only its owner may read. After a crash, the file is the old one
// or the new one. The folder is created.
func WriteSecret(file string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	return disk.Replace(file, b)
}

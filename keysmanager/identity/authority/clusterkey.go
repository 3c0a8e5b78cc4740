package authority

import (
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"strings"
	"time"
)

// ClusterKey is the secret that all control planes of a cluster share. All other private keys of
// the cluster's authority are derived from it, so none of them is stored or sent anywhere.
type ClusterKey struct{ secret [32]byte }

// clusterKeyPrefix begins the text of a cluster key. It has the version.
const clusterKeyPrefix = "stagecoach-cluster-1."

// NewClusterKey makes a key.
func NewClusterKey() ClusterKey {
	var k ClusterKey
	_, _ = rand.Read(k.secret[:]) // never fails
	return k
}

// ReadClusterKey reads a key from a file that other users cannot read.
func ReadClusterKey(file string) (ClusterKey, error) {
	info, err := os.Stat(file)
	if err != nil {
		return ClusterKey{}, fmt.Errorf("cluster key: %w", err)
	}
	if info.Mode().Perm()&0o007 != 0 {
		return ClusterKey{}, fmt.Errorf("cluster key: all users of the machine can read or write %s: chmod 400 it", file)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return ClusterKey{}, fmt.Errorf("cluster key: %w", err)
	}
	k, err := ParseClusterKey(string(b))
	if err != nil {
		return k, fmt.Errorf("%s: %w", file, err)
	}
	return k, nil
}

// ParseClusterKey reads the text of a key. Its errors do not have the text.
func ParseClusterKey(text string) (ClusterKey, error) {
	var k ClusterKey
	rest, ok := strings.CutPrefix(strings.TrimSpace(text), clusterKeyPrefix)
	b, err := base64.RawURLEncoding.DecodeString(rest)
	if !ok || err != nil || len(b) != len(k.secret) {
		return k, fmt.Errorf("cluster key: not a key, want the one line that `stagecoach cluster init` has written, which begins with %q", clusterKeyPrefix)
	}
	copy(k.secret[:], b)
	return k, nil
}

// Write writes the key to a new file with mode 0400.
func (k ClusterKey) Write(file string) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = fmt.Errorf("%s exists: it is not replaced, because it may be the key of a cluster", file)
		}
		return err
	}
	_, err = f.WriteString(clusterKeyPrefix + base64.RawURLEncoding.EncodeToString(k.secret[:]) + "\n")
	return errors.Join(err, f.Sync(), f.Close())
}

// Derive returns the secret for a purpose. The secrets of different purposes say nothing about each
// other.
func (k ClusterKey) Derive(purpose string) [32]byte {
	b, err := hkdf.Expand(sha256.New, k.secret[:], "stagecoach 1 "+purpose, 32)
	if err != nil {
		panic(err) // the length is wrong
	}
	return [32]byte(b)
}

// CA returns the key and the certificate of the authority.
func (k ClusterKey) CA() (crypto.Signer, *x509.Certificate) { return k.root("authority", "stagecoach") }

// RoutesCA returns the key and the certificate that sign the certificates with which NATS servers
// know each other. It is not the authority: a node must not pass for a server.
func (k ClusterKey) RoutesCA() (crypto.Signer, *x509.Certificate) {
	return k.root("routes", "stagecoach routes")
}

// root returns a key and its certificate. They are always the same.
func (k ClusterKey) root(purpose, name string) (crypto.Signer, *x509.Certificate) {
	seed := k.Derive(purpose)
	key := ed25519.NewKeyFromSeed(seed[:])
	begins := time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)
	der, err := x509.CreateCertificate(nil, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: begins, NotAfter: begins.AddDate(100, 0, 0),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}, &x509.Certificate{Subject: pkix.Name{CommonName: name}}, key.Public(), key)
	var cert *x509.Certificate
	if err == nil {
		cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		panic(err) // the template is wrong
	}
	return key, cert
}

// aead returns the cipher of sealed texts.
func (k ClusterKey) aead() cipher.AEAD {
	key := k.Derive("seal")
	block, err := aes.NewCipher(key[:])
	var out cipher.AEAD
	if err == nil {
		out, err = cipher.NewGCMWithRandomNonce(block)
	}
	if err != nil {
		panic(err) // the length is wrong
	}
	return out
}

// Seal encrypts a text with AES-256-GCM. what says which text it is: no other one passes for it.
func (k ClusterKey) Seal(what string, text []byte) []byte {
	return k.aead().Seal(nil, nil, text, []byte(what))
}

// ErrOtherKey means that a text was sealed with another cluster key, or was altered.
var ErrOtherKey = errors.New("the cluster key is not that of this cluster: copy the file that `stagecoach cluster init` has written for it")

// Unseal decrypts what Seal has returned.
func (k ClusterKey) Unseal(what string, b []byte) ([]byte, error) {
	text, err := k.aead().Open(nil, nil, b, []byte(what))
	if err != nil {
		return nil, ErrOtherKey
	}
	return text, nil
}

package identity

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Token lets a process join a cluster. Its text is a secret.
type Token struct {
	CA     [sha256.Size]byte // hash of the authority's public key, see [KeyHash]
	Secret string
	User   string // token of a NATS user that may ask to join, and nothing else
}

// tokenPrefix begins the text of a token. It has the version.
const tokenPrefix = "stagecoach-join-1."

// NewSecret returns a secret for a [Token].
func NewSecret() string { return rand.Text() }

// KeyHash returns the hash of a certificate's public key.
func KeyHash(c *x509.Certificate) [sha256.Size]byte { return sha256.Sum256(c.RawSubjectPublicKeyInfo) }

// ClusterOf returns the identity of a cluster whose authority has a key with this hash.
func ClusterOf(key [sha256.Size]byte) string {
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(key[:10]))
}

// Cluster returns the identity of the token's cluster.
func (t Token) Cluster() string { return ClusterOf(t.CA) }

// String returns the secret text that ParseToken reads.
func (t Token) String() string {
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(t.CA[:]) + "." + t.Secret + "." + t.User
}

// IsToken reports whether text is meant as a token, and not as the name of a file.
func IsToken(text string) bool { return strings.HasPrefix(text, tokenPrefix) }

// ParseToken reads the text of a token. Its errors do not have the text, which is a secret.
func ParseToken(text string) (Token, error) {
	rest, ok := strings.CutPrefix(text, tokenPrefix)
	if !ok {
		return Token{}, fmt.Errorf("identity: not a join token of this release, want a text that begins with %q", tokenPrefix)
	}
	ca, rest, ok1 := strings.Cut(rest, ".")
	secret, user, ok2 := strings.Cut(rest, ".")
	t := Token{Secret: secret, User: user}
	hash, err := base64.RawURLEncoding.DecodeString(ca)
	// A NATS user's token has three parts.
	if err != nil || !ok1 || !ok2 || copy(t.CA[:], hash) != len(t.CA) || len(hash) != len(t.CA) || len(secret) < 20 || strings.Count(user, ".") != 2 {
		return Token{}, errors.New("identity: the join token is incomplete: copy all of it, without line breaks")
	}
	return t, nil
}

// SecretHash returns the form in which an authority keeps a secret.
func SecretHash(secret string) string {
	hash := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(hash[:])
}

// TokenID returns the identity of the token that has a secret. It is no secret.
func TokenID(secret string) string { return SecretHash(secret)[:12] }

// ID returns the token's identity, which is no secret.
func (t Token) ID() string { return TokenID(t.Secret) }

// Package identity says who a process of a cluster is. Every process has a certificate that the
// cluster's authority has signed, and its name is in the certificate's only URI:
// stagecoach://CLUSTER/ROLE/NAME.
package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Role is what a process does in its cluster.
type Role string

// The roles.
const (
	Node    Role = "node"    // a KeysManager
	Control Role = "control" // a control plane: stagecoach up
	// NATS is a server of NATS outside. Its certificate is good for that alone: no process takes a
	// server for a peer.
	NATS Role = "nats"
)

// Name identifies a process. Cluster is the identity of the cluster's authority.
type Name struct {
	Cluster string
	Role    Role
	Name    string
}

const scheme = "stagecoach"

// URI returns the name as it stands in certificates.
func (n Name) URI() *url.URL {
	return &url.URL{Scheme: scheme, Host: n.Cluster, Path: "/" + string(n.Role) + "/" + n.Name}
}

func (n Name) String() string { return string(n.Role) + " " + n.Name }

// ParseURI reads a name from a certificate's URI.
func ParseURI(u *url.URL) (Name, error) {
	role, name, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	n := Name{u.Host, Role(role), name}
	if u.Scheme != scheme || !ok || n.Cluster == "" || name == "" || (n.Role != Node && n.Role != Control && n.Role != NATS) {
		return Name{}, fmt.Errorf("identity: URI %q, want %s://CLUSTER/%s|%s|%s/NAME", u, scheme, Node, Control, NATS)
	}
	return n, nil
}

// NameOf returns the name in a certificate. It does not verify the certificate.
func NameOf(c *x509.Certificate) (Name, error) {
	if len(c.URIs) != 1 {
		return Name{}, fmt.Errorf("identity: certificate of %q has %d URIs, want one", c.Subject, len(c.URIs))
	}
	return ParseURI(c.URIs[0])
}

// PeerOf returns the name of the other side of a connection, which the handshake has verified.
func PeerOf(s tls.ConnectionState) (Name, error) {
	if len(s.VerifiedChains) == 0 {
		return Name{}, errors.New("identity: the other side has no verified certificate")
	}
	return NameOf(s.PeerCertificates[0])
}

// Source gives out what a process needs for connections with other processes of its cluster. The
// configurations change while certificates are renewed and revoked, so callers ask for each
// connection again.
type Source interface {
	Me() Name
	// Server accepts only clients of this cluster that are not revoked.
	Server() *tls.Config
	// Client connects to want, and refuses any other server.
	Client(want Name) *tls.Config
}

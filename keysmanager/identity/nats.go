package identity

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// clockGrace is how long before and after its validity a control plane's certificate is taken for
// connections to NATS. So a node with a wrong clock can be told that its clock is wrong.
const clockGrace = 24 * time.Hour

// ErrOtherCluster means that a server is not of the process's cluster.
var ErrOtherCluster = errors.New("identity: another cluster")

// NATSClient returns how to connect to the NATS of a cluster. ca is the hash of the public key of
// the cluster's authority. The server must be a control plane or a NATS server of the cluster, and
// must show the authority's certificate.
func NATSClient(ca [sha256.Size]byte, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: ServerName,
		InsecureSkipVerify: true, // VerifyConnection verifies: the authority is known by its key alone
		VerifyConnection:   func(s tls.ConnectionState) error { return verifyNATS(s.PeerCertificates, ca, now()) },
	}
}

// verifyNATS verifies the chain of a NATS server.
func verifyNATS(chain []*x509.Certificate, ca [sha256.Size]byte, now time.Time) error {
	if len(chain) == 0 {
		return errors.New("identity: the NATS server has no certificate")
	}
	cluster := ClusterOf(ca)
	leaf := chain[0]
	roots, found := x509.NewCertPool(), false
	for _, c := range chain[1:] {
		if KeyHash(c) == ca {
			roots.AddCert(c)
			found = true
		}
	}
	name, err := NameOf(leaf)
	if !found {
		if err != nil {
			return fmt.Errorf("%w: the NATS server is not of cluster %s: its certificate is of %q", ErrOtherCluster, cluster, leaf.Subject)
		}
		return fmt.Errorf("%w: the NATS server is %s of cluster %s, and this process is of cluster %s: use a token of that cluster, or another address", ErrOtherCluster, name, name.Cluster, cluster)
	}
	if err != nil {
		return err
	}
	at := now
	switch {
	case now.Before(leaf.NotBefore) && now.Add(clockGrace).After(leaf.NotBefore):
		at = leaf.NotBefore
	case now.After(leaf.NotAfter) && now.Add(-clockGrace).Before(leaf.NotAfter):
		at = leaf.NotAfter
	}
	options := x509.VerifyOptions{Roots: roots, CurrentTime: at, DNSName: ServerName, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	if _, err := leaf.Verify(options); err != nil {
		return explain(err, cluster, now)
	}
	if name.Role != Control && name.Role != NATS || name.Cluster != cluster {
		return fmt.Errorf("identity: the NATS server is %s of cluster %s, want a control plane or a server of cluster %s", name, name.Cluster, cluster)
	}
	return nil
}

// NATSServer returns how the NATS of a control plane listens. chain returns the current certificate
// of the control plane, with the authority's.
func NATSServer(chain func() (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return chain() },
	}
}

package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ServerName is in every certificate of every cluster, because package crypto/tls wants a host's
// name. The URI of a certificate says who the process is.
const ServerName = "stagecoach.internal"

// ErrRevoked means that a certificate was revoked.
var ErrRevoked = errors.New("identity: revoked")

// Holder is a Source that follows renewals and revocations. It is safe for concurrent use.
type Holder struct {
	me  Name
	ca  *x509.CertPool
	now func() time.Time
	own func() (*tls.Certificate, error)

	mu      sync.Mutex
	revoked map[string]Revoked // by serial
	watch   map[int]func()
	next    int // key of the next watcher
}

// NewHolder returns a Source of the process me. own returns its current certificate.
func NewHolder(me Name, ca *x509.Certificate, now func() time.Time, own func() (*tls.Certificate, error)) *Holder {
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return &Holder{me: me, ca: pool, now: now, own: own, revoked: map[string]Revoked{}, watch: map[int]func(){}}
}

// Me implements Source.
func (h *Holder) Me() Name { return h.me }

// Server implements Source.
func (h *Holder) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Time: h.now, SessionTicketsDisabled: true,
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: h.ca,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return h.own() },
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := h.peer(s)
			return err
		},
	}
}

// Client implements Source.
func (h *Holder) Client(want Name) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Time: h.now,
		RootCAs: h.ca, ServerName: ServerName,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return h.own() },
		VerifyConnection: func(s tls.ConnectionState) error {
			got, err := h.peer(s)
			if err == nil && got != want {
				err = fmt.Errorf("identity: the server is %s, want %s", got, want)
			}
			return err
		},
	}
}

// peer returns the name of the other side, and refuses it if it is of another cluster or revoked.
func (h *Holder) peer(s tls.ConnectionState) (Name, error) {
	n, err := PeerOf(s)
	if err == nil {
		err = h.Check(s.PeerCertificates[0])
	}
	return n, err
}

// Check refuses a certificate that is of another cluster or revoked. It does not verify the
// signature. A caller with open connections calls Check again after each revocation, see OnRevoke.
func (h *Holder) Check(c *x509.Certificate) error {
	n, err := NameOf(c)
	if err != nil {
		return err
	}
	if n.Cluster != h.me.Cluster {
		return fmt.Errorf("identity: %s is of cluster %s, want %s", n, n.Cluster, h.me.Cluster)
	}
	if n.Role == NATS {
		return fmt.Errorf("identity: %s is a server of NATS, want a node or a control plane", n)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, bad := h.revoked[SerialOf(c)]; bad {
		return fmt.Errorf("%w: the certificate of %s", ErrRevoked, n)
	}
	return nil
}

// SerialOf returns the serial number of a certificate as lists of revoked ones have it.
func SerialOf(c *x509.Certificate) string { return c.SerialNumber.Text(16) }

// Revoke replaces the list of revoked certificates. Then it calls what OnRevoke has registered, if
// the list has new ones.
func (h *Holder) Revoke(all []Revoked) {
	list, grown := map[string]Revoked{}, false
	h.mu.Lock()
	for _, r := range all {
		list[r.Serial] = r
		if _, known := h.revoked[r.Serial]; !known {
			grown = true
		}
	}
	h.revoked = list
	var call []func()
	for _, f := range h.watch {
		call = append(call, f)
	}
	h.mu.Unlock()
	for _, f := range call {
		if grown {
			f()
		}
	}
}

// OnRevoke calls f after certificates were revoked, until stop is called. f must not block.
func (h *Holder) OnRevoke(f func()) (stop func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key := h.next
	h.next++
	h.watch[key] = f
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watch, key)
	}
}

// Explain adds the cause to the error of a handshake, if the cause is another cluster's certificate
// or a wrong clock.
func (h *Holder) Explain(err error) error { return explain(err, h.me.Cluster, h.now()) }

func explain(err error, cluster string, now time.Time) error {
	var authority x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &authority) && authority.Cert != nil:
		if n, err2 := NameOf(authority.Cert); err2 == nil && n.Cluster != cluster {
			return fmt.Errorf("identity: the other side is %s of cluster %s, and this process is of cluster %s: %w", n, n.Cluster, cluster, err)
		}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		c := invalid.Cert
		return fmt.Errorf("identity: the certificate of the other side is valid from %s to %s, and this machine's clock says %s; set the clock that is wrong: %w",
			c.NotBefore.UTC().Format(time.RFC3339), c.NotAfter.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), err)
	}
	return err
}

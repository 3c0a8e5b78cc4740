// Package authority decides who may join a cluster. It signs short-lived certificates, keeps join
// tokens, and revokes the certificates and NATS users of nodes.
package authority

import (
	"crypto/tls"
	"fmt"
	"log/slog"
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
	signer signer
	source *identity.Holder
	stop   func()         // stops to watch the store
	cuts   sync.WaitGroup // calls of cut that nobody waits for

	mu sync.Mutex
	register
	followed map[string]revokedUser // revoked users, when the store has told of the latest change
	nodes    Bus                    // nil: not served
	cut      func(users map[string]time.Time) error
	said     refusals
}

// Open reads the authority. The first call makes it. The caller closes it.
func Open(cfg Config) (*Authority, error) {
	if cfg.Lifetime == 0 {
		cfg.Lifetime = 24 * time.Hour
	}
	a := &Authority{
		cfg: cfg, signer: signer{lifetime: cfg.Lifetime, now: cfg.Now}, register: register{now: cfg.Now}, stop: func() {},
		said: refusals{log: cfg.Log, logged: map[string]bool{}},
	}
	var err error
	if cfg.Shared != nil {
		a.signer.key, a.signer.ca = cfg.Shared.Key.CA()
		a.store, a.shared = &sealed{*cfg.Shared}, true
	} else {
		a.store = stateFile(filepath.Join(cfg.Dir, "state.json"))
		if a.signer.key, a.signer.ca, err = openCA(cfg.Dir, cfg.Now()); err != nil {
			return nil, fmt.Errorf("authority: %w", err)
		}
	}
	if err := a.load(); err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	a.signer.me = identity.Name{Cluster: identity.ClusterOf(identity.KeyHash(a.signer.ca)), Role: identity.Control, Name: cfg.Name}
	if _, err := a.Chain(); err != nil {
		return nil, err
	}
	a.source = identity.NewHolder(a.signer.me, a.signer.ca, cfg.Now, a.signer.leaf)
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
		return a.signer.ca.NotAfter
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state.Nodes[process.Name].until()
}

// Chain returns the certificate of this control plane, and the authority's behind it. The
// certificate is kept in memory and renewed after two thirds of its lifetime.
func (a *Authority) Chain() (*tls.Certificate, error) { return a.signer.chain() }

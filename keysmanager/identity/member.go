package identity

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Bus carries messages to and from the authority by their kind; queue.Link implements it. A message
// is about a node, or about the token of a process that joins.
type Bus interface {
	Send(about, kind, reply string, data []byte) error
	Listen(about, kind string, f func(about, reply string, data []byte)) (stop func(), err error)
}

// MemberConfig configures a Member.
type MemberConfig struct {
	Dir  string // for its credentials; it is created
	Name string // of the node
	Now  func() time.Time
	// NewUser makes the key of a NATS user.
	NewUser func() (seed, public string, err error)
	Log     *slog.Logger
}

// Member is a node's membership in its cluster. It is safe for concurrent use.
type Member struct {
	cfg MemberConfig

	mu     sync.Mutex
	now    *parsed // nil: the node has not joined
	holder *Holder
	skewed string // the latest logged fault of the clock
}

// OpenMember reads the credentials in a folder. Credentials that cannot be read or are of another
// node count as none, and the log says so.
func OpenMember(cfg MemberConfig) (*Member, error) {
	m := &Member{cfg: cfg}
	p, err := readCredentials(cfg.Dir)
	if err == nil && p.Name != cfg.Name {
		err = fmt.Errorf("identity: %s is of node %q, want %q", cfg.Dir, p.Name, cfg.Name)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return m, nil
	case errors.Is(err, fs.ErrPermission):
		return nil, err
	case err != nil:
		cfg.Log.Error("the node's credentials are of no use: it has to join again", "error", err)
		return m, nil
	}
	m.set(p)
	return m, nil
}

// set makes credentials the current ones.
func (m *Member) set(p *parsed) {
	m.mu.Lock()
	if m.holder == nil || m.holder.Me() != p.name || !m.now.ca.Equal(p.ca) {
		m.holder = NewHolder(p.name, p.ca, m.cfg.Now, m.certificate)
	}
	m.now = p
	holder := m.holder
	m.mu.Unlock()
	holder.Revoke(p.Revoked) // without m.mu: it calls others
}

func (m *Member) certificate() (*tls.Certificate, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now == nil {
		return nil, errors.New("identity: this node has left its cluster")
	}
	return m.now.tls, nil
}

// Joined reports whether the node has credentials with which it can connect to NATS.
func (m *Member) Joined() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now != nil && m.cfg.Now().Before(m.now.leaf.NotAfter.Add(Away))
}

// JoinedWith reports whether the node has joined the token's cluster.
func (m *Member) JoinedWith(t Token) (cluster, token bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now == nil {
		return false, false
	}
	return KeyHash(m.now.ca) == t.CA, m.now.Token == t.ID()
}

// Source returns the node's Source, or nil if the node has not joined.
func (m *Member) Source() *Holder {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.holder
}

// User returns the token of the node's NATS user.
func (m *Member) User() (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now == nil {
		return "", errors.New("identity: this node has left its cluster")
	}
	return m.now.User, nil
}

// NATS returns how to connect to NATS as the node: the secret key of its user, and TLS.
func (m *Member) NATS() (seed string, c *tls.Config) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now.Seed, NATSClient(KeyHash(m.now.ca), m.cfg.Now)
}

// answerTimeout is how long an answer may take before the question is sent again.
const answerTimeout = 2 * time.Second

// Join asks the token's authority to let the node join, until it is answered or ctx ends. bus
// carries the messages of processes that join.
func (m *Member) Join(ctx context.Context, bus Bus, t Token) error {
	seed, public, err := m.cfg.NewUser()
	if err != nil {
		return err
	}
	key, der, err := newKey()
	if err != nil {
		return fmt.Errorf("identity: key: %w", err)
	}
	name := Name{t.Cluster(), Node, m.cfg.Name}
	csr, err := request(name, key)
	if err != nil {
		return fmt.Errorf("identity: request: %w", err)
	}
	a, err := exchange(ctx, bus, t.ID(), KindJoin, func() Ask {
		return Ask{V: Version, Name: m.cfg.Name, Secret: t.Secret, Request: csr, User: public, Time: m.cfg.Now()}
	})
	if err != nil {
		return fmt.Errorf("join cluster %s as node %q: %w", t.Cluster(), m.cfg.Name, err)
	}
	c := Credentials{V: Version, Name: m.cfg.Name, Certificate: a.Certificate, CA: a.CA, Key: der, User: a.User, Seed: seed, Token: t.ID(), Revoked: a.Revoked}
	p, err := c.parse()
	if err == nil && KeyHash(p.ca) != t.CA {
		err = fmt.Errorf("identity: the answer is of cluster %s", p.name.Cluster)
	}
	if err == nil {
		err = writeCredentials(m.cfg.Dir, c)
	}
	if err != nil {
		return fmt.Errorf("join cluster %s as node %q: %w", t.Cluster(), m.cfg.Name, err)
	}
	m.set(p)
	return nil
}

// RefusedError is the authority's refusal.
type RefusedError struct{ Cause string }

func (e *RefusedError) Error() string { return "refused by the control plane: " + e.Cause }

// exchange asks until it is answered or ctx ends. It asks again after answerTimeout. An answer that
// cannot be read is an error.
func exchange(ctx context.Context, bus Bus, about, kind string, ask func() Ask) (Answer, error) {
	got := make(chan []byte, 1)
	reply := KindAnswer + rand.Text()
	stop, err := bus.Listen(about, reply, func(_, _ string, data []byte) {
		if len(data) == 0 {
			return // nobody listens yet
		}
		select {
		case got <- data:
		default:
		}
	})
	if err != nil {
		return Answer{}, err
	}
	defer stop()
	again := time.NewTicker(answerTimeout)
	defer again.Stop()
	var sent error
	for {
		b, err := json.Marshal(ask())
		if err != nil {
			return Answer{}, err
		}
		sent = bus.Send(about, kind, reply, b) // again later
		select {
		case <-ctx.Done():
			return Answer{}, errors.Join(context.Cause(ctx), sent)
		case <-again.C:
		case b := <-got:
			a, err := DecodeAnswer(b)
			if err == nil && a.Error != "" {
				err = &RefusedError{a.Error}
			}
			return a, err
		}
	}
}

// Times of Serve.
const (
	syncEvery  = time.Minute // between questions for what is revoked
	retryRenew = 10 * time.Second
)

// Serve renews the credentials and follows revocations until ctx ends. bus is the node's. renewed
// is called after a renewal. If the node itself is revoked, Serve deletes the credentials and
// returns an error that is ErrRevoked.
func (m *Member) Serve(ctx context.Context, bus Bus, renewed func()) error {
	lists := make(chan []Revoked, 16)
	stop, err := bus.Listen(m.cfg.Name, KindRevoked, func(_, _ string, data []byte) {
		if a, err := DecodeAnswer(data); err == nil {
			select {
			case lists <- a.Revoked:
			default: // the next question gets a newer one
			}
		}
	})
	if err != nil {
		return err
	}
	defer stop()
	wait := time.Duration(0) // asked at once
	for {
		select {
		case <-ctx.Done():
			return nil
		case list := <-lists:
			if err := m.revoked(list); err != nil {
				return err
			}
			continue
		case <-time.After(wait):
		}
		did, err := m.Sync(ctx, bus)
		if errors.Is(err, ErrRevoked) {
			return err
		}
		if err != nil && ctx.Err() == nil {
			m.cfg.Log.Warn("failed to ask the control plane for the node's certificate; asking again", "error", err)
		}
		if did {
			renewed()
		}
		wait = m.pause(err)
	}
}

// pause returns how long Serve waits before the next question.
func (m *Member) pause(failed error) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	wait := min(syncEvery, renewal(m.now).Sub(m.cfg.Now()))
	if failed != nil {
		wait = min(retryRenew, m.now.leaf.NotAfter.Sub(m.now.leaf.NotBefore.Add(Backdate))/20)
	}
	return max(wait, 100*time.Millisecond)
}

// renewal returns when credentials have to be renewed: after two thirds of their lifetime.
func renewal(p *parsed) time.Time {
	issued := p.leaf.NotBefore.Add(Backdate)
	return issued.Add(p.leaf.NotAfter.Sub(issued) * 2 / 3)
}

// Sync asks the authority once for what is revoked and, if it is time, for new credentials. It
// reports whether it has renewed them.
func (m *Member) Sync(ctx context.Context, bus Bus) (renewed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*answerTimeout)
	defer cancel()
	m.mu.Lock()
	was := m.now
	m.mu.Unlock()
	if was == nil {
		return false, errors.New("identity: this node has not joined")
	}
	ask := Ask{V: Version, Name: m.cfg.Name}
	var der []byte
	due := !m.cfg.Now().Before(renewal(was))
	if due {
		var key crypto.Signer
		if key, der, err = newKey(); err == nil {
			ask.Request, err = request(was.name, key)
		}
		if err != nil {
			return false, err
		}
	}
	a, err := exchange(ctx, bus, m.cfg.Name, KindIdentity, func() Ask { ask.Time = m.cfg.Now(); return ask })
	if err != nil {
		return false, err
	}
	m.logSkew(Skew(m.cfg.Name, m.cfg.Now(), a.Time))
	if due {
		if err := m.renew(was, a, der); err != nil {
			return false, err
		}
	}
	return due, m.revoked(a.Revoked)
}

// renew takes a new certificate.
func (m *Member) renew(was *parsed, a Answer, der []byte) error {
	c := was.Credentials
	c.Certificate, c.CA, c.User, c.Key, c.Revoked = a.Certificate, a.CA, a.User, der, a.Revoked
	p, err := c.parse()
	if err == nil && !p.ca.Equal(was.ca) {
		err = errors.New("identity: the renewed certificate is of another authority")
	}
	if err == nil {
		err = writeCredentials(m.cfg.Dir, c)
	}
	if err != nil {
		return fmt.Errorf("renew the certificate: %w", err)
	}
	m.set(p)
	m.cfg.Log.Info("certificate renewed", "node", m.cfg.Name, "until", p.leaf.NotAfter)
	return nil
}

// revoked takes a list of revoked certificates, and keeps it. The error is ErrRevoked if the node's
// own is among them.
func (m *Member) revoked(list []Revoked) error {
	holder, err := m.keep(list)
	if err == nil && holder != nil {
		holder.Revoke(list)
	}
	return err
}

func (m *Member) keep(list []Revoked) (*Holder, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now == nil {
		return nil, nil
	}
	own := SerialOf(m.now.leaf)
	for _, r := range list {
		if r.Serial == own {
			return nil, m.expelled()
		}
	}
	if sameSerials(list, m.now.Revoked) {
		return m.holder, nil
	}
	now := *m.now
	now.Revoked = list
	m.now = &now
	if err := writeCredentials(m.cfg.Dir, now.Credentials); err != nil {
		m.cfg.Log.Warn("failed to keep the list of revoked certificates; it is asked for after a restart", "error", err)
	}
	return m.holder, nil
}

func sameSerials(a, b []Revoked) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Serial != b[i].Serial {
			return false
		}
	}
	return true
}

// logSkew logs a wrong clock once.
func (m *Member) logSkew(skew string) {
	m.mu.Lock()
	was := m.skewed
	m.skewed = skew
	m.mu.Unlock()
	if skew != "" && was == "" {
		m.cfg.Log.Error(skew)
	}
}

// Expelled deletes the node's credentials, because NATS says that its user is revoked. It returns
// the same error as Serve.
func (m *Member) Expelled() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.expelled()
}

func (m *Member) expelled() error {
	err := os.Remove(credentialsFile(m.cfg.Dir))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(fmt.Errorf("%w: this node, %q; to join again, it needs a new token (stagecoach node token --name %s)", ErrRevoked, m.cfg.Name, m.cfg.Name), err)
}

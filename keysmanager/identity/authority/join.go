package authority

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// maxNodes bounds the nodes with valid certificates.
const maxNodes = 8192

// maxName bounds a node's name, in bytes.
const maxName = 255

// refusal is why an ask is not granted, in the words that both sides log.
type refusal string

func (r refusal) Error() string { return string(r) }

// Join answers a process that asks to join. id is that of its token.
func (a *Authority) Join(id string, ask identity.Ask) identity.Answer {
	a.mu.Lock()
	now := a.cfg.Now()
	answer, expelled, err := a.join(id, ask, now)
	answer = a.answer(ask.Name, answer, err, now)
	cut, revoked := a.cut, a.state.Revoked
	a.mu.Unlock()
	if !expelled {
		return answer
	}
	if cut != nil {
		if err := cut(a.RevokedUsers()); err != nil {
			a.cfg.Log.Error("failed to cut off the earlier holder of a node's name; a restart does", "node", ask.Name, "error", err)
		}
	}
	a.source.Revoke(revoked)
	a.TellAll()
	return answer
}

// join lets a node join. expelled means that the node has taken its name from another one. The
// caller holds a.mu.
func (a *Authority) join(id string, ask identity.Ask, now time.Time) (answer identity.Answer, expelled bool, err error) {
	csr, key, invalid := a.signer.request(ask)
	err = a.change(func(s *state) error {
		have, taken := s.Nodes[ask.Name]
		again := invalid == nil && taken && have.Key == key && have.User == ask.User
		if cause := s.check(id, ask, again, now); cause != "" {
			return refusal(cause) // first: without a token, nobody learns more
		}
		if invalid != nil {
			return invalid
		}
		if skew := identity.Skew(ask.Name, ask.Time, now); skew != "" {
			return refusal(skew)
		}
		switch {
		case again:
		case taken && !have.expired(now) && !have.Released:
			const text = "the name %q is taken: it is held by a node whose certificate is valid until %s; choose another --name, or revoke that node (stagecoach node revoke %s)"
			return refusal(fmt.Sprintf(text, ask.Name, have.until().UTC().Format(time.RFC3339), ask.Name))
		case len(s.Nodes) >= maxNodes:
			return refusal(fmt.Sprintf("%d nodes have joined, want at most %d", len(s.Nodes), maxNodes))
		}
		expelled = taken && have.User != ask.User
		if taken && !again {
			s.expel(ask.Name, have, now) // it was removed, or away for longer than its certificate was valid
		}
		if !again {
			t := s.Tokens[id]
			t.Used++
			s.Tokens[id] = t
			s.Nodes[ask.Name] = member{User: ask.User, Key: key}
		}
		answer, err = a.grant(s, ask, csr, now)
		return err
	})
	if err != nil {
		return identity.Answer{}, false, err
	}
	return answer, expelled, nil
}

// mostCertificates bounds how many valid certificates a node has. A node that works has two.
const mostCertificates = 32

// grant signs the certificate and the NATS user of a node, and notes them in s.
func (a *Authority) grant(s *state, ask identity.Ask, csr *x509.CertificateRequest, now time.Time) (identity.Answer, error) {
	name := identity.Name{Cluster: a.signer.me.Cluster, Role: identity.Node, Name: ask.Name}
	m := s.Nodes[ask.Name]
	valid := 0
	for _, c := range m.Certificates {
		if now.Before(c.Until) {
			valid++
		}
	}
	if valid >= mostCertificates {
		return identity.Answer{}, refusal(fmt.Sprintf("node %q has %d certificates that are valid, want fewer: it has to wait until one expires", ask.Name, valid))
	}
	leaf, err := a.signer.issue(name, csr.PublicKey, now)
	if err != nil {
		return identity.Answer{}, err
	}
	user, err := a.cfg.Users.Node(m.User, ask.Name, leaf.NotAfter.Add(identity.Away))
	if err != nil {
		return identity.Answer{}, err
	}
	m.Released = false
	m.Certificates = append(slices.Clone(m.Certificates), certificate{identity.SerialOf(leaf), leaf.NotAfter})
	m.UserUntil = leaf.NotAfter.Add(identity.Away)
	s.Nodes[ask.Name] = m
	return identity.Answer{Certificate: leaf.Raw, CA: a.signer.ca.Raw, User: user}, nil
}

// request reads the request for a certificate, and returns the hash of its key.
func (s *signer) request(ask identity.Ask) (csr *x509.CertificateRequest, key string, err error) {
	if ask.Name == "" || len(ask.Name) > maxName || strings.ContainsAny(ask.Name, " \t\n/") {
		return nil, "", refusal(fmt.Sprintf("the name is %.80q, want one of at most %d bytes without spaces and slashes", ask.Name, maxName))
	}
	csr, err = x509.ParseCertificateRequest(ask.Request)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, "", refusal(fmt.Sprintf("the request for a certificate cannot be read: %v", err))
	}
	want := identity.Name{Cluster: s.me.Cluster, Role: identity.Node, Name: ask.Name}
	if len(csr.URIs) != 1 || csr.URIs[0].String() != want.URI().String() {
		return nil, "", refusal(fmt.Sprintf("the request for a certificate has the name %.200v, want %q alone", csr.URIs, want.URI()))
	}
	switch k := csr.PublicKey.(type) {
	case ed25519.PublicKey:
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() {
			return nil, "", refusal("the request for a certificate has a key of another curve than P-256")
		}
	default:
		return nil, "", refusal("the request for a certificate has no ECDSA or Ed25519 key")
	}
	hash := sha256.Sum256(csr.RawSubjectPublicKeyInfo)
	return csr, hex.EncodeToString(hash[:]), nil
}

// Renew answers a node that asks for a new certificate, or for what is revoked. NATS has verified
// that the message is the node's.
func (a *Authority) Renew(name string, ask identity.Ask) identity.Answer {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.cfg.Now()
	var answer identity.Answer
	var err error
	if len(ask.Request) > 0 {
		err = a.change(func(s *state) error {
			err := s.mayRenew(name, ask, now)
			if err != nil {
				return err
			}
			csr, _, err := a.signer.request(ask)
			if err == nil {
				answer, err = a.grant(s, ask, csr, now)
			}
			return err
		})
	} else if err = a.state.mayRenew(name, ask, now); err != nil && a.shared && a.load() == nil {
		err = a.state.mayRenew(name, ask, now) // another control plane may have let the node in just now
	}
	if err != nil {
		answer = identity.Answer{}
	}
	a.said.skew(name, identity.Skew(name, ask.Time, now)) // the node logs it, too
	return a.answer(name, answer, err, now)
}

func (s state) mayRenew(name string, ask identity.Ask, now time.Time) error {
	if ask.Name != name {
		return refusal(fmt.Sprintf("node %q asks in the name of node %.80q", name, ask.Name))
	}
	if m, ok := s.Nodes[name]; !ok || now.After(m.UserUntil) {
		return refusal(fmt.Sprintf("node %q is no member: it has to join again with a token", name))
	}
	return nil
}

// failed is the answer to an ask that could not be decided.
const failed = "the control plane failed to answer; its log has the cause"

// answer completes an answer. A refusal is logged. The caller holds a.mu.
func (a *Authority) answer(name string, out identity.Answer, err error, now time.Time) identity.Answer {
	out.V, out.Time, out.Revoked = identity.Version, now.UTC(), a.state.Revoked
	if err == nil {
		return out
	}
	var r refusal
	if out.Error = err.Error(); !errors.As(err, &r) {
		out.Error = failed
	}
	if a.said.once(name + ": " + err.Error()) {
		a.cfg.Log.Error("node refused", "node", name, "error", err)
	}
	out.Revoked = nil // it is for members
	return out
}

// maxLogged bounds the memory of refusals.
const maxLogged = 1024

// refusals log each refusal once.
type refusals struct {
	log    *slog.Logger
	logged map[string]bool
}

// once reports whether something has not been logged before.
func (r *refusals) once(what string) bool {
	if r.logged[what] {
		return false
	}
	if len(r.logged) >= maxLogged {
		clear(r.logged)
	}
	r.logged[what] = true
	return true
}

// skew logs a wrong clock when it is first seen.
func (r *refusals) skew(node, skew string) {
	what := "skew of " + node
	if skew == "" {
		delete(r.logged, what)
	} else if r.once(what) {
		r.log.Error(skew, "node", node)
	}
}

// Release lets another node take the name of a node that was removed. Until then, the node may come
// back with its credentials.
func (a *Authority) Release(name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.change(func(s *state) error {
		m, ok := s.Nodes[name]
		if !ok || m.Released {
			return errUnchanged
		}
		m.Released = true
		s.Nodes[name] = m
		return nil
	})
	if errors.Is(err, errUnchanged) {
		return nil
	}
	return err
}

// errUnchanged means that there is nothing to store.
var errUnchanged = errors.New("authority: nothing to change")

// ErrNoNode means that no node of this name has a valid certificate.
var ErrNoNode = errors.New("no node of this name has joined")

// Revoke revokes the certificates and the NATS user of a node at once. A join token that was made
// before does not let the node join again.
func (a *Authority) Revoke(name string) error {
	a.mu.Lock()
	now := a.cfg.Now().UTC().Round(0)
	err := a.change(func(s *state) error {
		m, ok := s.Nodes[name]
		if !ok {
			return fmt.Errorf("node %q: %w", name, ErrNoNode)
		}
		s.expel(name, m, now)
		s.Names[name] = now
		delete(s.Nodes, name)
		return nil
	})
	nodes, cut, revoked := a.nodes, a.cut, a.state.Revoked
	a.mu.Unlock()
	if err != nil {
		return err
	}
	a.cfg.Log.Info("node revoked", "node", name)
	a.source.Revoke(revoked)
	if nodes != nil {
		a.tell(nodes, name) // while it is connected
		_ = nodes.Flush()   // else it learns it when it cannot connect
	}
	if cut != nil {
		err = cut(a.RevokedUsers())
	}
	a.TellAll()
	return err
}

// expel revokes the certificates and the NATS user of a node.
func (s *state) expel(name string, m member, now time.Time) {
	for _, c := range m.Certificates {
		s.Revoked = append(s.Revoked, identity.Revoked{Serial: c.Serial, Name: name, Until: c.Until})
	}
	s.Users[m.User] = revokedUser{At: now, Until: m.UserUntil}
}

// RevokedUsers returns the revoked NATS users by public key, with the time until which their tokens
// were signed.
func (a *Authority) RevokedUsers() map[string]time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := map[string]time.Time{}
	for user, r := range a.state.Users {
		out[user] = r.At
	}
	return out
}

// tell sends a node the list of revoked certificates. The node asks for it now and then, so that
// a lost message does no harm.
func (a *Authority) tell(bus identity.Bus, name string) {
	a.mu.Lock()
	b, err := json.Marshal(identity.Answer{V: identity.Version, Revoked: a.state.Revoked, Time: a.cfg.Now().UTC()})
	a.mu.Unlock()
	if err == nil {
		_ = bus.Send(name, identity.KindRevoked, "", b)
	}
}

package authority

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// state is what an authority remembers. It has no secrets: of tokens, it has hashes.
type state struct {
	V      int               `json:"v"`
	Tokens map[string]token  `json:"tokens"` // by id
	Nodes  map[string]member `json:"nodes"`  // by name
	// Revoked has the certificates that are revoked and have not expired.
	Revoked []identity.Revoked `json:"revoked"`
	// Users has the NATS users that are revoked, by public key.
	Users map[string]revokedUser `json:"users"`
	// Names has when the nodes of these names were revoked the last time. A token that is older does
	// not let them join.
	Names map[string]time.Time `json:"names"`
}

// token is a join token. Secret is its hash.
type token struct {
	Secret  string    `json:"secret"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
	Name    string    `json:"name,omitempty"`   // of the only node that it is for; empty: any
	Local   bool      `json:"local,omitempty"`  // it is the standing token
	Uses    int       `json:"uses,omitempty"`   // how often it may be used; 0: any number
	Used    int       `json:"used,omitempty"`
}

// member is a node that has joined.
type member struct {
	User         string        `json:"user"`      // public key of its NATS user
	UserUntil    time.Time     `json:"userUntil"` // when the token of that user expires
	Key          string        `json:"key"`       // hash of the key that it has joined with
	Certificates []certificate `json:"certificates"`
	Released     bool          `json:"released,omitempty"` // another node may take its name
}

// certificate is one that has not expired.
type certificate struct {
	Serial string    `json:"serial"`
	Until  time.Time `json:"until"`
}

type revokedUser struct {
	At    time.Time `json:"at"`    // tokens that were signed until then are revoked
	Until time.Time `json:"until"` // then the last of them has expired
}

// expired reports whether the node has no valid certificate, also by a clock that is late by
// identity.MaxSkew.
func (m member) expired(now time.Time) bool { return now.After(m.until().Add(identity.MaxSkew)) }

// until returns when the last certificate of a node expires.
func (m member) until() time.Time {
	var last time.Time
	for _, c := range m.Certificates {
		if c.Until.After(last) {
			last = c.Until
		}
	}
	return last
}

// decodeState reads a state. Empty text is that of a new authority.
func decodeState(b []byte) (state, error) {
	s := state{V: identity.Version}
	if len(b) > 0 {
		if err := json.Unmarshal(b, &s); err != nil {
			return s, err
		}
		if s.V != identity.Version {
			return s, fmt.Errorf("version %d, want %d", s.V, identity.Version)
		}
	}
	return s.clone(), nil
}

// clone copies the state, so that a change can be given up.
func (s state) clone() state {
	s.Tokens, s.Nodes, s.Users, s.Names = maps.Clone(s.Tokens), maps.Clone(s.Nodes), maps.Clone(s.Users), maps.Clone(s.Names)
	s.Revoked = slices.Clone(s.Revoked)
	if s.Tokens == nil {
		s.Tokens = map[string]token{}
	}
	if s.Nodes == nil {
		s.Nodes = map[string]member{}
	}
	if s.Users == nil {
		s.Users = map[string]revokedUser{}
	}
	if s.Names == nil {
		s.Names = map[string]time.Time{}
	}
	return s
}

// keepExpired is how long expired tokens are kept, so that the refusal can say that they have
// expired.
const keepExpired = 24 * time.Hour

// tidy drops what has expired. Clocks of nodes may be late by identity.MaxSkew.
func (s *state) tidy(now time.Time) {
	late := now.Add(-identity.Backdate)
	maps.DeleteFunc(s.Tokens, func(_ string, t token) bool {
		return !t.Expires.IsZero() && now.After(t.Expires.Add(keepExpired))
	})
	for name, m := range s.Nodes {
		m.Certificates = slices.DeleteFunc(slices.Clone(m.Certificates), func(c certificate) bool { return late.After(c.Until) })
		s.Nodes[name] = m
		if now.After(m.UserUntil) {
			delete(s.Nodes, name)
		}
	}
	s.Revoked = slices.DeleteFunc(s.Revoked, func(r identity.Revoked) bool { return late.After(r.Until) })
	maps.DeleteFunc(s.Users, func(_ string, u revokedUser) bool { return late.After(u.Until) })
}

// register is the state as it is stored. Its user's lock guards it.
type register struct {
	store    stateStore
	shared   bool // other control planes may change the state
	now      func() time.Time
	state    state
	revision uint64 // of state, in store
}

// mostConflicts bounds how often a change begins again because other control planes have changed
// the state.
const mostConflicts = 64

// change stores a copy of the state that f has changed. If another control plane has changed the
// state, f is called again with that state. So f must depend on its argument alone. If f fails,
// nothing is stored.
func (r *register) change(f func(*state) error) error {
	checked := false // f has failed with the state that is stored now
	for range mostConflicts {
		s := r.state.clone()
		s.tidy(r.now())
		err := f(&s)
		if err == nil {
			err = r.save(s)
			if !errors.Is(err, ErrConflict) {
				return err
			}
			if err := r.load(); err != nil {
				return fmt.Errorf("authority: %w", err)
			}
			continue
		}
		// A change of another control plane may not have been seen yet.
		was := r.revision
		if checked || !r.shared || r.load() != nil || r.revision == was {
			return err
		}
		checked = true
	}
	return fmt.Errorf("authority: other control planes have changed the state %d times meanwhile", mostConflicts)
}

// save stores a changed state and keeps it in memory. If that fails, the old one stays.
func (r *register) save(s state) error {
	s.tidy(r.now())
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	revision, err := r.store.save(b, r.revision)
	if err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	r.state, r.revision = s, revision
	return nil
}

// load reads the state that is stored.
func (r *register) load() error {
	b, revision, err := r.store.load()
	var s state
	if err == nil {
		s, err = decodeState(b)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", r.store, err)
	}
	r.state, r.revision = s, revision
	return nil
}

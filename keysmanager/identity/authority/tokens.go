package authority

import (
	"cmp"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// maxTokens bounds the tokens that an authority keeps.
const maxTokens = 4096

// TokenRequest describes a new join token.
type TokenRequest struct {
	Name string        // of the only node that it is for; empty: any node
	TTL  time.Duration // 0: it does not expire
	Uses int           // how many nodes may join with it; 0: any number
}

// NewToken makes a join token. Its text is not kept.
func (a *Authority) NewToken(r TokenRequest) (t identity.Token, expires time.Time, err error) {
	switch {
	case r.TTL < 0:
		return t, expires, fmt.Errorf("authority: token for %v, want a time above 0", r.TTL)
	case r.Uses < 0:
		return t, expires, fmt.Errorf("authority: token for %d uses, want 0 or more", r.Uses)
	case strings.ContainsAny(r.Name, " \t\n/"):
		return t, expires, fmt.Errorf("authority: token for node %q, want a name without spaces and slashes", r.Name)
	}
	return a.newToken(r, nil)
}

// TokenInfo is what an authority knows of a join token.
type TokenInfo struct {
	ID string
	TokenRequest
	Created, Expires time.Time // Expires is zero if it does not expire
	Used             int       // how many nodes have joined with it
	Local            bool      // it is the standing token
}

// Tokens returns the join tokens that have not expired, the latest first.
func (a *Authority) Tokens() []TokenInfo {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.cfg.Now()
	out := []TokenInfo{}
	for id, t := range a.state.Tokens {
		if t.Expires.IsZero() || now.Before(t.Expires) {
			out = append(out, TokenInfo{ID: id, TokenRequest: TokenRequest{Name: t.Name, Uses: t.Uses}, Created: t.Created, Expires: t.Expires, Used: t.Used, Local: t.Local})
		}
	}
	slices.SortFunc(out, func(a, b TokenInfo) int { return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID)) })
	return out
}

// ErrNoToken means that there is no join token of an id.
var ErrNoToken = errors.New("there is no join token of this id")

// RevokeToken makes a join token void. Nodes that have joined with it stay members.
func (a *Authority) RevokeToken(id string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.change(func(s *state) error {
		if _, ok := s.Tokens[id]; !ok {
			return fmt.Errorf("token %.80q: %w", id, ErrNoToken)
		}
		delete(s.Tokens, id)
		return nil
	})
	if err == nil {
		a.cfg.Log.Info("join token revoked", "token", id)
	}
	return err
}

// newToken makes a token. If replace is set, the token is the standing one, and replace changes the
// earlier standing tokens among all tokens.
func (a *Authority) newToken(r TokenRequest, replace func(all map[string]token)) (t identity.Token, expires time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.cfg.Now().UTC().Round(0)
	var user time.Time
	if r.TTL > 0 {
		expires = now.Add(r.TTL)
		user = expires.Add(keepExpired) // so that the answer can be that the token has expired
	}
	t = identity.Token{CA: identity.KeyHash(a.signer.ca), Secret: identity.NewSecret()}
	if t.User, err = a.cfg.Users.Join(t.ID(), user); err != nil {
		return t, expires, fmt.Errorf("authority: token: %w", err)
	}
	return t, expires, a.change(func(s *state) error {
		if replace != nil {
			replace(s.Tokens)
		}
		if len(s.Tokens) >= maxTokens {
			return fmt.Errorf("authority: there are %d tokens, want fewer than %d: wait until some have expired", len(s.Tokens), maxTokens)
		}
		s.Tokens[t.ID()] = token{Secret: identity.SecretHash(t.Secret), Created: now, Expires: expires, Name: r.Name, Local: replace != nil, Uses: r.Uses}
		return nil
	})
}

// LocalToken returns the token in a file that only its owner can read. It does not expire. If the
// file does not have the token, LocalToken writes a new one, and the earlier one is void.
func (a *Authority) LocalToken(file string) (identity.Token, error) {
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return identity.Token{}, fmt.Errorf("authority: %w", err)
	}
	t, made, err := a.StandingToken(string(b), Rotation{})
	if err != nil {
		return t, err
	}
	if !made {
		return t, os.Chmod(file, 0o600) // also if the operator has made the file
	}
	if err := identity.WriteSecret(file, []byte(t.String()+"\n")); err != nil {
		return t, fmt.Errorf("authority: %w", err)
	}
	return t, nil
}

// Rotation says how often a standing token is replaced. The zero Rotation is never.
type Rotation struct {
	Every   time.Duration // age at which the token is replaced
	Overlap time.Duration // how long the earlier token stays valid, for readers of an old copy
}

// StandingToken returns the authority's standing token. text is what the caller has kept of the
// latest call. If that is not the standing token, StandingToken makes a new one, and the earlier
// one is void. It also makes a new one if the token is old; then the earlier one stays valid for a
// while. If made is true, the caller keeps the new text.
//
// Without a Rotation, the token does not expire. Otherwise, a token that is not replaced, because
// nobody calls StandingToken, expires at the end of its overlap.
func (a *Authority) StandingToken(text string, r Rotation) (t identity.Token, made bool, err error) {
	t, err = identity.ParseToken(strings.TrimSpace(text))
	now := a.cfg.Now()
	a.mu.Lock()
	known := err == nil && t.CA == identity.KeyHash(a.signer.ca) && a.state.standing(t)
	fresh := known && a.state.Tokens[t.ID()].fresh(r, now)
	a.mu.Unlock()
	if fresh {
		return t, false, nil
	}
	replace := void
	if known {
		replace = func(all map[string]token) { endLocal(all, now.UTC().Round(0).Add(r.Overlap)) }
	}
	ttl := time.Duration(0)
	if r.Every > 0 {
		ttl = r.Every + r.Overlap
	}
	t, _, err = a.newToken(TokenRequest{TTL: ttl}, replace)
	return t, err == nil, err
}

// fresh reports whether a standing token need not be replaced yet. If it expires before
// its replacement is due, another token has replaced it, so it is not fresh.
func (t token) fresh(r Rotation, now time.Time) bool {
	due := t.Created.Add(r.Every)
	return r.Every == 0 || now.Before(due) && (t.Expires.IsZero() || t.Expires.After(due))
}

// void removes all standing tokens.
func void(all map[string]token) {
	maps.DeleteFunc(all, func(_ string, t token) bool { return t.Local })
}

// endLocal lets all standing tokens expire at a time, if they do not expire before.
func endLocal(all map[string]token, at time.Time) {
	for id, t := range all {
		if t.Local && (t.Expires.IsZero() || t.Expires.After(at)) {
			t.Expires = at
			all[id] = t
		}
	}
}

// standing reports whether a token is the standing token, or an earlier one that was replaced by
// its age.
func (s state) standing(t identity.Token) bool {
	have, ok := s.Tokens[t.ID()]
	return ok && have.Local && have.Secret == identity.SecretHash(t.Secret)
}

// check says why a token does not let a node join; empty: it does. again means that the node has
// been let in with the same key before, and that its answer was lost.
func (s state) check(id string, ask identity.Ask, again bool, now time.Time) string {
	t, ok := s.Tokens[id]
	if !ok || subtle.ConstantTimeCompare([]byte(t.Secret), []byte(identity.SecretHash(ask.Secret))) != 1 {
		return "the token is wrong, or it was made by another control plane; get one with `stagecoach node token`"
	}
	revoked, was := s.Names[ask.Name]
	switch {
	case !t.Expires.IsZero() && now.After(t.Expires):
		return fmt.Sprintf("the token has expired at %s; get one with `stagecoach node token`", t.Expires.Format(time.RFC3339))
	case t.Name != "" && t.Name != ask.Name:
		return fmt.Sprintf("the token is for node %q", t.Name)
	case t.Uses > 0 && t.Used >= t.Uses && !again:
		return fmt.Sprintf("the token is used up: it was for %d uses; get one with `stagecoach node token`", t.Uses)
	case was && !t.Created.After(revoked):
		return fmt.Sprintf("node %q was revoked at %s, after the token was made; get one with `stagecoach node token --name %s`", ask.Name, revoked.Format(time.RFC3339), ask.Name)
	}
	return ""
}

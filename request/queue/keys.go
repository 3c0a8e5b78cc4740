package queue

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// Keys sign the users of NATS. Whoever has them decides who may connect, and which subjects each
// user may use. They are an operator, its system account, and the account of all other users.
type Keys struct {
	operator, system, account nkeys.KeyPair
	streams                   string // public key of account, which names the folder of its streams
}

// storedKeys is the form of Keys in a file.
type storedKeys struct {
	Operator string `json:"operator"`
	System   string `json:"system"`
	Account  string `json:"account"`
}

// NewKeys makes new keys.
func NewKeys() (*Keys, error) {
	operator, err1 := nkeys.CreateOperator()
	system, err2 := nkeys.CreateAccount()
	account, err3 := nkeys.CreateAccount()
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	return keysOf(operator, system, account)
}

// DeriveKeys returns the keys that belong to secrets. derive returns the secret for a purpose.
func DeriveKeys(derive func(purpose string) [32]byte) (*Keys, error) {
	var pairs [3]nkeys.KeyPair
	for i, of := range []struct {
		purpose string
		kind    nkeys.PrefixByte
	}{{"nats operator", nkeys.PrefixByteOperator}, {"nats system account", nkeys.PrefixByteAccount}, {"nats account", nkeys.PrefixByteAccount}} {
		seed := derive(of.purpose)
		var err error
		if pairs[i], err = nkeys.FromRawSeed(of.kind, seed[:]); err != nil {
			return nil, fmt.Errorf("nats keys: %w", err)
		}
	}
	return keysOf(pairs[0], pairs[1], pairs[2])
}

func keysOf(operator, system, account nkeys.KeyPair) (*Keys, error) {
	public, err := account.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	return &Keys{operator: operator, system: system, account: account, streams: public}, nil
}

// ParseKeys reads keys that MarshalText has written.
func ParseKeys(text []byte) (*Keys, error) {
	var s storedKeys
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	var pairs []nkeys.KeyPair
	for _, k := range []struct {
		seed string
		kind nkeys.PrefixByte
	}{{s.Operator, nkeys.PrefixByteOperator}, {s.System, nkeys.PrefixByteAccount}, {s.Account, nkeys.PrefixByteAccount}} {
		kind, _, err := nkeys.DecodeSeed([]byte(k.seed))
		if err == nil && kind != k.kind {
			err = fmt.Errorf("a seed of kind %v, want %v", kind, k.kind)
		}
		pair, err2 := nkeys.FromSeed([]byte(k.seed))
		if err := errors.Join(err, err2); err != nil {
			return nil, fmt.Errorf("nats keys: %w", err)
		}
		pairs = append(pairs, pair)
	}
	return keysOf(pairs[0], pairs[1], pairs[2])
}

// MarshalText returns the keys as a secret text for a file.
func (k *Keys) MarshalText() ([]byte, error) {
	operator, err1 := k.operator.Seed()
	system, err2 := k.system.Seed()
	account, err3 := k.account.Seed()
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("nats keys: %w", err)
	}
	return json.MarshalIndent(storedKeys{string(operator), string(system), string(account)}, "", "  ")
}

// NewUser makes the key of a user. The seed is secret; the public key identifies the user.
func NewUser() (seed, public string, err error) {
	pair, err := nkeys.CreateUser()
	if err != nil {
		return "", "", fmt.Errorf("nats user: %w", err)
	}
	secret, err := pair.Seed()
	if err == nil {
		public, err = pair.PublicKey()
	}
	if err != nil {
		return "", "", fmt.Errorf("nats user: %w", err)
	}
	return string(secret), public, nil
}

// Node signs a user that may do what the daemon of a node needs, and nothing else. user is the
// public key that [NewUser] has returned to the daemon.
func (k *Keys) Node(user, name string, expires time.Time) (token string, err error) {
	if !nkeys.IsValidPublicUserKey(user) {
		return "", fmt.Errorf("nats user of node %q: %.80q is no user's public key", name, user)
	}
	own := NodeSubjects + "." + Token(name) + "."
	c := jwt.NewUserClaims(user)
	c.Name, c.Expires = "node "+name, expires.Unix()
	// An order is published for `who` alone: a daemon asks whether another one has its name.
	c.Pub.Allow.Add(own+"inventory", own+"event", own+"answer.>", own+"order", own+"identity")
	c.Sub.Allow.Add(own+"order", own+"inventory", own+"answer.>", own+"revoked")
	return k.sign(c)
}

// Join signs a user for those who know a join token, and may ask to join with it. The user needs no
// key: whoever has the token may connect.
func (k *Keys) Join(id string, expires time.Time) (token string, err error) {
	_, public, err := NewUser()
	if err != nil {
		return "", err
	}
	c := jwt.NewUserClaims(public)
	c.Name, c.BearerToken = "join "+id, true
	if !expires.IsZero() {
		c.Expires = expires.Unix()
	}
	c.Limits.Payload, c.Limits.Subs = maxJoinMessage, maxJoinListeners
	c.Pub.Allow.Add(JoinSubjects+"."+id+".ask", JoinSubjects+"."+id+".probe")
	c.Sub.Allow.Add(JoinSubjects + "." + id + ".answer.>")
	return k.sign(c)
}

// Bounds of a user that joins.
const (
	maxJoinMessage   = 64 << 10 // bytes
	maxJoinListeners = 8
)

// Control returns the access of a control plane, which may use all subjects.
func (k *Keys) Control() Access {
	seed, public, err := NewUser()
	if err != nil {
		return Access{User: func() (string, error) { return "", err }}
	}
	c := jwt.NewUserClaims(public)
	c.Name = "control"
	return Access{User: func() (string, error) { return k.sign(c) }, Seed: seed}
}

// claims returns the access of a user of the system account, who may replace the accounts of a
// cluster's servers and hear when servers start.
func (k *Keys) claims() Access {
	seed, public, err := NewUser()
	if err != nil {
		return Access{User: func() (string, error) { return "", err }}
	}
	c := jwt.NewUserClaims(public)
	c.Name = "claims"
	c.Pub.Allow.Add(claimsUpdate)
	c.Sub.Allow.Add(serverStarts, "_INBOX.>")
	return Access{User: func() (string, error) { return c.Encode(k.system) }, Seed: seed}
}

func (k *Keys) sign(c *jwt.UserClaims) (string, error) {
	token, err := c.Encode(k.account)
	if err != nil {
		return "", fmt.Errorf("nats user %q: %w", c.Name, err)
	}
	return token, nil
}

// accountClaims returns the account of all users. revoked has, by public key, until when a user's
// tokens were signed that are revoked.
func (k *Keys) accountClaims(revoked map[string]time.Time) (*jwt.AccountClaims, string, error) {
	c := jwt.NewAccountClaims(k.streams)
	c.Name = "stagecoach"
	c.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: jwt.NoLimit, DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit, MaxAckPending: jwt.NoLimit}
	for user, at := range revoked {
		c.RevokeAt(user, at)
	}
	token, err := c.Encode(k.operator)
	return c, token, err
}

// operatorToken returns the token of the operator.
func (k *Keys) operatorToken() (string, error) {
	operator, err1 := k.operator.PublicKey()
	system, err2 := k.system.PublicKey()
	if err := errors.Join(err1, err2); err != nil {
		return "", err
	}
	c := jwt.NewOperatorClaims(operator)
	c.SystemAccount = system
	return c.Encode(k.operator)
}

// operatorClaims returns the operator, and the token of its system account.
func (k *Keys) operatorClaims() (c *jwt.OperatorClaims, system, systemToken string, err error) {
	token, err := k.operatorToken()
	if err == nil {
		c, err = jwt.DecodeOperatorClaims(token) // with the issuer
	}
	if err != nil {
		return nil, "", "", err
	}
	system = c.SystemAccount
	s := jwt.NewAccountClaims(system)
	s.Name = "SYS"
	systemToken, err = s.Encode(k.operator)
	return c, system, systemToken, err
}

package authority_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// shelf is a Store in memory, with one key.
type shelf struct {
	mu    sync.Mutex
	value []byte
	rev   uint64
	lost  bool // the answer of the next write is lost
	watch []func(authority.Entry)
	mute  bool // watchers hear nothing
}

func (s *shelf) Get(context.Context, string) ([]byte, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rev == 0 {
		return nil, 0, authority.ErrNone
	}
	return s.value, s.rev, nil
}

func (s *shelf) Replace(_ context.Context, key string, value []byte, rev uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if rev != s.rev {
		return 0, authority.ErrConflict
	}
	s.value, s.rev = value, s.rev+1
	for _, f := range s.watch {
		if !s.mute {
			go f(authority.Entry{Key: key, Value: value, Revision: s.rev})
		}
	}
	if s.lost {
		s.lost = false
		return 0, errors.New("no answer")
	}
	return s.rev, nil
}

func (s *shelf) Watch(_ context.Context, f func(authority.Entry)) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch = append(s.watch, f)
	return func() {}, nil
}

// sharing opens a control plane's authority on a shelf.
func sharing(t *testing.T, s *shelf, key authority.ClusterKey, name string) (*authority.Authority, error) {
	t.Helper()
	keys, err := queue.DeriveKeys(key.Derive)
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Open(authority.Config{
		Shared: &authority.Shared{Key: key, Store: s}, Name: name, Now: time.Now, Users: keys, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err == nil {
		t.Cleanup(a.Close)
	}
	return a, err
}

// TestSharedState changes the state on two control planes that do not hear of each other's changes.
// The answer to one write is lost. Neither loses a change of the other.
func TestSharedState(t *testing.T) {
	s, key := &shelf{mute: true}, authority.NewClusterKey()
	a, err1 := sharing(t, s, key, "a")
	b, err2 := sharing(t, s, key, "b")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	one, _, err := a.NewToken(authority.TokenRequest{Uses: 1})
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.lost = true
	s.mu.Unlock()
	if _, _, err := b.NewToken(authority.TokenRequest{}); err == nil || strings.Contains(err.Error(), "conflict") {
		t.Errorf("a write without an answer: %v, want an error", err)
	}
	joins := &memory{}
	if _, err := b.Serve(&memory{}, joins, nil); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.lost = true // the node asks again, and is let in
	s.mu.Unlock()
	d := newDaemon(t, "n1", t.TempDir(), &clock{})
	if err := d.Join(bounded(t), joins, one); err != nil {
		t.Errorf("join at the other control plane: %v", err)
	}
	if err := a.Revoke("n1"); err != nil { // a has not heard that it has joined
		t.Error(err)
	}
	if answer := b.Renew("n1", identity.Ask{V: identity.Version, Name: "n1", Time: time.Now(), Request: []byte("x")}); !strings.Contains(answer.Error, "is no member") {
		t.Errorf("a revoked node renews at the other control plane: %q", answer.Error)
	}
	if all := b.Tokens(); len(all) != 2 || all[1].ID != one.ID() || all[1].Used != 1 {
		t.Errorf("tokens %+v, want two, and that the first is used", all)
	}
	if err := a.RevokeToken(one.ID()); err != nil {
		t.Error(err)
	}
	if err := b.RevokeToken(one.ID()); !errors.Is(err, authority.ErrNoToken) {
		t.Errorf("a token is revoked twice: %v, want %v", err, authority.ErrNoToken)
	}
}

// TestRevokedElsewhere checks that a control plane acts on a revocation of another one, although it
// has read the revocation before it hears of it.
func TestRevokedElsewhere(t *testing.T) {
	s, key := &shelf{mute: true}, authority.NewClusterKey()
	a, err1 := sharing(t, s, key, "a")
	b, err2 := sharing(t, s, key, "b")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	joins, cut := &memory{}, make(chan map[string]time.Time, 8)
	if _, err := a.Serve(&memory{}, joins, func(users map[string]time.Time) error { cut <- users; return nil }); err != nil {
		t.Fatal(err)
	}
	token, _, err := a.NewToken(authority.TokenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	d := newDaemon(t, "n1", t.TempDir(), &clock{})
	if err := d.Join(bounded(t), joins, token); err != nil {
		t.Fatal(err)
	}
	if err := b.Revoke("n1"); err != nil {
		t.Fatal(err)
	}
	if err := a.RevokeToken("none"); !errors.Is(err, authority.ErrNoToken) { // it reads the state
		t.Fatal(err)
	}
	s.watch[0](authority.Entry{Key: "state", Value: s.value, Revision: s.rev})
	leaf, err := d.Source().Client(d.Source().Me()).GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Source().Check(leaf.Leaf); !errors.Is(err, identity.ErrRevoked) {
		t.Errorf("the certificate: %v, want %v", err, identity.ErrRevoked)
	}
	a.Close() // waits for cut
	if len(cut) != 1 || len(<-cut) != 1 {
		t.Error("the user of the node is not cut off")
	}
}

// TestSealedState tries another cluster key, and text that somebody else has stored.
func TestSealedState(t *testing.T) {
	s, key := &shelf{mute: true}, authority.NewClusterKey()
	a, err := sharing(t, s, key, "a")
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := a.NewToken(authority.TokenRequest{Name: "a-name-to-find"})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(s.value), "a-name-to-find") || strings.Contains(string(s.value), token.ID()) {
		t.Error("the stored state can be read without the key")
	}
	if _, err := sharing(t, s, authority.NewClusterKey(), "b"); !errors.Is(err, authority.ErrOtherKey) {
		t.Errorf("another key: %v, want %v", err, authority.ErrOtherKey)
	}
	s.value[len(s.value)/2] ^= 1
	if _, err := sharing(t, s, key, "b"); !errors.Is(err, authority.ErrOtherKey) {
		t.Errorf("an altered state: %v, want %v", err, authority.ErrOtherKey)
	}
	sealed := key.Seal("one", []byte("text"))
	if text, err := key.Unseal("one", sealed); err != nil || string(text) != "text" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := key.Unseal("other", sealed); !errors.Is(err, authority.ErrOtherKey) {
		t.Errorf("a text in the place of another one: %v, want %v", err, authority.ErrOtherKey)
	}
}

// TestNewClusterKey lets a node join a cluster with another key. The node's folder has credentials
// of the earlier cluster. After that, the node refuses the earlier key.
func TestNewClusterKey(t *testing.T) {
	dir := t.TempDir()
	joined := func(name string) (*authority.Authority, *daemon) {
		a, err := sharing(t, &shelf{mute: true}, authority.NewClusterKey(), name)
		if err != nil {
			t.Fatal(err)
		}
		joins := &memory{}
		if _, err := a.Serve(&memory{}, joins, nil); err != nil {
			t.Fatal(err)
		}
		token, _, err := a.NewToken(authority.TokenRequest{})
		if err != nil {
			t.Fatal(err)
		}
		d := newDaemon(t, "n1", dir, &clock{})
		if same, _ := d.JoinedWith(token); same {
			t.Error("the node takes the credentials of another cluster for its own")
		}
		if err := d.Join(bounded(t), joins, token); err != nil {
			t.Fatal(err)
		}
		return a, d
	}
	before, _ := joined("a")
	now, d := joined("b")
	d = newDaemon(t, "n1", d.dir, d.clock) // a restart
	me := d.Source().Me()
	if client, server := handshake(t, now.Source().Client(me), d.Source().Server()); client != nil || server != nil {
		t.Errorf("with the new key: %v, %v", client, server)
	}
	if _, server := handshake(t, before.Source().Client(me), d.Source().Server()); server == nil {
		t.Error("the node accepts a control plane with the earlier key")
	}
	if client, _ := handshake(t, d.Source().Client(before.Source().Me()), before.Source().Server()); client == nil {
		t.Error("the node connects to a control plane with the earlier key")
	}
}

// TestDerivedKeys checks that two control planes derive the same keys, and that keys of different
// purposes and clusters differ.
func TestDerivedKeys(t *testing.T) {
	key := authority.NewClusterKey()
	_, ca := key.CA()
	_, again := key.CA()
	_, routes := key.RoutesCA()
	_, other := authority.NewClusterKey().CA()
	if !ca.Equal(again) {
		t.Error("the authority's certificate differs between two control planes: renewed nodes would refuse it")
	}
	if identity.KeyHash(ca) == identity.KeyHash(routes) || identity.KeyHash(ca) == identity.KeyHash(other) {
		t.Error("two authorities have the same key")
	}
	var texts [2]string
	for i := range texts {
		keys, err := queue.DeriveKeys(key.Derive)
		if err != nil {
			t.Fatal(err)
		}
		b, err := keys.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		texts[i] = string(b)
	}
	if texts[0] != texts[1] || key.Derive("a") == key.Derive("b") {
		t.Error("want the same keys for the same purposes, and others for others")
	}
}

package authority_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
)

// TestRenewal renews after two thirds of the lifetime and not before, and after a long absence.
func TestRenewal(t *testing.T) {
	r := newRig(t)
	d, peer := r.joined("a"), r.joined("b")
	server := peer.Source().Server() // kept while certificates change
	first, control := serial(t, d.Source()), serial(t, r.Source())
	sync := func(want bool) {
		t.Helper()
		if renewed, err := d.Sync(bounded(t), r.nodes); err != nil || renewed != want {
			t.Fatalf("renewed %v, %v, want %v", renewed, err, want)
		}
	}
	r.clock.forward(lifetime*2/3 - time.Minute)
	if sync(false); serial(t, d.Source()) != first || serial(t, r.Source()) != control {
		t.Error("renewed before two thirds of the lifetime")
	}
	r.clock.forward(2 * time.Minute)
	if sync(true); serial(t, d.Source()) == first || serial(t, r.Source()) == control {
		t.Error("not renewed after two thirds of the lifetime")
	}
	if _, err := peer.Sync(bounded(t), r.nodes); err != nil {
		t.Fatal(err)
	}
	r.clock.forward(lifetime / 2) // now the first certificates have expired
	if err1, err2 := handshake(t, d.Source().Client(peer.Source().Me()), server); err1 != nil || err2 != nil {
		t.Errorf("after the renewal: %v, %v", err1, err2)
	}
	// A restart knows the renewed one.
	again := newDaemon(t, "a", d.dir, r.clock)
	if !again.Joined() || serial(t, again.Source()) != serial(t, d.Source()) {
		t.Error("a restart has other credentials")
	}
	// It was away, and needs no token.
	r.clock.forward(identity.Away - time.Hour)
	if d = again; !d.Joined() {
		t.Error("no member after an absence")
	}
	if sync(true); !d.Joined() {
		t.Error("not renewed after an absence")
	}
	r.clock.forward(lifetime + identity.Away + time.Hour)
	if d.Joined() {
		t.Error("still a member after a longer absence")
	}
	if _, err := d.Sync(bounded(t), r.nodes); err == nil || !strings.Contains(err.Error(), "is no member: it has to join again with a token") {
		t.Errorf("after a longer absence: %v", err)
	}
}

// TestRenewalIsOnesOwn lets a node ask in another's name, over its own subject.
func TestRenewalIsOnesOwn(t *testing.T) {
	r := newRig(t)
	r.joined("a")
	r.joined("b")
	if answer := r.Renew("a", identity.Ask{V: 1, Name: "b", Time: r.clock.now()}); !strings.Contains(answer.Error, `node "a" asks in the name of node "b"`) {
		t.Errorf("%+v", answer)
	}
	if answer := r.Renew("c", identity.Ask{V: 1, Name: "c", Time: r.clock.now()}); !strings.Contains(answer.Error, `node "c" is no member`) {
		t.Errorf("%+v", answer)
	}
}

// TestRevocation revokes a node: both sides refuse it, also after restarts, and a token from before
// does not let it in again.
func TestRevocation(t *testing.T) {
	r := newRig(t)
	old := r.token(authority.TokenRequest{})
	a, b := r.joined("a"), r.joined("b")
	told := make(chan struct{}, 4)
	defer b.Source().OnRevoke(func() { told <- struct{}{} })()
	if err := r.Revoke("nobody"); !errors.Is(err, authority.ErrNoNode) {
		t.Errorf("nobody: %v, want ErrNoNode", err)
	}
	if err := r.Revoke("a"); err != nil {
		t.Fatal(err)
	}
	r.clock.forward(time.Second)
	if _, err := b.Sync(bounded(t), r.nodes); err != nil {
		t.Fatal(err)
	}
	select {
	case <-told:
	default:
		t.Error("OnRevoke was not called")
	}
	refuses := func(what string, s identity.Source) {
		t.Helper()
		if _, err := handshake(t, a.Source().Client(s.Me()), s.Server()); !errors.Is(err, identity.ErrRevoked) {
			t.Errorf("%s as server: %v, want ErrRevoked", what, err)
		}
		if err, _ := handshake(t, s.Client(a.Source().Me()), a.Source().Server()); !errors.Is(err, identity.ErrRevoked) {
			t.Errorf("%s as client: %v, want ErrRevoked", what, err)
		}
	}
	refuses("the control plane", r.Source())
	refuses("b", b.Source())
	refuses("b after a restart", newDaemon(t, "b", b.dir, r.clock).Source())
	r.open()
	refuses("the control plane after a restart", r.Source())
	if err1, err2 := handshake(t, b.Source().Client(r.Source().Me()), r.Source().Server()); err1 != nil || err2 != nil {
		t.Errorf("b is refused, too: %v, %v", err1, err2)
	}
	if len(r.RevokedUsers()) != 1 {
		t.Errorf("revoked NATS users: %v, want that of a", r.RevokedUsers())
	}
	if answer := r.Renew("a", identity.Ask{V: 1, Name: "a", Time: r.clock.now()}); answer.Error == "" {
		t.Error("a renews")
	}
	again := newDaemon(t, "a", t.TempDir(), r.clock)
	refused(t, r, "an old token", again.Join(bounded(t), r.joins, old), `node "a" was revoked at `)
	refused(t, r, "an old token for another node", newDaemon(t, "c", t.TempDir(), r.clock).Join(bounded(t), r.joins, old), "")
	if err := again.Join(bounded(t), r.joins, r.token(authority.TokenRequest{Name: "a"})); err != nil {
		t.Errorf("a new token: %v", err)
	}
	if err1, err2 := handshake(t, again.Source().Client(r.Source().Me()), r.Source().Server()); err1 != nil || err2 != nil {
		t.Errorf("the node that has joined again is refused: %v, %v", err1, err2)
	}
}

// TestRevokedNodeForgets tells a node that it is revoked.
func TestRevokedNodeForgets(t *testing.T) {
	r := newRig(t)
	d := r.joined("a")
	ended := make(chan error, 1)
	go func() { ended <- d.Serve(t.Context(), r.nodes, func() {}) }()
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		r.nodes.mu.Lock()
		listens := len(r.nodes.listeners) > 1
		r.nodes.mu.Unlock()
		if listens {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the node does not listen")
		}
	}
	if err := r.Revoke("a"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, identity.ErrRevoked) || !strings.Contains(err.Error(), "it needs a new token") {
			t.Errorf("it ends with %v", err)
		}
	case <-time.After(limit):
		t.Fatal("the node goes on")
	}
	if newDaemon(t, "a", d.dir, r.clock).Joined() {
		t.Error("the node has kept its credentials")
	}
}

// TestRestoredForLong checks that users that a restored state does not know stay revoked. They may
// be valid for longer than this authority's certificates.
func TestRestoredForLong(t *testing.T) {
	r := newRig(t)
	r.joined("a")
	if nodes, err := r.Restored(false); err != nil || len(nodes) != 1 || len(r.RevokedUsers()) != 2 {
		t.Fatalf("restored %q, %v, revoked %v; want one node and all users", nodes, err, r.RevokedUsers())
	}
	r.clock.forward(365 * 24 * time.Hour)
	r.token(authority.TokenRequest{}) // drops what has expired
	if users := r.RevokedUsers(); len(users) != 1 || users["*"].IsZero() {
		t.Errorf("revoked users a year later: %v, want all, and not that of the node", users)
	}
}

// TestClocks joins and renews with clocks that differ.
func TestClocks(t *testing.T) {
	for _, tc := range []struct {
		skew time.Duration
		want string
	}{
		{identity.MaxSkew - 5*time.Second, ""},
		{-identity.MaxSkew + 5*time.Second, ""},
		{7*time.Minute + 12*time.Second, "clock of node gpu-7 is 7m12s ahead of the control plane's; set the clock"},
		{-3 * time.Hour, "clock of node gpu-7 is 3h0m0s behind the control plane's; set the clock"},
	} {
		r := newRig(t)
		d := newDaemon(t, "gpu-7", t.TempDir(), &clock{add: tc.skew})
		err := d.Join(bounded(t), r.joins, r.token(authority.TokenRequest{}))
		if refused(t, r, tc.skew.String(), err, tc.want); tc.want != "" {
			continue
		}
		other := r.joined("b").Source()
		for _, s := range []identity.Source{r.Source(), other} {
			err1, err2 := handshake(t, d.Source().Client(s.Me()), s.Server())
			err3, err4 := handshake(t, s.Client(d.Source().Me()), d.Source().Server())
			if err := errors.Join(err1, err2, err3, err4); err != nil {
				t.Errorf("a clock that is off by %v: %v with %v", tc.skew, err, s.Me())
			}
		}
		// Later, the clock goes wrong. Both sides say so, and the node stays a member.
		d.clock.forward(-tc.skew + 20*time.Minute)
		if _, err := d.Sync(bounded(t), r.nodes); err != nil {
			t.Error(err)
		}
		const want = "clock of node gpu-7 is 20m0s ahead of the control plane's; set the clock"
		if !strings.Contains(d.log.String(), want) || !strings.Contains(r.log.String(), want) {
			t.Errorf("want %q of both sides, got\n%s\n%s", want, d.log, r.log)
		}
	}
}

// TestCertificatesAreBounded has a member ask for certificates again and again.
func TestCertificatesAreBounded(t *testing.T) {
	r := newRig(t)
	r.joined("a")
	r.joined("b")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(name string) identity.Answer {
		me := identity.Name{Cluster: r.Source().Me().Cluster, Role: identity.Node, Name: name}.URI()
		csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{me}}, key)
		if err != nil {
			t.Fatal(err)
		}
		return r.Renew(name, identity.Ask{V: 1, Name: name, Time: r.clock.now(), Request: csr})
	}
	got := 1 // from joining
	for ; got < 100 && ask("a").Error == ""; got++ {
	}
	if answer := ask("a"); got != 32 || !strings.Contains(answer.Error, "has 32 certificates") {
		t.Errorf("got %d certificates, then %q, want 32", got, answer.Error)
	}
	if answer := ask("b"); answer.Error != "" {
		t.Errorf("another node: %s", answer.Error)
	}
	r.clock.forward(48 * time.Hour)
	if answer := ask("a"); answer.Error != "" {
		t.Errorf("after they have expired: %s", answer.Error)
	}
}

package authority_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestFilesAreSecret checks the modes of all files that both sides write.
func TestFilesAreSecret(t *testing.T) {
	r := newRig(t)
	d := r.joined("a")
	files := 0
	for _, dir := range []string{r.dir, d.dir} {
		err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
			if err == nil && !info.IsDir() {
				if files++; info.Mode() != 0o600 {
					t.Errorf("%s has mode %v, want 0600", path, info.Mode())
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 4 {
		t.Errorf("%d files, want a key, a certificate, a state and credentials", files)
	}
}

// TestSourcesKnowEachOther connects a control plane and two nodes with each other.
func TestSourcesKnowEachOther(t *testing.T) {
	r := newRig(t)
	a, b := r.joined("a").Source(), r.joined("b").Source()
	control := r.Source()
	if want := (identity.Name{Cluster: control.Me().Cluster, Role: identity.Node, Name: "a"}); a.Me() != want {
		t.Errorf("a is %+v, want %+v", a.Me(), want)
	}
	for _, pair := range [][2]identity.Source{{control, a}, {a, control}, {a, b}, {b, a}} {
		if err1, err2 := handshake(t, pair[0].Client(pair[1].Me()), pair[1].Server()); err1 != nil || err2 != nil {
			t.Errorf("%v to %v: %v, %v", pair[0].Me(), pair[1].Me(), err1, err2)
		}
	}
	old := a.Client(b.Me())
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, err := handshake(t, old, b.Server()); err == nil {
		t.Error("TLS 1.2 is accepted")
	}
}

// TestNames joins under names that have to be escaped in certificates.
func TestNames(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"gpu-7.example.com", "böx", "a%2Fb", "a?b#c", "..", "[::1]"} {
		d := r.joined(name)
		if got := d.Source().Me().Name; got != name {
			t.Errorf("%q joins as %q", name, got)
		}
		if err1, err2 := handshake(t, r.Source().Client(d.Source().Me()), d.Source().Server()); err1 != nil || err2 != nil {
			t.Errorf("%q: %v, %v", name, err1, err2)
		}
	}
}

// TestOneNodeIsNotAnother uses a's credentials where b's are wanted, and those of another cluster.
func TestOneNodeIsNotAnother(t *testing.T) {
	r, other := newRig(t), newRig(t)
	a, b, stranger := r.joined("a").Source(), r.joined("b").Source(), other.joined("a").Source()
	if err, _ := handshake(t, r.Source().Client(b.Me()), a.Server()); err == nil || !strings.Contains(err.Error(), "the server is node a, want node b") {
		t.Errorf("a in place of b: %v", err)
	}
	if err, _ := handshake(t, a.Client(r.Source().Me()), b.Server()); err == nil || !strings.Contains(err.Error(), "the server is node b, want control up") {
		t.Errorf("b in place of a control plane: %v", err)
	}
	hostile := stranger.Client(a.Me())
	hostile.InsecureSkipVerify, hostile.VerifyConnection = true, nil
	if _, err := handshake(t, hostile, a.Server()); err == nil {
		t.Error("a server accepts a client of another cluster")
	} else if !strings.Contains(a.Explain(err).Error(), "the other side is node a of cluster "+stranger.Me().Cluster) {
		t.Errorf("the server says %v", a.Explain(err))
	}
	if err, _ := handshake(t, a.Client(stranger.Me()), stranger.Server()); err == nil {
		t.Error("a client accepts a server of another cluster")
	} else if !strings.Contains(a.Explain(err).Error(), "the other side is node a of cluster "+stranger.Me().Cluster) {
		t.Errorf("the client says %v", a.Explain(err))
	}
	if _, err := handshake(t, &tls.Config{InsecureSkipVerify: true}, a.Server()); err == nil {
		t.Error("a server accepts a client without a certificate")
	}
}

// TestTokens joins with tokens that are good for one thing and not for another.
func TestTokens(t *testing.T) {
	r := newRig(t)
	for name, tc := range map[string]struct {
		req   authority.TokenRequest
		nodes []string // that join in turn
		wait  time.Duration
		want  string // of the last one; empty: it joins
	}{
		"for ever":         {authority.TokenRequest{}, []string{"e1", "e2"}, 100 * time.Hour, ""},
		"in time":          {authority.TokenRequest{TTL: time.Hour}, []string{"t1"}, 59 * time.Minute, ""},
		"expired":          {authority.TokenRequest{TTL: time.Hour}, []string{"t2"}, 61 * time.Minute, "the token has expired at "},
		"expired long ago": {authority.TokenRequest{TTL: time.Hour}, []string{"t3"}, 48 * time.Hour, "the token is wrong"},
		"its last use":     {authority.TokenRequest{Uses: 2}, []string{"u1", "u2"}, 0, ""},
		"used up":          {authority.TokenRequest{Uses: 2}, []string{"u3", "u4", "u5"}, 0, "the token is used up: it was for 2 uses"},
		"of this name":     {authority.TokenRequest{Name: "n1"}, []string{"n1"}, 0, ""},
		"of another name":  {authority.TokenRequest{Name: "n2"}, []string{"n3"}, 0, `the token is for node "n2"`},
		"of a bad name":    {authority.TokenRequest{}, []string{"n 4"}, 0, `the name is "n 4"`},
	} {
		token := r.token(tc.req)
		r.clock.forward(tc.wait)
		var err error
		for _, node := range tc.nodes {
			if err != nil {
				t.Errorf("%s: %v, want only the last node to be refused", name, err)
			}
			err = newDaemon(t, node, t.TempDir(), r.clock).Join(bounded(t), r.joins, token)
		}
		refused(t, r, name, err, tc.want)
	}
	wrong := r.token(authority.TokenRequest{})
	secret := wrong.Secret
	wrong.Secret = "A" + strings.Repeat("B", len(secret)-1)
	refused(t, r, "wrong", newDaemon(t, "w", t.TempDir(), r.clock).Join(bounded(t), r.joins, wrong), "the token is wrong")
}

// refused checks that both sides say why a node cannot join.
func refused(t *testing.T, r *rig, name string, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return
	}
	var refusal *identity.RefusedError
	if !errors.As(err, &refusal) || !strings.Contains(refusal.Cause, want) {
		t.Errorf("%s: %v, want a refusal that says %q", name, err, want)
	}
	if !strings.Contains(strings.ReplaceAll(r.log.String(), `\"`, `"`), want) {
		t.Errorf("%s: the authority does not say %q:\n%s", name, want, r.log)
	}
}

// TestTokensAreKeptHashed looks for a token's secret in the authority's files.
func TestTokensAreKeptHashed(t *testing.T) {
	r := newRig(t)
	token := r.token(authority.TokenRequest{})
	b, err := os.ReadFile(filepath.Join(r.dir, "state.json"))
	if err != nil || !strings.Contains(string(b), token.ID()) || strings.Contains(string(b), token.Secret) {
		t.Errorf("%v; want the token's id %s and not its secret %s in\n%s", err, token.ID(), token.Secret, b)
	}
	again, err := identity.ParseToken(token.String())
	if err != nil || again != token {
		t.Errorf("%+v, %v, want %+v", again, err, token)
	}
	text := token.String()
	for _, bad := range []string{"", "secret", text[:30], text[:len(text)/2], strings.Replace(text, "-1.", "-9.", 1)} {
		if _, err := identity.ParseToken(bad); err == nil || strings.Contains(err.Error(), token.Secret) {
			t.Errorf("%.40q: %v, want an error without the secret", bad, err)
		}
	}
}

// TestLocalToken reads the token of local daemons again, and replaces it when its file is gone.
func TestLocalToken(t *testing.T) {
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "nats-token")
	local := func() identity.Token {
		t.Helper()
		token, err := r.LocalToken(file)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
			t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
		}
		return token
	}
	first := local()
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if r.open(); local() != first {
		t.Error("another token, want the same again")
	}
	for _, text := range []string{"", "XJ4DHPZ2PASSWORDOFOLD", newRig(t).token(authority.TokenRequest{}).String()} {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if local() == first {
			t.Errorf("the token of before, want a new one in place of %.20q", text)
		}
	}
	refused(t, r, "replaced", newDaemon(t, "a", t.TempDir(), r.clock).Join(bounded(t), r.joins, first), "the token is wrong")
	if err := newDaemon(t, "a", t.TempDir(), r.clock).Join(bounded(t), r.joins, local()); err != nil {
		t.Error(err)
	}
}

// TestNamesAreTaken joins under a name that another node has, until its certificate has expired.
func TestNamesAreTaken(t *testing.T) {
	r := newRig(t)
	token := r.token(authority.TokenRequest{})
	first := r.joined("a")
	late := newDaemon(t, "a", t.TempDir(), r.clock)
	refused(t, r, "taken", late.Join(bounded(t), r.joins, token), `the name "a" is taken`)
	if _, err := first.Sync(bounded(t), r.nodes); err != nil {
		t.Errorf("the first node: %v", err)
	}
	r.clock.forward(lifetime + identity.MaxSkew + time.Second)
	if err := late.Join(bounded(t), r.joins, token); err != nil {
		t.Errorf("when the certificate has expired: %v", err)
	}
	user, err := first.User()
	if err != nil {
		t.Fatal(err)
	}
	if len(r.RevokedUsers()) != 1 {
		t.Errorf("revoked users %v, want that of the first node, %.20s", r.RevokedUsers(), user)
	}
}

// TestRemovedNamesAreFree removes a node. It may come back, until another node has its name.
func TestRemovedNamesAreFree(t *testing.T) {
	r := newRig(t)
	token := r.token(authority.TokenRequest{})
	first := r.joined("a")
	if err := errors.Join(r.Release("a"), r.Release("nobody")); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Sync(bounded(t), r.nodes); err != nil {
		t.Errorf("the removed node comes back: %v", err)
	}
	second := newDaemon(t, "a", t.TempDir(), r.clock)
	if err := second.Join(bounded(t), r.joins, token); err != nil {
		t.Fatal(err)
	}
	if _, err := handshake(t, first.Source().Client(r.Source().Me()), r.Source().Server()); !errors.Is(err, identity.ErrRevoked) {
		t.Errorf("the removed node, when another one has its name: %v, want ErrRevoked", err)
	}
	if err1, err2 := handshake(t, second.Source().Client(r.Source().Me()), r.Source().Server()); err1 != nil || err2 != nil {
		t.Errorf("the new node: %v, %v", err1, err2)
	}
	refused(t, r, "the name is taken again", newDaemon(t, "a", t.TempDir(), r.clock).Join(bounded(t), r.joins, token), `the name "a" is taken`)
}

// TestLostAnswers loses answers. The node asks again with the same keys, and that is no second use
// of its token.
func TestLostAnswers(t *testing.T) {
	r := newRig(t)
	lost := 0
	r.joins.alter = func(b []byte) []byte {
		if lost++; lost == 1 {
			return nil // as if nobody listened
		}
		return b
	}
	if err := newDaemon(t, "a", t.TempDir(), r.clock).Join(bounded(t), r.joins, r.token(authority.TokenRequest{Uses: 1})); err != nil || lost != 2 {
		t.Errorf("%v after %d answers, want to join with the second", err, lost)
	}
}

// TestDamagedAnswers gives a node answers that it must not take.
func TestDamagedAnswers(t *testing.T) {
	r := newRig(t)
	stranger := newRig(t).joined("x")
	change := func(f func(*identity.Answer)) func([]byte) []byte {
		return func(b []byte) []byte {
			a, err := identity.DecodeAnswer(b)
			if err != nil {
				t.Error(err)
			}
			f(&a)
			if b, err = json.Marshal(a); err != nil {
				t.Error(err)
			}
			return b
		}
	}
	leaf, err := stranger.Source().Client(r.Source().Me()).GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		alter func([]byte) []byte
		want  string
	}{
		"truncated":           {func(b []byte) []byte { return b[:len(b)/2] }, "cannot be read: unexpected end of JSON input"},
		"of a later version":  {change(func(a *identity.Answer) { a.V = 2 }), "a message of version 2, want 1"},
		"without certificate": {change(func(a *identity.Answer) { a.Certificate = nil }), "certificate"},
		"half a certificate":  {change(func(a *identity.Answer) { a.Certificate = a.Certificate[:100] }), "certificate"},
		"another's":           {change(func(a *identity.Answer) { a.Certificate = leaf.Leaf.Raw }), "the certificate is of another key"},
	} {
		d := newDaemon(t, "n", t.TempDir(), r.clock)
		r.joins.alter = tc.alter
		err := d.Join(bounded(t), r.joins, r.token(authority.TokenRequest{}))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		if d.Joined() || newDaemon(t, "n", d.dir, r.clock).Joined() {
			t.Errorf("%s: the node has joined", name)
		}
		r.joins.alter = nil
		if err := r.Revoke("n"); err != nil {
			t.Error(err)
		}
	}
}

// TestBadAsks sends what no daemon would send.
func TestBadAsks(t *testing.T) {
	r := newRig(t)
	token := r.token(authority.TokenRequest{})
	_, user, err := queue.NewUser()
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	weak, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	me := func(name string) *url.URL {
		return identity.Name{Cluster: r.Source().Me().Cluster, Role: identity.Node, Name: name}.URI()
	}
	request := func(key any, uris ...*url.URL) []byte {
		b, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: uris}, key)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := request(key, me("a"))
	forged := append([]byte{}, good...)
	forged[len(forged)-1] ^= 1
	control := identity.Name{Cluster: r.Source().Me().Cluster, Role: identity.Control, Name: "a"}
	for name, tc := range map[string]struct {
		change func(*identity.Ask)
		want   string
	}{
		"another name":       {func(a *identity.Ask) { a.Request = request(key, me("b")) }, "has the name"},
		"two names":          {func(a *identity.Ask) { a.Request = request(key, me("a"), me("b")) }, "has the name"},
		"no name":            {func(a *identity.Ask) { a.Request = request(key) }, "has the name"},
		"a control plane":    {func(a *identity.Ask) { a.Request = request(key, control.URI()) }, "has the name"},
		"a signature":        {func(a *identity.Ask) { a.Request = forged }, "cannot be read"},
		"no request":         {func(a *identity.Ask) { a.Request = nil }, "cannot be read"},
		"a key of RSA":       {func(a *identity.Ask) { a.Request = request(weak, me("a")) }, "no ECDSA or Ed25519 key"},
		"a NATS user":        {func(a *identity.Ask) { a.User = "U" }, "the control plane failed to answer"},
		"an account as user": {func(a *identity.Ask) { a.User = "A" + user[1:] }, "the control plane failed to answer"},
		"a later version":    {func(a *identity.Ask) { a.V = 7 }, "a message of version 7, want 1"},
		"a long name":        {func(a *identity.Ask) { a.Name = strings.Repeat("x", 300) }, "at most 255 bytes"},
	} {
		ask := identity.Ask{V: 1, Name: "a", Secret: token.Secret, Request: good, User: user, Time: r.clock.now()}
		tc.change(&ask)
		b, err := json.Marshal(ask)
		if err != nil {
			t.Fatal(err)
		}
		if answer := r.ask(b, token.ID()); !strings.Contains(answer.Error, tc.want) || len(answer.Certificate) > 0 {
			t.Errorf("%s: %+v, want an error with %q", name, answer, tc.want)
		}
	}
	b, err := json.Marshal(identity.Ask{V: 1, Name: "a", Secret: token.Secret, Request: good, User: user, Time: r.clock.now()})
	if err != nil {
		t.Fatal(err)
	}
	if answer := r.ask(b[:len(b)-9], token.ID()); !strings.Contains(answer.Error, "cannot be read") {
		t.Errorf("half an ask: %+v", answer)
	}
	if answer := r.ask(b, r.token(authority.TokenRequest{}).ID()); !strings.Contains(answer.Error, "the token is wrong") {
		t.Errorf("the secret of another token: %+v", answer)
	}
	// All of this has left the name and the token as they were.
	if answer := r.ask(b, token.ID()); answer.Error != "" || len(answer.Certificate) == 0 {
		t.Errorf("a good ask: %+v", answer)
	}
	// An answer goes to its sender alone.
	sent := make(chan string, 8)
	for _, kind := range []string{"order", "revoked"} {
		_, _ = r.joins.Listen("", kind, func(string, string, []byte) { sent <- kind })
		_ = r.joins.Send(token.ID(), identity.KindJoin, kind, b)
	}
	select {
	case kind := <-sent:
		t.Errorf("an answer of kind %s", kind)
	default:
	}
}

// ask sends a message about a token, and returns the answer.
func (r *rig) ask(b []byte, id string) identity.Answer {
	r.t.Helper()
	var answer identity.Answer
	stop, err := r.joins.Listen(id, identity.KindAnswer+"x", func(_, _ string, data []byte) {
		var err error
		if answer, err = identity.DecodeAnswer(data); err != nil {
			r.t.Error(err)
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
	defer stop()
	if err := r.joins.Send(id, identity.KindJoin, identity.KindAnswer+"x", b); err != nil {
		r.t.Fatal(err)
	}
	return answer
}

// TestOpenRefuses opens authorities whose files do not fit together.
func TestOpenRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		damage func(dir string) error
		want   string
	}{
		"no key": {func(dir string) error { return os.Remove(filepath.Join(dir, "ca.key")) }, "restore the key"},
		"another's key": {func(dir string) error {
			return os.Rename(filepath.Join(newRig(t).dir, "ca.key"), filepath.Join(dir, "ca.key"))
		}, "not of the key"},
		"half a certificate": {func(dir string) error { return os.Truncate(filepath.Join(dir, "ca.crt"), 200) }, "no PEM"},
		"half a state":       {func(dir string) error { return os.Truncate(filepath.Join(dir, "state.json"), 20) }, "state.json"},
		"a later state": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "state.json"), []byte(`{"v": 9}`), 0o600)
		}, "version 9, want 1"},
	} {
		r := newRig(t)
		r.token(authority.TokenRequest{})
		if err := tc.damage(r.dir); err != nil {
			t.Fatal(err)
		}
		_, err := authority.Open(authority.Config{Dir: r.dir, Name: "up", Now: time.Now, Users: r.keys})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// TestStandingToken returns the same token to a caller that has kept it, and makes a new one when
// its text is lost or the token is void.
func TestStandingToken(t *testing.T) {
	r := newRig(t)
	standing := func(text string, wantMade bool) identity.Token {
		t.Helper()
		token, made, err := r.StandingToken(text, authority.Rotation{})
		if err != nil || made != wantMade {
			t.Fatalf("a new token: %v, %v, want %v", made, err, wantMade)
		}
		return token
	}
	first := standing("", true)
	if r.open(); standing(first.String()+"\n", false) != first {
		t.Error("another token, want the same again")
	}
	r.clock.forward(300 * 24 * time.Hour)
	if err := newDaemon(t, "a", t.TempDir(), r.clock).Join(bounded(t), r.joins, first); err != nil {
		t.Errorf("join after a year: %v", err)
	}
	if err := r.RevokeToken(first.ID()); err != nil {
		t.Fatal(err)
	}
	second := standing(first.String(), true)
	refused(t, r, "void", newDaemon(t, "b", t.TempDir(), r.clock).Join(bounded(t), r.joins, first), "the token is wrong")
	if standing("lost", true); r.Tokens()[0].ID == second.ID() || len(r.Tokens()) != 1 {
		t.Errorf("tokens %v, want a new one alone", r.Tokens())
	}
}

// TestRotation replaces a token by its age. The earlier one is valid for a while, and the new
// one expires if nobody replaces it.
func TestRotation(t *testing.T) {
	r := newRig(t)
	every := authority.Rotation{Every: 24 * time.Hour, Overlap: 10 * time.Minute}
	rotated := func(text string, wantMade bool) identity.Token {
		t.Helper()
		token, made, err := r.StandingToken(text, every)
		if err != nil || made != wantMade {
			t.Fatalf("a new token: %v, %v, want %v", made, err, wantMade)
		}
		return token
	}
	joins := func(name string, with identity.Token) error {
		t.Helper()
		return newDaemon(t, name, t.TempDir(), r.clock).Join(bounded(t), r.joins, with)
	}
	eternal, _, err := r.StandingToken("", authority.Rotation{})
	if err != nil {
		t.Fatal(err)
	}
	rotated(eternal.String(), false) // an earlier version has made it a moment ago
	r.clock.forward(every.Every)
	first := rotated(eternal.String(), true)
	for _, token := range []identity.Token{eternal, first} {
		if err := joins("in-time-"+strings.ToLower(token.ID()), token); err != nil {
			t.Errorf("join within the overlap: %v", err)
		}
	}
	r.clock.forward(every.Overlap + time.Second)
	refused(t, r, "expired", joins("late", eternal), "the token has expired")
	if r.open(); rotated(first.String(), false) != first {
		t.Error("another token, want the same again")
	}
	r.clock.forward(every.Every - every.Overlap)
	second := rotated(first.String(), true)
	if token := rotated(first.String(), true); token == second {
		t.Error("the text that is kept is old, and no new token was made")
	}
	rotated(second.String(), true) // it was replaced, so it expires soon, although it is young
	if err := r.RevokeToken(second.ID()); err != nil {
		t.Fatal(err)
	}
	last := rotated(second.String(), true)
	if all := r.Tokens(); len(all) != 1 || all[0].ID != last.ID() || !all[0].Expires.Equal(all[0].Created.Add(every.Every+every.Overlap)) {
		t.Errorf("tokens %+v after one was revoked, want the new one alone, which expires", all)
	}
	r.clock.forward(every.Every + every.Overlap + time.Second)
	refused(t, r, "never replaced", joins("never", last), "the token has expired")
}

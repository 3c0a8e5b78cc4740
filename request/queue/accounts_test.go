package queue

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestStreamsFollowTheKeys starts servers with and without keys on one folder. Each server finds
// what the one before has stored, also when the keys are lost.
func TestStreamsFollowTheKeys(t *testing.T) {
	dir := t.TempDir()
	first, second := newKeys(t), newKeys(t)
	start := func(keys *Keys) *Server {
		t.Helper()
		c := ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler), Keys: keys}
		if keys != nil {
			c.Listen = "127.0.0.1:0"
		}
		s, err := StartServer(c)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for i, keys := range []*Keys{nil, first, first, nil, second, first} {
		s := start(keys)
		kv, err := OpenKV(t.Context(), connect(t, s), s.Disk(), "things")
		if err != nil {
			t.Fatal(err)
		}
		value, _, err := kv.Get(t.Context(), "k")
		if i == 0 && !errors.Is(err, ErrNotFound) || i > 0 && (err != nil || string(value) != strings.Repeat("x", i)) {
			t.Errorf("start %d: %q, %v", i, value, err)
		}
		if _, err := kv.Put(t.Context(), "k", []byte(strings.Repeat("x", i+1))); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	// Two accounts with streams are no choice that a program should make.
	account := filepath.Join(dir, "jetstream", first.streams)
	if err := os.CopyFS(filepath.Join(dir, "jetstream", second.streams), os.DirFS(account)); err != nil {
		t.Fatal(err)
	}
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler), Listen: "127.0.0.1:0", Keys: first})
	if err == nil {
		s.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "remove the others") {
		t.Errorf("streams of two accounts: %v", err)
	}
}

// TestStreamsOfKeysAreOpenedAgain closes and opens the streams of a server with keys, as it does
// after a failed write.
func TestStreamsOfKeysAreOpenedAgain(t *testing.T) {
	s := listening(t, t.TempDir(), "127.0.0.1:0", newKeys(t))
	t.Cleanup(s.Close)
	kv, err := OpenKV(t.Context(), connect(t, s), s.Disk(), "things")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(t.Context(), "k", []byte("1")); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		// nats-server writes what this goroutine of it reads at its start. If the machine is so busy
		// that it has not started yet, the race detector reports that.
		proctest.Until(t, "the server to read its queues", func() bool {
			stacks := make([]byte, 1<<20)
			return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte(".processJSAPIRoutedRequests("))
		})
		if failed, missing := s.reopen(); failed != nil || missing != nil {
			t.Fatalf("reopen %d: %v, %v", i, failed, missing)
		}
		value, _, err := kv.Get(t.Context(), "k")
		if err == nil {
			_, err = kv.Put(t.Context(), "k", append(value, '1'))
		}
		if err != nil || string(value) != strings.Repeat("1", i+1) {
			t.Errorf("after reopen %d: %q, %v", i, value, err)
		}
	}
	if err := s.writeError(); err != nil {
		t.Error(err)
	}
}

// TestKeysSurviveTheirFile writes keys and reads them again: users of the first are users of the
// second.
func TestKeysSurviveTheirFile(t *testing.T) {
	keys := newKeys(t)
	text, err := keys.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseKeys(text)
	if err != nil {
		t.Fatal(err)
	}
	s := listening(t, t.TempDir(), "127.0.0.1:0", again)
	t.Cleanup(s.Close)
	if err := Probe(s.URL(), nodeAccess(t, keys, "n")); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "{}", strings.Replace(string(text), `"SO`, `"SX`, 1), strings.Replace(string(text), "operator", "account", 1)} {
		if _, err := ParseKeys([]byte(bad)); err == nil {
			t.Errorf("keys of %.30q", bad)
		}
	}
}

// TestRevokedUsersAreCutOff revokes a user. Its connection ends; a token that is signed later is
// accepted.
func TestRevokedUsersAreCutOff(t *testing.T) {
	keys := newKeys(t)
	s := listening(t, t.TempDir(), "127.0.0.1:0", keys)
	t.Cleanup(s.Close)
	seed, public, err := NewUser()
	if err != nil {
		t.Fatal(err)
	}
	issue := func() Access {
		t.Helper()
		token, err := keys.Node(public, "n", time.Now().Add(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		return Access{User: func() (string, error) { return token, nil }, Seed: seed}
	}
	a := issue()
	refused := make(chan error, 1)
	a.Refused = func(err error) {
		select {
		case refused <- err:
		default:
		}
	}
	other := foreign(t, s.URL(), nodeAccess(t, keys, "other"), slog.New(slog.DiscardHandler))
	nc := foreign(t, s.URL(), a, slog.New(slog.DiscardHandler))
	cut := nc.StatusChanged(nats.RECONNECTING, nats.DISCONNECTED)
	revoked := map[string]time.Time{public: time.Now()}
	if err := s.Revoke(revoked); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]<-chan error{"revoked": refused, "cut": statusError(cut)} {
		select {
		case err := <-c:
			if !errors.Is(err, ErrRevoked) {
				t.Errorf("%s: %v, want ErrRevoked", what, err)
			}
		case <-time.After(waitLimit):
			t.Fatalf("not %s", what)
		}
	}
	if err := Probe(s.URL(), a); !errors.Is(err, ErrRefused) {
		t.Errorf("the revoked token: %v, want ErrRefused", err)
	}
	if !other.IsConnected() {
		t.Error("another user was cut off, too")
	}
	// A second revocation does not let the first user in again, and JetStream goes on.
	revoked["UAAA"] = time.Now()
	if err := s.Revoke(revoked); err != nil {
		t.Fatal(err)
	}
	if err := Probe(s.URL(), a); !errors.Is(err, ErrRefused) {
		t.Errorf("the revoked token, after another revocation: %v, want ErrRefused", err)
	}
	if _, err := OpenKV(t.Context(), connect(t, s), s.Disk(), "things"); err != nil {
		t.Error(err)
	}
	revoked[public] = time.Now().Add(-time.Minute)
	if err := s.Revoke(revoked); err != nil {
		t.Fatal(err)
	}
	if err := Probe(s.URL(), issue()); err != nil {
		t.Errorf("a token that was signed later: %v", err)
	}
}

func statusError(from chan nats.Status) <-chan error {
	out := make(chan error, 1)
	go func() { <-from; out <- ErrRevoked }()
	return out
}

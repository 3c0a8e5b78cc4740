package provider

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/peer"
)

// guard is a guarded handler and its log.
type guard struct {
	http.Handler
	inside  http.Handler
	guesses *guesses
	log     *bytes.Buffer
}

func newGuard(t *testing.T, trusted ...string) *guard {
	t.Helper()
	proxies, err := peer.ParseProxies(trusted)
	if err != nil {
		t.Fatal(err)
	}
	g := &guard{log: &bytes.Buffer{}}
	p := &Provider{Config: Config{Credentials: &Credentials{"admin", "secret"}, Proxies: proxies}, guesses: newGuesses(newLog(g.log))}
	g.guesses, g.Handler = p.guesses, p.Guard(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	g.inside = p.GuardInside(http.NotFoundHandler())
	return g
}

// ask sends a request from an address. It returns the answer and how long it took. An empty
// password means no credentials.
func (g *guard) ask(ctx context.Context, from, forwarded, password string) (*httptest.ResponseRecorder, time.Duration) {
	r := httptest.NewRequestWithContext(ctx, get, "/system/info", nil)
	r.RemoteAddr = from + ":80"
	if forwarded != "" {
		r.Header.Set("X-Forwarded-For", forwarded)
	}
	if password != "" {
		r.SetBasicAuth("admin", password)
	}
	w, start := httptest.NewRecorder(), time.Now()
	g.ServeHTTP(w, r)
	return w, time.Since(start)
}

// TestGuessesAreSlow checks that the first ten wrong passwords of a client are answered at once,
// and that a client with the right password never waits.
func TestGuessesAreSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuard(t)
		const evil, other = "192.0.2.1", "192.0.2.2"
		right := func(from string) {
			t.Helper()
			if w, took := g.ask(t.Context(), from, "", "secret"); w.Code != http.StatusOK || took > 0 {
				t.Errorf("the right password from %s: %d after %v", from, w.Code, took)
			}
		}
		for i := range 300 {
			var want time.Duration
			if i >= guessesFree {
				want = guessPause
			}
			if w, took := g.ask(t.Context(), evil, "203.0.113.9", fmt.Sprint(i)); w.Code != http.StatusUnauthorized || took != want || w.Header().Get("Www-Authenticate") == "" {
				t.Fatalf("guess %d: %d after %v, want 401 after %v", i, w.Code, took, want)
			}
			right(evil)
		}
		for range 20 {
			if w, took := g.ask(t.Context(), evil, "", ""); w.Code != http.StatusUnauthorized || took > 0 {
				t.Errorf("no password: %d after %v, want 401 at once: nothing was guessed", w.Code, took)
			}
		}
		right(evil)
		right(other)
		if w, took := g.ask(t.Context(), other, "", "wrong"); w.Code != http.StatusUnauthorized || took > 0 {
			t.Errorf("another client's first guess: %d after %v", w.Code, took)
		}
		time.Sleep(guessMemory + time.Second)
		if w, took := g.ask(t.Context(), evil, "", "wrong"); w.Code != http.StatusUnauthorized || took > 0 {
			t.Errorf("after a while: %d after %v", w.Code, took)
		}
		if lines := strings.Count(g.log.String(), "\n"); lines < 10 || lines > 30 || !strings.Contains(g.log.String(), "client="+evil) || strings.Contains(g.log.String(), "secret") {
			t.Errorf("%d lines in the log of 290 s, want one each %v:\n%.1000s", lines, guessLogEvery, g.log)
		}
	})
}

// TestConcurrentGuessesAreBounded checks that few answers are delayed at a time, and that a client
// that leaves is not waited for.
func TestConcurrentGuessesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuard(t)
		for range guessesFree {
			g.ask(t.Context(), "192.0.2.1", "", "x")
		}
		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range guessesLateOf {
			wg.Go(func() { g.ask(ctx, "192.0.2.1", "", "x") })
		}
		synctest.Wait()
		w, took := g.ask(t.Context(), "192.0.2.1", "", "x")
		if w.Code != http.StatusTooManyRequests || took > 0 || w.Header().Get("Retry-After") != "1" || w.Header().Get("Connection") != "close" {
			t.Errorf("one too many: %d after %v, %v", w.Code, took, w.Header())
		}
		if w, took := g.ask(t.Context(), "192.0.2.1", "", "secret"); w.Code != http.StatusOK || took > 0 {
			t.Errorf("the right password: %d after %v", w.Code, took)
		}
		leave()
		synctest.Wait()
		if g.guesses.late != 0 {
			t.Errorf("%d answers wait for clients that are gone", g.guesses.late)
		}
		wg.Wait()
		for i := range guessesLate { // from many clients
			for range guessesFree {
				g.ask(t.Context(), fmt.Sprintf("10.1.%d.%d", i>>8, i&255), "", "x")
			}
			wg.Go(func() { g.ask(t.Context(), fmt.Sprintf("10.1.%d.%d", i>>8, i&255), "", "x") })
		}
		synctest.Wait()
		for range guessesFree {
			g.ask(t.Context(), "10.2.0.0", "", "x")
		}
		if w, took := g.ask(t.Context(), "10.2.0.0", "", "x"); w.Code != http.StatusTooManyRequests || took > 0 {
			t.Errorf("one too many of all: %d after %v", w.Code, took)
		}
		wg.Wait()
		for i := range 2 * guessClients {
			g.ask(t.Context(), fmt.Sprintf("10.%d.%d.1", 3+i>>8, i&255), "", "x")
		}
		if n := g.guesses.clients.Len(); n != guessClients {
			t.Errorf("%d clients are remembered, want %d", n, guessClients)
		}
	})
}

// TestGuessesBehindProxies checks that clients behind a trusted proxy count separately.
func TestGuessesBehindProxies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuard(t, "192.0.2.1/32")
		for range guessesFree + 1 {
			g.ask(t.Context(), "192.0.2.1", "203.0.113.1", "x")
		}
		if _, took := g.ask(t.Context(), "192.0.2.1", "203.0.113.2", "x"); took > 0 {
			t.Errorf("another client behind the proxy waits %v", took)
		}
		if _, took := g.ask(t.Context(), "192.0.2.1", "203.0.113.2, 203.0.113.1", "x"); took != guessPause {
			t.Errorf("a client that makes addresses up waits %v, want %v", took, guessPause)
		}
		g.Handler = g.inside // where 192.0.2.1 is a function's address
		if _, took := g.ask(t.Context(), "192.0.2.1", "203.0.113.3", "x"); took > 0 {
			t.Errorf("a function's first wrong password waits %v", took)
		}
		for i := range guessesFree {
			g.ask(t.Context(), "192.0.2.1", fmt.Sprintf("203.0.113.%d", 10+i), "x")
		}
		if _, took := g.ask(t.Context(), "192.0.2.1", "203.0.113.4", "x"); took != guessPause {
			t.Errorf("a function that makes addresses up waits %v, want %v", took, guessPause)
		}
	})
}
